"""Tests of groups in a farm: whichever rank is killed, nothing is lost and work goes on."""

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.similarity import cosine
from embedfarm.workers.cores import available_cores
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from tests.farm.harness import SECONDS_MAX, Embedding, read_parquet, run, write_corpus
from tests.support import wait_until
from tests.workers.tiny_models import SENTENCES, build

RECOVERY_SECONDS_MAX = 20.0
WAIT_SECONDS = 60.0
# What is in hand is done again after a kill, and several ranks on cores that are busy are slow.
LITTLE_IN_HAND = {"EMBEDFARM_MICRO_BATCH_SECONDS_MAX": "0.5"}
HANG_SECONDS = 3
SAMPLED = 10
ROWS = 64
RANK = "embedfarm.workers.engines.rank"
WORKER = "embedfarm.workers.main"


def texts_of(count: int) -> list[str]:
    """Distinct texts of mixed length."""
    words = " ".join(SENTENCES).split()
    choose = random.Random(count)
    return [
        f"{each} " + " ".join(choose.choices(words, k=choose.randint(3, 40)))
        for each in range(count)
    ]


class Target:
    """A job on a group that is shot at."""

    def __init__(self, folder: Path, count: int, devices: str, **settings: object) -> None:
        (folder / "files").mkdir()
        self.model = build("shared", folder / "files")
        self.texts = texts_of(count)
        self.corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        self.out = folder / "out"
        words = [self.corpus, "--model", self.model, "--devices", devices, "--dtype", "float32"]
        changed = {f"EMBEDFARM_{name.upper()}": str(value) for name, value in settings.items()}
        self.embedding = Embedding(words, self.out, LITTLE_IN_HAND | changed)

    def pids(self) -> list[int]:
        """Process ids of all ranks, the first one first."""
        found: dict[int, bool] = {}
        for process in psutil.Process(self.embedding.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()
                found |= {process.pid: RANK in words} if {RANK, WORKER} & set(words) else {}
        return sorted(found, key=lambda pid: (found[pid], pid))

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return self.embedding.process.poll() is not None

    def goes_on(self, done: int) -> bool:
        """Tell whether more chunks are embedded than so many, or the command has ended."""
        return self.over or self.embedding.chunks_done() > done

    def shoot(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Signal a rank; return the seconds until more chunks are embedded by another process."""
        pid = self.pids()[rank]
        os.kill(pid, number)
        began = time.monotonic()
        wait_until(lambda: self.over or pid not in self.pids(), WAIT_SECONDS)
        done = self.embedding.chunks_done()
        wait_until(partial(self.goes_on, done), WAIT_SECONDS)
        return time.monotonic() - began

    def check(self) -> None:
        """Assert that the command ends well, and that each text has its own vector, in order.

        Vectors are compared for each tenth text; `verify` finds the others by checksums of texts.
        """
        assert self.embedding.wait() == 0, self.embedding.log()
        indices, vectors, _ = read_parquet(self.out)
        assert indices == list(range(len(self.texts)))
        spec = JobSpec(model=str(self.model), dtype="float32")
        engine = SentenceTransformerEngine.open(spec, "cpu", None)
        texts = self.texts[::SAMPLED]
        parts = np.array_split(np.arange(len(texts)), -(-len(texts) // ROWS))
        batch = engine.tokenise(texts)
        expected = np.concatenate([engine.forward(batch, part) for part in parts])
        assert cosine(vectors[::SAMPLED], expected).min() >= 0.9999
        assert run("verify", self.out, "--against", self.corpus).returncode == 0


@contextlib.contextmanager
def shot_at(
    folder: Path, count: int, devices: str = "cpu+cpu", **settings: object
) -> Iterator[Target]:
    """Start a job on a group, and wait until it is at work."""
    target = Target(folder, count, devices, **settings)
    try:
        wait_until(partial(target.goes_on, 0), SECONDS_MAX)
        yield target
    finally:
        target.embedding.kill()


@pytest.mark.alone  # it keeps all cores busy, and beside others its ranks import for minutes
def test_a_group_survives_each_of_its_ranks(tmp_path: Path) -> None:
    """A job on two ranks goes on after the first is killed and after the other is, and is whole."""
    with shot_at(tmp_path, 3_000) as target:
        with closing_client(server_of(target)) as client:
            (beat,) = FarmClient(client).workers()
        assert beat.device == "cpu-0-1"
        for rank in (1, 0):
            target.shoot(rank)  # how soon it goes on is for the slow tests, which run alone
        target.check()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_given_up(tmp_path: Path) -> None:
    """A rank that stands still, as in a driver that hangs, is found by the watchdog."""
    with shot_at(tmp_path, 20_000, hang_seconds=HANG_SECONDS, hang_factor=1) as target:
        assert target.shoot(1, signal.SIGSTOP) <= HANG_SECONDS + RECOVERY_SECONDS_MAX
        target.check()


def server_of(target: Target) -> str:
    """URL of the private farm's server."""
    return f"unix://{(target.out / '.embedfarm' / 'server' / 'socket').read_text()}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("devices", ["cpu+cpu", "cpu+cpu+cpu+cpu"])
def test_twenty_kills_lose_nothing(tmp_path: Path, devices: str) -> None:
    """Twenty ranks of a group, chosen at random, are killed at random times within one job."""
    ranks = len(devices.split("+"))
    choose, gaps = random.Random(ranks), []
    with shot_at(tmp_path, 60_000, devices) as target:
        for _ in range(20):
            more = target.embedding.chunks_done() + choose.randint(0, 2000)
            wait_until(partial(target.goes_on, more), WAIT_SECONDS)
            gaps.append(target.shoot(choose.randrange(ranks)))
        target.check()
    median, most = statistics.median(gaps), max(gaps)
    print(f"{devices}: {len(gaps)} kills, work stood {median:.1f} s, at most {most:.1f}")  # noqa: T201
    # All ranks import torch and the rest anew, on as many cores as there are.
    assert most <= RECOVERY_SECONDS_MAX * max(1.0, ranks / len(available_cores()))
