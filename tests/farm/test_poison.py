"""Tests that poison messages fail alone, with reason and attempts."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import redis

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane
from embedfarm.contract.processes import RUN_ROLE, Child, Supervisor
from embedfarm.contract.settings import Settings
from embedfarm.workers.watchdog import HUNG_STATUS
from tests import poison_worker
from tests.farm.harness import manifest, null_vectors, read_parquet, run, write_corpus
from tests.farm.service import Service
from tests.support import LiveServer

DIMENSIONS = 16
MODEL = ("--model", f"null:{DIMENSIONS}")
TERMS = ("--tenant", "red", "--weight", 3)
CHUNKS = 500
DELIVERIES_MAX = 2
SETTINGS = Settings(
    lease_seconds=3.0,
    heartbeat_seconds=0.2,
    hang_seconds=1.0,
    hang_factor=1,
    deliveries_max=DELIVERIES_MAX,
    block_chunks_max=8,
)
REASONS = {
    "raises": "the model raised RuntimeError: poison",
    "kills": f"the worker died or hung {DELIVERIES_MAX} times while embedding it",
    "hangs": f"the device did not finish within 1 s, {DELIVERIES_MAX} times",
    "locks": f"the worker died or hung {DELIVERIES_MAX} times while embedding it",
}
ATTEMPTS = DELIVERIES_MAX + DELIVERIES_MAX  # of a block of 8 chunks, then of the chunk alone
DEEDS = {7: "raises", 120: "kills", 300: "hangs", 433: "locks"}


@contextlib.contextmanager
def poisoned(server: LiveServer, place: Path) -> Iterator[Path]:
    """Start two workers, and yield the path of a file; while it exists, no text harms them."""
    healed = place / "healed"
    settings = SETTINGS.model_copy(update={"redis_url": server.url})
    root = Path(poison_worker.__file__).parents[1]
    environment = settings.environment() | {
        poison_worker.HEALED: str(healed),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    children = [
        Child(
            f"worker-{device}",
            [*RUN_ROLE, "tests.poison_worker", "--device", device],
            environment,
        )
        for device in ("cpu-0", "cpu-1")
    ]
    with Supervisor(children, place / "logs", drain_seconds=10.0):
        yield healed


def corpus_with(deeds: dict[int, str], place: Path) -> tuple[Path, list[str]]:
    """Write a corpus with poisons at some indices; return its path and its texts."""
    texts = [f"chunk {index}" for index in range(CHUNKS)]
    for index, deed in deeds.items():
        texts[index] += f", {poison_worker.MARKER}{deed}"
    return write_corpus(place / "corpus.jsonl", texts), texts


def check_others(out: Path, texts: list[str], failed: set[int]) -> None:
    """Assert that all but the failed chunks are there, in order, with the right vectors."""
    indices, vectors, _ = read_parquet(out)
    assert indices == [index for index in range(len(texts)) if index not in failed]
    np.testing.assert_array_equal(vectors, null_vectors(texts, DIMENSIONS)[indices])


def test_poison_costs_itself(server: LiveServer, tmp_path: Path) -> None:
    """Texts that raise, kill or hang a worker fail alone, and the others are embedded.

    Once the model is healed, `jobs retry` embeds the failed ones, on the terms of the job.
    """
    corpus, texts = corpus_with(DEEDS, tmp_path)
    out = tmp_path / "out"
    with poisoned(server, tmp_path) as healed:
        done = run("embed", corpus, "--out", out, "--redis", server.url, *MODEL, *TERMS)
        assert done.returncode == 3, done.stderr
        check_others(out, texts, set(DEEDS))
        named = [json.loads(line) for line in (out / "_errors.jsonl").read_text().splitlines()]
        reasons = {each["index"]: each["reason"] for each in named}
        assert reasons == {index: REASONS[deed] for index, deed in DEEDS.items()}
        deadly = [each["attempts"] for each in named if DEEDS[each["index"]] != "raises"]
        assert min(deadly) >= ATTEMPTS
        job = manifest(out)["job"]
        shown = json.loads(run("jobs", "errors", job, "--redis", server.url, "--json").stdout)
        known = {(each["index"], each["reason"], each["attempts"]) for each in named}
        assert {(each["index"], each["reason"], each["attempts"]) for each in shown} == known
        healed.touch()
        again = run("jobs", "retry", job, "--redis", server.url, "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["repaired"] == len(DEEDS)
        ended = json.loads(run("jobs", "ls", "--ended", "--redis", server.url, "--json").stdout)
        assert [(each["tenant"], each["weight"]) for each in ended] == [("red", 3)] * 2
    check_others(out, texts, set())
    assert run("verify", out, "--against", corpus).returncode == 0


def test_a_request_that_hangs_is_taken_up_again(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A worker that a request hangs ends, and the next one answers the request."""
    healed = tmp_path / "healed"
    command = [sys.executable, "-m", "tests.poison_worker", "--device", "cpu-0"]
    limits = {"hang_seconds": 1, "hang_factor": 1, "test_healed": healed}
    text = f"{poison_worker.MARKER}hangs"
    with Service(command, server, **limits) as worker, ThreadPoolExecutor() as pool:
        ask = Lane(client, SETTINGS).ask
        asked = pool.submit(ask, JobSpec(model=f"null:{DIMENSIONS}"), [text], 60.0)
        assert worker.wait() == HUNG_STATUS
        healed.touch()
        worker.start()
        np.testing.assert_array_equal(asked.result().matrix(), null_vectors([text], DIMENSIONS))
