"""Notices to systemd about a process, as in sd_notify(3): that it is ready, alive, or stopping.

A loop that proves that the process does its work calls `tick` each time round. There is no timer
behind it: a loop that hangs is silent, and systemd starts the process again.

Where a probe looks from outside, as in Kubernetes, the process touches a file instead: the file is
there once the process is ready, and old when its loop hangs.
"""

import logging
import os
import socket
import time
from pathlib import Path
from typing import Final

LOGGER: Final = logging.getLogger(__name__)
ALIVE_FILE: Final = "EMBEDFARM_ALIVE_FILE"
"""Names a file that a role touches while its loop goes round, for probes that look at its age."""
TOUCH_SECONDS: Final = 5.0


class Notifier:
    """Sender of this process's notices to systemd; it sends none where systemd asked for none.

    It takes systemd's variables out of the environment, so that no child speaks in its name, and
    `EMBEDFARM_ALIVE_FILE` with them. What an earlier process has left of that file, it removes.
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
        file = os.environ.pop(ALIVE_FILE, "")
        self._file = Path(file) if file else None
        self._touch_at = 0.0
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def tick(self, status: str) -> None:
        """Tell systemd that the process is ready and alive, and its status, no more than needed.

        The process says that it is ready once, its status when that changes, and that it is alive
        twice in the time after which systemd would start it again. It touches the file for probes
        every five seconds.

        Args:
            status: A few words for people; not empty.
        """
        now = time.monotonic()
        if self._file is not None and now >= self._touch_at:
            self._touch(self._file)
            self._touch_at = now + TOUCH_SECONDS
        if not self._address:
            return
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

    @staticmethod
    def _touch(file: Path) -> None:
        try:
            file.touch()
        except OSError as error:
            LOGGER.warning("%s could not be touched: %s", file, error)
