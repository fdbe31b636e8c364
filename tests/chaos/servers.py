"""Servers of the farm behind one address, whichever process it leads to."""

import signal
import threading
import time
from pathlib import Path
from typing import Final

import redis

from embedfarm.contract.broker import (
    PrivateServer,
    carried_server,
    closing_client,
    wait_until_ready,
)
from embedfarm.contract.processes import Child, Exit, Supervisor
from embedfarm.contract.settings import Settings
from tests.chaos.roles import Deaths, deliver
from tests.chaos.server_log import cut_unreadable
from tests.support import free_port, wait_until

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 5.0
LAG_SECONDS: Final = 1.0  # a replica may be behind by so much when it is promoted


class Node:
    """A server process with its data, kept alive; it takes replicas at a port of loopback."""

    def __init__(self, directory: Path, settings: Settings, deaths: Deaths) -> None:
        self._deaths = deaths
        self._closing = False
        self.private = PrivateServer.at(directory)
        self.port = free_port()
        command = self.private.command(settings, carried_server())
        command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--enable-debug-command", "local"]
        child = Child("server", command, {}, die_with_parent=True)
        self._supervisor = Supervisor([child], directory, STOP_SECONDS, on_exit=self._note)
        self._supervisor.start()
        wait_until_ready(self.private.url, threading.Event(), START_SECONDS)

    @property
    def pid(self) -> int:
        """Process id of the process that runs now, 0 without one."""
        return self._supervisor.pids.get("server", 0)

    def kill(self) -> None:
        """Kill the process; it is started again."""
        self._deaths.cause("server", signal.SIGKILL, self._signal)

    def _note(self, ended: Exit) -> None:
        """Note an exit; before the next start, do what an operator does about a damaged log."""
        self._deaths.note("server", ended.status, well=self._closing)
        cut_unreadable(self.private.directory)

    def _signal(self, number: signal.Signals) -> bool:
        return deliver(number, self.pid)

    def close(self) -> None:
        """Kill the process for good, and remove all its data."""
        self._closing = True
        self._signal(signal.SIGKILL)
        self._supervisor.stop()
        self.private.remove()


class Servers:
    """The server, and the replicas that take its place.

    Args:
        directory: Directory of their data, which may be a disk of its own.
        address: Path of the unix socket that leads to the present server.
        settings: The limits of the servers.
        deaths: Takes the ends of the servers.
    """

    def __init__(self, directory: Path, address: Path, settings: Settings, deaths: Deaths) -> None:
        self.url = f"unix://{address}"
        self._deaths = deaths
        self._losses: list[tuple[float, float]] = []
        self._directory = directory
        self._address = address
        self._settings = settings
        self._count = 0
        self._node = self._launch()
        self._point()

    def _launch(self) -> Node:
        self._count += 1
        return Node(self._directory / f"server-{self._count}", self._settings, self._deaths)

    def _point(self) -> None:
        """Let the address lead to the present node, at once for all that connect from now on."""
        fresh = self._address.with_suffix(".new")
        fresh.symlink_to(self._node.private.socket)
        fresh.replace(self._address)

    def kill(self) -> None:
        """Kill the server, which comes back on its log."""
        self._node.kill()

    def fail_over(self, lost_seconds: float) -> None:
        """Put a replica in the server's place that has not heard of its last writes."""
        replica = self._launch()
        with closing_client(replica.private.url) as client:
            client.replicaof("127.0.0.1", self._node.port)
            wait_until(lambda: _follows(client), START_SECONDS)
            began = time.time() - LAG_SECONDS
            client.replicaof("NO", "ONE")
        threading.Event().wait(lost_seconds)
        lost, self._node = self._node, replica
        lost.close()
        self._losses.append((began, time.time()))
        self._point()

    def forgot(self, at: float) -> bool:
        """Tell whether what was done at a Unix time went to a server that was then replaced.

        Until the replacement nobody could see what the replica had not heard of.
        """
        return any(began <= at <= ended for began, ended in self._losses)

    def lost_since(self, at: float) -> bool:
        """Tell whether a server lost something since a Unix time, or shortly before it."""
        return any(ended >= at for _, ended in self._losses)

    def close(self) -> None:
        """End the server, and remove its address."""
        self._node.close()
        self._address.unlink()


def _follows(client: redis.Redis) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")
