"""A whole farm on this machine: a private server, a scheduler, a worker per device, and HTTP."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedfarm.contract.broker import (
    SERVER_DIRECTORY,
    UNAVAILABLE,
    PrivateServer,
    ServerError,
    closing_client,
    wait_until_ready,
)
from embedfarm.contract.processes import RUN_MODULE, RUN_ROLE, Child, ChildError, Supervisor
from embedfarm.contract.settings import Settings
from embedfarm.workers.device_groups import choose_devices
from embedfarm.workers.supervisor import WORKER, children, tell_exits

SERVER_SECONDS_MAX = 60.0  # to load an append-only file of some gigabytes
SHUTDOWN_SECONDS_MAX = 20.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class LocalFarm:
    """The running processes of a farm on this machine.

    Attributes:
        url: URL of the private server.
        server: Supervisor of the server.
        stations: Supervisor of the scheduler and the workers.
    """

    url: str
    server: Supervisor
    stations: Supervisor

    @property
    def failed(self) -> ChildError | None:
        """The error for which the farm cannot go on, if there is one."""
        stations = self.stations
        return self.server.failed or stations.failed or stations.unstartable(WORKER)


def scheduler_child(settings: Settings) -> Child:
    """Return the scheduler process to start; its server is `settings.redis_url`."""
    return Child(
        name="scheduler",
        command=[*RUN_ROLE, "embedfarm.scheduler.main"],
        environment=settings.environment(),
    )


def web_child(settings: Settings, port: int) -> Child:
    """Return the process to serve HTTP on loopback; its server is `settings.redis_url`."""
    return Child(
        name="web",
        command=[*RUN_MODULE, "embedfarm", "serve", "--port", str(port)],
        environment=settings.environment(),
    )


def ingest_child(settings: Settings) -> Child:
    """Return the process to do what HTTP and RQ ask for; its server is `settings.redis_url`."""
    command = [*RUN_MODULE, "embedfarm", "ingest"]
    return Child(name="ingest", command=command, environment=settings.environment())


@contextlib.contextmanager
def run_local_farm(
    directory: Path, settings: Settings, devices: str, workers: int, port: int = 0
) -> Iterator[LocalFarm]:
    """Run a private farm whose state is in `directory`, and stop it at the end.

    The same directory continues with the same server data.

    Args:
        directory: Directory for the server's data and the logs.
        settings: Settings that are passed on to every process.
        devices: Devices to use, as the flag `--devices` names them.
        workers: Number of CPU workers; 0 for the default.
        port: Port where HTTP is served on loopback; 0 for nowhere.

    Raises:
        ServerError: The server does not start.
        DeviceError: There are no such devices.
    """
    chosen = choose_devices(devices, workers, settings)
    server = PrivateServer.at(directory / SERVER_DIRECTORY)
    _stop_leftover(server)
    child = Child("server", server.command(settings), {}, die_with_parent=True)
    settings = settings.model_copy(update={"redis_url": server.url})
    stations = [scheduler_child(settings), *children(chosen, settings)]
    if port:
        stations += [ingest_child(settings), web_child(settings, port)]
    logs = directory / "logs"
    with contextlib.ExitStack() as stack:
        stack.callback(server.leave)
        # Nested, because the stations need the server while they drain.
        outer = stack.enter_context(Supervisor([child], logs, settings.drain_seconds))
        wait_until_ready(server.url, threading.Event(), SERVER_SECONDS_MAX)
        supervisor = Supervisor(
            stations, logs, settings.drain_seconds, on_exit=tell_exits(server.url)
        )
        inner = stack.enter_context(supervisor)
        yield LocalFarm(server.url, outer, inner)


def _stop_leftover(server: PrivateServer) -> None:
    """End a server that survived its farm, as it may where processes do not die with a parent."""
    if not server.alive():
        return
    with closing_client(server.url) as client, contextlib.suppress(*UNAVAILABLE):
        client.shutdown()
    deadline = time.monotonic() + SHUTDOWN_SECONDS_MAX
    while server.alive():
        if time.monotonic() > deadline:
            raise ServerError(f"an older server of {server.directory} does not end")
        threading.Event().wait(POLL_SECONDS)
