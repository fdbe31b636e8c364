"""Tests of devices' time and its cost on farms that run, with workers of two speeds and prices."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from embedfarm.collector.manifest import read_manifest
from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import role, run, texts_of, write_corpus
from tests.support import LiveServer, wait_until

WORKER = (sys.executable, "-m", "embedfarm.workers.main", "--device")
MODEL = ("--model", "null:16:20000")
PRICES = (36.0, 360.0)  # an hour: the second one is dear


@contextlib.contextmanager
def worker(server: LiveServer, device: str, price: float) -> Iterator[None]:
    """Run a worker with a price of its own, as one of another host would have it."""
    environment = {"EMBEDFARM_REDIS_URL": server.url, "EMBEDFARM_DEVICE_COST_PER_HOUR": str(price)}
    with subprocess.Popen([*WORKER, device], env=os.environ | environment) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(40)


@pytest.fixture
def at_once() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool that runs commands while the test goes on."""
    with ThreadPoolExecutor() as pool:
        yield pool


def test_workers_of_two_prices(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """The report, the manifest and the job's record have one sum, of each worker at its price."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(1200)))
    out = tmp_path / "out"
    with ExitStack() as stack:
        stack.enter_context(role(server, tmp_path, "schedule"))
        for place, price in enumerate(PRICES):
            stack.enter_context(worker(server, f"cpu-{place}", price))
        wait_until(lambda: len(FarmClient(client).workers()) == len(PRICES))
        words = ("embed", corpus, "--out", out, "--redis", server.url, *MODEL, "--json")
        report = json.loads(run(*words).stdout)
    figures = read_manifest(out).workers
    seconds = {name: each.seconds for name, each in figures.items()}
    assert len(seconds) == len(PRICES)
    (job,) = FarmClient(client).ended_ids(9)
    spent = FarmClient(client).job(job).status().spent
    assert report["device_hours"] == pytest.approx(sum(seconds.values()) / 3600)
    assert spent.device_hours == pytest.approx(report["device_hours"], abs=1e-9)
    assert spent.cost == pytest.approx(report["cost"], abs=1e-6)
    costs = sorted(each.cost / each.seconds * 3600 for each in figures.values())
    assert costs == pytest.approx(PRICES)


def test_a_private_farm_ends_at_the_limit(tmp_path: Path) -> None:
    """Where nobody else could raise it, the command ends; with a higher limit it goes on."""
    texts = list(texts_of(3000))  # more than workers that have been slow may hold at the limit
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ("embed", corpus, "--out", tmp_path / "out", *MODEL, "--workers", "2")
    small = {"EMBEDFARM_MICRO_BATCH_SECONDS_MAX": "0.2"}  # as long as a worker may go on
    for hours in ("0.0001", "0.0004"):
        ended = run(*words, "--max-hours", hours, environment=small)
        assert ended.returncode == 4, ended.stderr
        assert f"has taken as much as it may: max_hours {hours}" in ended.stderr
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["count"] == 3000
    assert report["device_hours"] > 0.0004


def test_a_job_at_its_limit_waits_for_more(
    server: LiveServer, client: redis.Redis, tmp_path: Path, at_once: ThreadPoolExecutor
) -> None:
    """Command on a shared farm waits while its job has paused itself, and then goes on."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(1500)))
    out = tmp_path / "out"
    farm = FarmClient(client)
    with (
        role(server, tmp_path, "schedule"),
        worker(server, "cpu-0", PRICES[0]),
    ):
        words = ("embed", corpus, "--out", out, "--redis", server.url, *MODEL)
        embedding = at_once.submit(run, *words, "--max-cost", "0.005", "--labels", "small")
        wait_until(lambda: [each.state for each in farm.statuses().values()] == ["paused"])
        (name,) = farm.job_ids()
        job = farm.job(name)
        wait_until(lambda: not job.stream.backlog()[1])
        assert 0.005 <= job.status().spent.cost < 0.05
        kinds = [each.kind for each in farm.timeline.newest(9, name)]
        assert "paused" in kinds
        assert not embedding.done()
        assert run("jobs", "set", name, "--max-cost", "0", "--redis", server.url).returncode == 0
        done = embedding.result()
    assert done.returncode == 0, done.stderr
    assert read_manifest(out).count == 1500
