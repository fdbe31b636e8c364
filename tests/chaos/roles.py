"""The farm's processes as an operator keeps them: started again when they die."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from embedfarm.cli.local import ingest_child, scheduler_child, web_child
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


@dataclass
class Deaths:
    """Ends of processes that nobody had asked for."""

    unasked: list[str] = field(default_factory=list)
    _asked: Counter[str] = field(default_factory=Counter)

    def ask(self, name: str) -> None:
        """The next end of that process is a fault of ours."""
        self._asked[name] += 1

    def note(self, name: str, status: int, why: str = "") -> None:
        """A process has ended."""
        if self._asked[name]:
            self._asked[name] -= 1
        else:
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
        supervisor = Supervisor([self._child], self._logs, self._drain_seconds, (), self._note)
        supervisor.start()
        return supervisor

    def _note(self, ended: Exit) -> None:
        if ended.restarted or ended.status != 0:
            self._deaths.note(self.name, ended.status, self._tail())

    def _tail(self) -> str:
        data = (self._logs / f"{self.name}.log").read_bytes()[-LOG_BYTES:]
        return data.decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self._deaths.ask(self.name)
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, if it runs now."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self._supervisor.pids[self.name], number)

    def restart(self) -> None:
        """SIGTERM, a drain, and a new process, as an upgrade does it.

        Not before it takes the signal: a process that is still starting dies of it, as by kill.
        """
        wait_until(lambda: _heeds(self._supervisor.pids.get(self.name), signal.SIGTERM), 60)
        self.close()
        self._supervisor = self._start()

    def close(self) -> None:
        """End it."""
        self._supervisor.stop()


def _heeds(pid: int | None, number: signal.Signals) -> bool:
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
            if status == 0:
                return
            deaths.note("embed", status, self._log.read_bytes()[-LOG_BYTES:].decode())
            threading.Event().wait(RESTART_SECONDS)
        raise RuntimeError(f"the job did not end: see {self._log}")

    def close(self) -> None:
        """End it for good, if it runs."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def signal(self, number: signal.Signals, deaths: Deaths) -> None:
        """Signal the command, if it runs now."""
        process = self._process
        if process is not None and process.poll() is None:
            if number in {signal.SIGKILL, signal.SIGTERM}:
                deaths.ask("embed")
            process.send_signal(number)


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """A corpus of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
