"""Processes of the farm as an operator keeps them: started again when they die."""

import contextlib
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from embedfarm.cli.options import INTERRUPTED
from embedfarm.contract.processes import Child, Exit, Supervisor
from embedfarm.contract.settings import Settings
from embedfarm.runs.private_farm import ingest_child, scheduler_child, web_child
from embedfarm.workers.devices import discover
from embedfarm.workers.supervisor import children
from tests.chaos.worker import SWITCHES
from tests.support import wait_until

WORKERS: Final = 2
LOG_BYTES: Final = 2000
DISK: Final = "CHAOS_DISK"  # name of a switch file; the disk of a process fails while it is there
EMBED_DISK: Final = "disk-embed"
INGEST_DISK: Final = "disk-ingest"
FAILING: Final = Path(__file__).with_name("failing")
ENDS: Final = {  # statuses of who ends by a signal; SIGTERM may come before anybody heeds it
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {-signal.SIGTERM, 128 + signal.SIGTERM, INTERRUPTED},
    signal.SIGINT: {-signal.SIGINT, INTERRUPTED},
}


@dataclass
class Deaths:
    """Ends of processes that nobody had asked for."""

    unasked: list[str] = field(default_factory=list)
    _asked: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cause(
        self, name: str, number: signal.Signals, deliver: Callable[[signal.Signals], bool]
    ) -> None:
        """Signal a process by `deliver`, and excuse its end by that signal if there was a process.

        The lock keeps anybody from noting that end before it is excused.
        """
        with self._lock:
            if deliver(number):
                self._asked[name] |= ENDS.get(number, set())

    def note(self, name: str, status: int, why: str = "", *, well: bool = False) -> None:
        """Note the end of a process as unasked for, unless it ended `well` or by our signal.

        A signal excuses one end only.
        """
        with self._lock:
            asked = self._asked.pop(name, set())
        if not well and status not in asked:
            self.unasked.append(f"{name} ended with status {status} {why}".strip())


class Role:
    """A process that is kept alive, and can be shot at, frozen and restarted."""

    def __init__(self, child: Child, logs: Path, settings: Settings, deaths: Deaths) -> None:
        self.name = child.name
        self._child = child
        self._logs = logs
        self._drain_seconds = settings.drain_seconds
        self._deaths = deaths
        self._supervisor = self._start()

    def _start(self) -> Supervisor:
        self._closing = False
        supervisor = Supervisor([self._child], self._logs, self._drain_seconds, (), self._note)
        supervisor.start()
        return supervisor

    def _note(self, ended: Exit) -> None:
        well = self._closing and ended.status == 0
        self._deaths.note(self.name, ended.status, self._tail(), well=well)

    def _tail(self) -> str:
        data = (self._logs / f"{self.name}.log").read_bytes()[-LOG_BYTES:]
        return data.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process; it is started again."""
        self._deaths.cause(self.name, signal.SIGKILL, self.signal)

    @property
    def pid(self) -> int:
        """Process id of the process that runs now, 0 without one."""
        return self._supervisor.pids.get(self.name, 0)

    def signal(self, number: signal.Signals) -> bool:
        """Signal the process; return whether it runs now."""
        return deliver(number, self.pid)

    def restart(self) -> None:
        """Terminate the process, let it drain, and start a new one, as an upgrade does it.

        The signal waits until the process handles it: one that is still starting would die of it.
        """
        wait_until(lambda: heeds(self.pid, signal.SIGTERM), 60)
        self.close()
        self._supervisor = self._start()

    def close(self) -> None:
        """Terminate the process for good."""
        self._closing = True
        self._supervisor.stop()


def deliver(number: signal.Signals, pid: int) -> bool:
    """Signal a process, 0 for none; return whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)
            return True
    return False


def heeds(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process has a handler of a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    caught = status.split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) & 1 << number - 1)


def on_disk(name: str, switches: Path) -> dict[str, str]:
    """Return variables of a process whose disk fails while the switch of this name is there."""
    return {"PYTHONPATH": str(FAILING), SWITCHES: str(switches), DISK: name}


def start_roles(
    settings: Settings, logs: Path, switches: Path, port: int, deaths: Deaths
) -> dict[str, Role]:
    """Start scheduler, two workers whose model can fail, ingest and web; return them by name."""
    workers = [
        replace(
            child,
            command=[
                "tests.chaos.worker" if w == "embedfarm.workers.main" else w for w in child.command
            ],
            environment=child.environment | {SWITCHES: str(switches)},
        )
        for child in children(discover("cpu", WORKERS), settings)
    ]
    ingest = ingest_child(settings)
    ingest = replace(ingest, environment=ingest.environment | on_disk(INGEST_DISK, switches))
    found = [scheduler_child(settings), *workers, ingest, web_child(settings, port)]
    return {child.name: Role(child, logs, settings, deaths) for child in found}
