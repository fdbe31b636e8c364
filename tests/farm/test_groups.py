"""Tests of groups in a farm: whichever rank is killed, nothing is lost and work goes on."""

import contextlib
import os
import random
import signal
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
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.similarity import cosine
from tests.farm.harness import Embedding, read_parquet, run, write_corpus
from tests.support import wait_until
from tests.workers.tiny_models import SENTENCES, build

RECOVERY_SECONDS_MAX = 20.0
START_SECONDS = 60.0
# What is in hand is done again after a kill, and several ranks on cores that are busy are slow.
LITTLE_IN_HAND = {"EMBEDFARM_MICRO_BATCH_SECONDS_MAX": "0.5"}
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

    def __init__(self, folder: Path, count: int, devices: str) -> None:
        (folder / "files").mkdir()
        self.model = build("shared", folder / "files")
        self.texts = texts_of(count)
        self.corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        self.out = folder / "out"
        words = [self.corpus, "--model", self.model, "--devices", devices, "--dtype", "float32"]
        self.embedding = Embedding(words, self.out, LITTLE_IN_HAND)

    def pids(self) -> list[int]:
        """Process ids of all ranks, the first one first."""
        found: dict[int, bool] = {}
        for process in psutil.Process(self.embedding.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()
                found |= {process.pid: RANK in words} if {RANK, WORKER} & set(words) else {}
        return sorted(found, key=lambda pid: (found[pid], pid))

    def goes_on(self, done: int) -> bool:
        """Tell whether more chunks are embedded than so many, or the command has ended."""
        return self.embedding.process.poll() is not None or self.embedding.chunks_done() > done

    def shoot(self, rank: int) -> float:
        """Kill a rank; return the seconds until more chunks are embedded."""
        pid = self.pids()[rank]
        done = self.embedding.chunks_done()
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        wait_until(partial(self.goes_on, done), 2 * RECOVERY_SECONDS_MAX)
        assert pid not in self.pids()
        return time.monotonic() - began

    def check(self) -> None:
        """Assert that the command ends well, and that each text has its own vector, in order."""
        assert self.embedding.wait() == 0, self.embedding.log()
        indices, vectors, _ = read_parquet(self.out)
        assert indices == list(range(len(self.texts)))
        spec = JobSpec(model=str(self.model), dtype="float32")
        engine = SentenceTransformerEngine.open(spec, "cpu", None)
        batch, rows = engine.tokenise(self.texts), np.arange(len(self.texts))
        parts = np.array_split(rows, max(1, len(rows) // 100))
        expected = np.concatenate([engine.forward(batch, part) for part in parts])
        assert cosine(vectors, expected).min() >= 0.9999
        assert run("verify", self.out, "--against", self.corpus).returncode == 0


@contextlib.contextmanager
def shot_at(folder: Path, count: int, devices: str = "cpu+cpu") -> Iterator[Target]:
    """Start a job on a group, and wait until it is at work."""
    target = Target(folder, count, devices)
    try:
        wait_until(partial(target.goes_on, 0), START_SECONDS)
        yield target
    finally:
        target.embedding.kill()


def test_a_group_survives_each_of_its_ranks(tmp_path: Path) -> None:
    """A job on two ranks goes on after the first is killed and after the other is, and is whole."""
    with shot_at(tmp_path, 20_000) as target:
        with closing_client(server_of(target)) as client:
            (beat,) = FarmClient(client).workers()
        assert beat.device == "cpu-0-1"
        for rank in (1, 0):
            assert target.shoot(rank) <= RECOVERY_SECONDS_MAX
        target.check()


def server_of(target: Target) -> str:
    """URL of the private farm's server."""
    return f"unix://{(target.out / '.embedfarm' / 'server' / 'socket').read_text()}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("devices", ["cpu+cpu", "cpu+cpu+cpu+cpu"])
def test_twenty_kills_lose_nothing(tmp_path: Path, devices: str) -> None:
    """Twenty ranks of a group, chosen at random, are killed at random times within one job."""
    choose, gaps = random.Random(devices), []
    with shot_at(tmp_path, 60_000, devices) as target:
        for _ in range(20):
            more = target.embedding.chunks_done() + choose.randint(0, 2000)
            wait_until(partial(target.goes_on, more), RECOVERY_SECONDS_MAX)
            gaps.append(target.shoot(choose.randrange(len(devices.split("+")))))
        target.check()
    print(f"{devices}: {len(gaps)} kills, work stood for at most {max(gaps):.1f} s")  # noqa: T201
    assert max(gaps) <= RECOVERY_SECONDS_MAX
