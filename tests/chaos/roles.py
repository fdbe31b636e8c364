"""The farm's processes as an operator keeps them: started again when they die."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from embedfarm.cli.local import ingest_child, scheduler_child, web_child
from embedfarm.cli.options import INTERRUPTED
from embedfarm.processes import Child, Exit, Supervisor
from embedfarm.settings import Settings
from tests.chaos.worker import SWITCHES
from tests.farm.harness import COMMAND
from tests.support import wait_until
from workers.devices import discover
from workers.supervisor import children

WORKERS: Final = 2
RESTART_SECONDS: Final = 0.5  # until somebody types the same command again
LOG_BYTES: Final = 2000
ENDS: Final = {  # statuses of who ends by a signal; SIGTERM may come before anybody heeds it
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {-signal.SIGTERM, 128 + signal.SIGTERM, INTERRUPTED},
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
        """Signal a process by `deliver`, which says whether there was one; its end by it is ours.

        The lock, so that nobody notes that end sooner than we know that it was us.
        """
        with self._lock:
            if deliver(number):
                self._asked[name] |= ENDS.get(number, set())

    def note(self, name: str, status: int, why: str = "", *, well: bool = False) -> None:
        """A process has ended; `well` if that is how it should.

        What was asked of it is asked of none after it.
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
        """SIGKILL."""
        self._deaths.cause(self.name, signal.SIGKILL, self.signal)

    @property
    def pid(self) -> int:
        """Of the process that runs now, 0 without one."""
        return self._supervisor.pids.get(self.name, 0)

    def signal(self, number: signal.Signals) -> bool:
        """Signal the process; whether it runs now."""
        return deliver(number, self.pid)

    def restart(self) -> None:
        """SIGTERM, a drain, and a new process, as an upgrade does it.

        Not before it takes the signal: a process that is still starting dies of it, as by kill.
        """
        wait_until(lambda: heeds(self.pid, signal.SIGTERM), 60)
        self.close()
        self._supervisor = self._start()

    def close(self) -> None:
        """End it."""
        self._closing = True
        self._supervisor.stop()


def deliver(number: signal.Signals, pid: int) -> bool:
    """Signal a process, 0 for none; whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)
            return True
    return False


def heeds(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    caught = status.split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) & 1 << number - 1)


def start_roles(
    settings: Settings, logs: Path, switches: Path, port: int, deaths: Deaths
) -> dict[str, Role]:
    """Scheduler, two CPU workers whose model can fail, ingest and web, by name."""
    workers = [
        replace(
            child,
            command=["tests.chaos.worker" if w == "workers.main" else w for w in child.command],
            environment=child.environment | {SWITCHES: str(switches)},
        )
        for child in children(discover("cpu", WORKERS), settings)
    ]
    found = [scheduler_child(settings), *workers, ingest_child(settings), web_child(settings, port)]
    return {child.name: Role(child, logs, settings, deaths) for child in found}


class Job:
    """`embedfarm embed`, started again with the same words until it ends well."""

    def __init__(self, words: Sequence[object], settings: Settings, log: Path) -> None:
        self.words = [*COMMAND, "embed", *map(str, words)]
        self._environment = os.environ | settings.environment()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, deaths: Deaths) -> None:
        """Returns when it has ended well.

        Raises:
            RuntimeError: It does not get there.
        """
        while not self._closed:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=self._environment,
                )  # fmt: skip
            status = self._process.wait()
            tail = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
            deaths.note("embed", status, tail, well=status == 0)
            if status == 0:
                return
            threading.Event().wait(RESTART_SECONDS)
        raise RuntimeError(f"the job did not end: see {self._log}")

    def close(self) -> None:
        """End it for good, if it runs."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(number)
        return True

    def signal(self, number: signal.Signals, deaths: Deaths) -> None:
        """Signal the command, if it runs now."""
        deaths.cause("embed", number, self._signal)


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """A corpus of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
