"""Notices to systemd about a process, as in sd_notify(3): that it is ready, alive, or stopping.

A loop that proves that the process does its work calls `tick` each time round. There is no timer
behind it: a loop that hangs is silent, and systemd starts the process again.
"""

import logging
import os
import socket
import time
from typing import Final

LOGGER: Final = logging.getLogger(__name__)


class Notifier:
    """Sender of this process's notices to systemd; it sends none where systemd asked for none.

    It takes systemd's variables out of the environment, so that no child speaks in its name.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        microseconds = int(os.environ.pop("WATCHDOG_USEC", "0"))
        owner = os.environ.pop("WATCHDOG_PID", "")
        mine = owner in {"", str(os.getpid())}
        self._pause_seconds = microseconds / 2e6 if mine else 0.0
        self._alive_at = 0.0
        self._status = ""

    def tick(self, status: str) -> None:
        """Tell systemd that the process is ready and alive, and its status, no more than needed.

        The process says that it is ready once, its status when that changes, and that it is alive
        twice in the time after which systemd would start it again.

        Args:
            status: A few words for people; not empty.
        """
        if not self._address:
            return
        now = time.monotonic()
        words = [] if self._status else ["READY=1"]
        if status != self._status:
            words.append(f"STATUS={status}")
        if self._pause_seconds and now >= self._alive_at:
            words.append("WATCHDOG=1")
            self._alive_at = now + self._pause_seconds
        self._status = status
        self._send(words)

    def stop(self) -> None:
        """Tell systemd that the process is stopping."""
        if self._status != "stopping":
            self._status = "stopping"
            self._send(["STOPPING=1", "STATUS=stopping"])

    def _send(self, words: list[str]) -> None:
        if not (self._address and words):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(words).encode(), self._address)
        except OSError as error:
            LOGGER.warning("systemd was not told %s: %s", words[0], error)
