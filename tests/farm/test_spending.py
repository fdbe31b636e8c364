"""Tests of devices' time and its cost on farms that run, with workers of two speeds and prices."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
