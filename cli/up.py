"""`embedfarm up`: a whole farm on this machine, which other verbs find by themselves."""

import socket
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from embedfarm.cli.options import (
    USAGE,
    CpuWorkers,
    Devices,
    fail,
    pin,
    plain_errors,
    read_settings,
    stop_on_signals,
)
from embedfarm.cli.supervision import all_beat, keep
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient, loaded_models
from embedfarm.contract.formatting import counted
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane, LaneLate
from embedfarm.contract.records import LaneAnswer
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.runs.private_farm import LocalFarm, run_local_farm
from embedfarm.workers.supervisor import WORKER

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65_535


def up(
    workers: CpuWorkers = 0,
    devices: Devices = "all",
    port: Annotated[
        int,
        typer.Option(min=0, max=PORT_MAX, help="Port on loopback to serve HTTP on; 0 for none."),
    ] = 0,
    warm: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Model that a worker loads before it is asked for, and keeps."
        ),
    ] = "",
) -> None:
    """Run a whole farm on this machine until it is stopped; other verbs here find it."""
    settings = pin(read_settings(), [warm] if warm else [])
    if port:
        try:
            socket.create_server((LOOPBACK, port)).close()
        except OSError as error:
            fail(f"cannot listen at {LOOPBACK}, port {port}: {error}", USAGE)
    stop = stop_on_signals()
    notifier = Notifier()
    place = settings.state_directory.expanduser()
    console = Console(highlight=False, soft_wrap=True)
    with plain_errors(), run_local_farm(place, settings, devices, workers, port) as farm:
        _greet(console, farm, place)
        with closing_client(farm.url) as client:
            watched = FarmClient(client)
            start = _Start(farm, watched, port, WarmUp(watched, farm.url, warm, settings))
            keep(
                stop,
                lambda: farm.failed,
                partial(start.is_ready, console),
                partial(notifier.tick, "up"),
            )
        notifier.stop()
        console.print(
            "stopping: workers finish the micro-batch in hand and give the rest back, for "
            f"{settings.drain_seconds:.0f} s at most; Ctrl-C again ends all at once"
        )


def _greet(console: Console, farm: LocalFarm, place: Path) -> None:
    """Say what runs, and how to use it, look at it and stop it."""
    own = [name for name in farm.stations.names if name.startswith(WORKER)]
    others = [name for name in farm.stations.names if name not in own]
    devices = ", ".join(name.removeprefix(WORKER) for name in own)
    console.print(
        f"up: {', '.join(others)}, {counted(len(own), 'worker')} ({devices}); logs in {place}/logs"
    )
    console.print(f"embed: embedfarm embed CORPUS --out DIRECTORY --redis {farm.url}")
    console.print("look: embedfarm top, embedfarm jobs ls, embedfarm workers; stop: Ctrl-C")


@dataclass
class WarmUp:
    """A request for one vector of a model, so that a worker loads it.

    Attributes:
        farm: The farm, whose workers say what they have loaded.
        url: URL of the farm's server.
        model: The model; "" for none.
        settings: The farm's limits.
    """

    farm: FarmClient
    url: str
    model: str
    settings: Settings
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def is_done(self) -> bool:
        """Tell whether a worker says that it has the model, which is asked for with the first call.

        A worker answers before its next heartbeat, and everybody else goes by heartbeats.

        Raises:
            LaneError: No worker can load it, or none did in time.
        """
        if not self.model:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="warm", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive() and self.model in loaded_models(self.farm.workers())

    def _run(self) -> None:
        try:
            with closing_client(self.url) as client:
                self._ask(Lane(client, self.settings))
        except BaseException as error:  # noqa: BLE001 # `is_done` raises it
            self._error = error

    def _ask(self, lane: Lane) -> LaneAnswer:
        """Ask for a vector, and again while no answer comes: loading may take longer than that."""
        end = time.monotonic() + self.settings.load_seconds_max
        while True:
            try:
                return lane.ask(JobSpec(model=self.model), ["warm"], self.settings.lane_seconds_max)
            except LaneLate:
                if time.monotonic() > end:
                    raise


@dataclass
class _Start:
    """What has been seen of a farm that is starting."""

    local: LocalFarm
    farm: FarmClient
    port: int
    warm_up: WarmUp
    _said: set[str] = field(default_factory=set)

    def is_ready(self, console: Console) -> bool:
        """Tell whether all that was asked for is there, and say so of each thing once."""
        pids = self.local.stations.pids
        workers = [pid for name, pid in pids.items() if name.startswith(WORKER)]
        if not (self.farm.plans.has_scheduler() and all_beat(self.farm, workers)):
            return False
        if self.port:
            if not _listens(self.port):
                return False
            self._say(console, f"serving http://{LOOPBACK}:{self.port}")
        if not self.warm_up.is_done():
            return False
        if self.warm_up.model:
            self._say(console, f"{self.warm_up.model} is loaded")
        return True

    def _say(self, console: Console, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            console.print(words)


def _listens(port: int) -> bool:
    """Tell whether somebody takes connections at that port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
