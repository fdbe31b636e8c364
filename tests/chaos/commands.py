"""Commands that embed, typed again with the same words until they end well."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from embedfarm.contract.settings import Settings
from tests.chaos.corpora import Corpus, Version
from tests.chaos.roles import EMBED_DISK, LOG_BYTES, Deaths, on_disk
from tests.chaos.servers import Servers
from tests.farm.harness import COMMAND, run
from tests.support import wait_until

RESTART_SECONDS: Final = 0.5  # until somebody types the same command again
END_SECONDS: Final = 60.0  # until a command that was stopped has ended
AGAIN: Final = "--embed-changed"
BAD_ROW: Final = "a bad row"


def remove_job(name: str, settings: Settings) -> None:
    """Remove a job whose end a server has lost, as its operator would."""
    done = run("jobs", "rm", name, "--force", "--redis", settings.redis_url)
    assert done.returncode in {0, 2}, done.stderr  # the latter if it is gone


@dataclass
class Periods:
    """Periods of time in which something was so, such as a disk that failed."""

    _periods: list[tuple[float, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Note a period that lasts as long as the context."""
        began = time.monotonic()
        self._periods.append((began, float("inf")))
        try:
            yield
        finally:
            self._periods[-1] = began, time.monotonic()

    def overlap(self, began: float, ended: float) -> bool:
        """Tell whether a period overlaps with the time between two monotonic times."""
        return any(first <= ended and last >= began for first, last in self._periods)


@dataclass
class World:
    """The servers and faults that may explain why a command refuses.

    Attributes:
        settings: The settings of the farm.
        servers: The servers, which know what was forgotten.
        deaths: Takes the ends of processes that are ours.
        switches: Directory of the switch files.
        model: The model that embeds.
        failing: The periods in which disks failed.
    """

    settings: Settings
    servers: Servers
    deaths: Deaths
    switches: Path
    model: str
    failing: Periods = field(default_factory=Periods)


@dataclass(frozen=True)
class Attempt:
    """One run of the command.

    Attributes:
        began: Monotonic time at which it was typed.
        first: Index of the version that its corpus held then.
        said: Size of the log then, in bytes.
    """

    began: float
    first: int
    said: int


class Job:
    """`embedfarm embed` of a corpus that people may change meanwhile.

    Args:
        corpus: The corpus that is embedded.
        out: The directory of the output.
        name: The job's id.
        world: The servers and faults that may explain a refusal.
        before: Unix time at which the last job of that id had ended; 0 without one.

    Attributes:
        refusals: How often the command refused, by the kind of refusal.
        ended: Unix time at which the command had ended well.
    """

    def __init__(
        self, corpus: Corpus, out: Path, name: str, world: World, before: float = 0.0
    ) -> None:
        self.corpus, self.out, self.name = corpus, out, name
        words = [corpus.path, "--out", out, "--model", world.model, "--job-id", name]
        self.words = [*COMMAND, "embed", *map(str, words)]
        self.refusals: dict[str, int] = {}
        self.ended = 0.0
        self._before = before
        self._world = world
        environment = world.settings.environment() | on_disk(EMBED_DISK, world.switches)
        self._environment = os.environ | environment
        self._log = corpus.path.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt = Attempt(0.0, 0, 0)
        self._typing = threading.Lock()
        self._closed = False

    # Typing.

    def run(self) -> None:
        """Type the command until it ends well.

        Raises:
            RuntimeError: The job was closed before that.
        """
        while not self._closed:
            with self._typing:
                process = self._type()
            status = process.wait()
            refusal = self._refusal(status)
            well = status == 0 or bool(refusal)
            self._world.deaths.note("embed", status, self._tail(), well=well)
            if status == 0:
                self.ended = self.out.stat().st_mtime  # the last that it does there
                return
            if refusal:
                self.refusals[refusal] = 1 + self.refusals.get(refusal, 0)
            threading.Event().wait(RESTART_SECONDS)
        raise RuntimeError(f"the job did not end: see {self._log}")

    def _type(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            last = len(self.corpus.versions) - 1
            self._attempt = Attempt(time.monotonic(), last, log.tell())
            self._process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        return self._process

    def _tail(self) -> str:
        """Return the end of what the command said since it was typed last."""
        data = self._log.read_bytes()[self._attempt.said :]
        return data[-LOG_BYTES:].decode(errors="replace")

    @property
    def candidates(self) -> Sequence[Version]:
        """The versions of the corpus since the command was typed last."""
        return self.corpus.versions[self._attempt.first :]

    # Refusals.

    def _refusal(self, status: int) -> str:
        """Return why the command refused, "" if it was wrong to; follow its advice."""
        said, held = self._tail(), self.candidates
        if status == 1 and "Input/output error" in said:
            failed = self._world.failing.overlap(self._attempt.began, time.monotonic())
            return "the disk fails" if failed else ""
        if status != 2:
            return ""
        if AGAIN in said and len(self.corpus.versions) > 1:
            self.words = [*self.words, AGAIN] if AGAIN not in self.words else self.words
            return "other rows are on the disk"
        if "changed while it was read" in said and len(held) > 1:
            return "changed while it was read"
        if "fills another output" in said and self._world.servers.forgot(self._before):
            remove_job(self.name, self._world.settings)
            return "the end of an earlier job was forgotten"
        return BAD_ROW if any(version.spoiled for version in held) else ""

    # Being shot at.

    @property
    def is_over(self) -> bool:
        """Whether the output is finished, or the job was closed."""
        return self._closed or self.ended > 0 or (self.out / "_manifest.json").exists()

    @contextlib.contextmanager
    def stopped(self, number: signal.Signals | None = None) -> Iterator[None]:
        """Keep the command from running meanwhile, after a signal or its own end."""
        with self._typing:
            if number is not None:
                self.signal(number)
            if self._process is not None:
                self._process.wait(END_SECONDS)
            yield

    def wait_until_it(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true, or the job is over.

        Raises:
            TimeoutError: Neither is so within a minute.
        """
        wait_until(lambda: self.is_over or condition(), END_SECONDS)

    def is_reading(self) -> bool:
        """Tell whether the command that runs has its corpus open."""
        process = self._process
        opened = list[str]()
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{process.pid if process else 0}/fd").iterdir():
                with contextlib.suppress(OSError):
                    opened.append(str(each.readlink()))
        return str(self.corpus.path) in opened

    def close(self) -> None:
        """End the command for good, if it runs."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _signal(self, number: signal.Signals) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(number)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the command, if it runs now."""
        self._world.deaths.cause("embed", number, self._signal)
