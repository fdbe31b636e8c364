"""Tests of kill -9 of any process at any time: nothing is lost or doubled, work goes on."""

import contextlib
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.farm.harness import Embedding, Watch, check_output, run, texts_of, write_corpus
from tests.support import wait_until

DIMENSIONS = 32
TOKENS_PER_SECOND = 25_000  # of each of two workers: the job takes about ten seconds
CHUNKS = 16_000
RECOVERY_SECONDS_MAX = 20.0
ROLES = ("worker", "scheduler", "server", "embed")


class Victim:
    """A job that is shot at, and started again when the command itself was hit."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.texts = list(texts_of(CHUNKS, seed))
        self.corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        self.out = folder / "out"
        self.random = random.Random(seed)
        self.embedding = self.start()

    def start(self) -> Embedding:
        """Start the command, with the same words every time."""
        model = f"null:{DIMENSIONS}:{TOKENS_PER_SECOND}"
        words = [self.corpus, "--model", model, "--devices", "cpu", "--workers", 2]
        return Embedding(words, self.out, {})

    def shoot(self, role: str) -> None:
        """Kill a process of a role with -9 when a random share of the rest of the job is done."""
        done = max(0, self.embedding.chunks_done())
        target = done + self.random.random() * 0.5 * (CHUNKS - done)
        wait_until(lambda: self.embedding.chunks_done() >= target or self.finished, 60)
        if self.finished:
            return
        if role == "embed":
            self.embedding.kill()
            self.embedding = self.start()
        else:
            self.embedding.kill_one(role, signal.SIGKILL)

    @property
    def finished(self) -> bool:
        """Whether the manifest is written."""
        return (self.out / "_manifest.json").exists()

    def follow(self) -> None:
        """Wait for the end of the job, in which chunks must be embedded without a stall.

        Raises:
            TimeoutError: No chunk was embedded for longer than a recovery may take.
        """
        while not self.over:
            before = self.embedding.chunks_done()
            wait_until(partial(self._goes_on, before), RECOVERY_SECONDS_MAX)

    def _goes_on(self, before: int) -> bool:
        return self.over or self.embedding.chunks_done() not in {-1, before}

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return self.embedding.process.poll() is not None

    def close(self) -> None:
        """End the command."""
        self.embedding.kill()

    def check(self) -> None:
        """Assert that the command ends well, and that its output is right."""
        assert self.embedding.wait() == 0, self.embedding.log()
        check_output(self.out, self.texts, DIMENSIONS)
        assert run("verify", self.out, "--against", self.corpus).returncode == 0


def survive(folder: Path, seed: int, roles: tuple[str, ...]) -> float:
    """Shoot at a job; return the longest time in seconds in which no chunk was embedded."""
    gap = 0.0
    with contextlib.closing(Victim(folder, seed)) as victim:
        for role in roles:
            with Watch(victim.embedding) as watch:
                victim.shoot(role)
                wait_for_progress(victim, watch.chunks_done)
            gap = max(gap, watch.gap_seconds_max)
        victim.follow()
        victim.check()
    return gap


def wait_for_progress(victim: Victim, before: int) -> None:
    """Wait until more chunks are embedded than before, or the job is finished."""
    wait_until(
        lambda: victim.finished or victim.embedding.chunks_done() > before,
        2 * RECOVERY_SECONDS_MAX,
    )


class Stalled(Embedding):
    """A stand-in for a command that runs, and does nothing any more."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def chunks_done(self) -> int:
        """Return all chunks but the last one."""
        return CHUNKS - 1


def test_a_tail_that_stalls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that stalls after most of its chunks is noticed."""
    monkeypatch.setitem(globals(), "RECOVERY_SECONDS_MAX", 0.2)
    victim = Victim.__new__(Victim)
    victim.embedding = Stalled()
    with contextlib.closing(victim), pytest.raises(TimeoutError):
        victim.follow()


@pytest.mark.slow  # the next test kills one of each in one run
@pytest.mark.parametrize("role", ROLES[:-1])
def test_one_process_is_killed(tmp_path: Path, role: str) -> None:
    """A job survives the death of a worker, the scheduler, or the server."""
    assert survive(tmp_path, 1, (role,)) <= RECOVERY_SECONDS_MAX


def test_all_of_them_in_one_run(tmp_path: Path) -> None:
    """A job survives the deaths of all of its processes, one after the other."""
    assert survive(tmp_path, 2, ROLES) <= RECOVERY_SECONDS_MAX


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_runs(tmp_path: Path, seed: int) -> None:
    """A job survives the death of one or all of its processes at random times."""
    roles = list(ROLES)
    random.Random(seed).shuffle(roles)
    chosen = tuple(roles) if seed % 5 == 4 else (ROLES[seed % 5],)
    assert survive(tmp_path, seed, chosen) <= RECOVERY_SECONDS_MAX
