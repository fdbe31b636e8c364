"""Tests of stopped processes: what they hold goes on elsewhere at once, nothing is lost."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobStatus
from tests.farm.harness import COMMAND, check_output, run, texts_of, write_corpus
from tests.farm.service import Service
from tests.support import LiveServer, wait_until
from tests.workers.support import block_of, create_job

DIMENSIONS = 16
TOKENS_PER_SECOND = 10_000  # of each of two workers
CHUNKS = 10_000
NOISE = 1.25
INTERRUPTED = 130


def worker_command(device: str) -> list[str]:
    """Return the command of a worker process."""
    return [sys.executable, "-m", "embedfarm.workers.main", "--device", device]


def test_what_a_stopped_worker_holds_goes_on_at_once(
    server: LiveServer, client: redis.Redis
) -> None:
    """A worker that is stopped finishes what it has begun, and releases the rest undelivered.

    Leases last an hour here, so that nothing else could free them.
    """
    farm = FarmClient(client)
    # The first of each worker takes four seconds, in which it leases its next.
    texts = ["x" * 96] * 2 + ["chunk"] * 22
    blocks = [block_of(10 * n, 10, text) for n, text in enumerate(texts)]
    with ExitStack() as stack:
        first, _ = (
            stack.enter_context(Service(worker_command(device), server, lease_seconds=3600))
            for device in ("cpu-0", "cpu-1")
        )
        wait_until(lambda: len(farm.workers()) == 2, 60)
        job = create_job(farm, blocks, model="null:8:60")
        name = next(beat.worker for beat in farm.workers() if beat.pid == first.pid)
        wait_until(lambda: len(job.stream.pending(job.keys.blocks, name, 9)) > 1, 30)
        first.ask_to_stop()
        assert first.wait() == 0
        left = job.stream.pending(job.keys.blocks, name, 99)
        assert left
        assert {row.deliveries for row in left} == {0}
        wait_until(lambda: job.status().embedded, 30)
    status = job.status()
    assert (status.chunks_done, status.chunks_failed, job.stream.backlog()) == (240, 0, (0, 0))


class Rolling:
    """A farm of separate processes at work on one corpus, each of which is restarted."""

    def __init__(self, server: LiveServer, client: redis.Redis, folder: Path) -> None:
        self.farm = FarmClient(client)
        self.out = folder / "out"
        self.texts = list(texts_of(CHUNKS))
        self.corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        settings = {"state_directory": folder / "state", "jobs_directory": folder / "jobs"}
        model = f"null:{DIMENSIONS}:{TOKENS_PER_SECOND}"
        words = ["embed", str(self.corpus), "--out", str(self.out), "--model", model]

        def service(*command: str) -> Service:
            return Service(command, server, **settings)

        self.workers = [service(*worker_command(device)) for device in ("cpu-0", "cpu-1")]
        self.schedulers = [service(*COMMAND, "schedule") for _ in range(2)]
        self.doors = [service(*COMMAND, "serve", "--port", "0"), service(*COMMAND, "ingest")]
        self.embed = service(*COMMAND, *words)
        self.services = [*self.workers, *self.schedulers, *self.doors]

    def status(self) -> JobStatus:
        """Return the status of the one job."""
        (job,) = self.farm.job_ids() or self.farm.ended_ids(1)
        return self.farm.job(job).status()

    def restart(self, services: Sequence[Service]) -> None:
        """Restart some services together, and wait until they are ready."""
        assert not self.status().embedded, "the job is too short for this machine"
        for each in services:
            each.ask_to_stop()
        for each in services:
            assert each.wait() == 0
            each.start()
        for each in services:
            assert each.hears("READY=1", 30)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


@pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rolling_restart_costs_no_more_than_the_restarts(
    *, timed: bool, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """All is embedded once, in the workers' time, though every role is restarted in turn.

    Without restarts it would take what the workers' speed says; each restart may cost as long as
    it lasts, and 25 % are noise. Beside other tests there is no telling.
    """
    rolling = Rolling(server, client, tmp_path)
    with ExitStack() as stack:
        for each in rolling.services:
            stack.enter_context(each)
        assert all(each.hears("READY=1", 30) for each in rolling.services)
        stack.enter_context(rolling.embed)
        wait_until(lambda: any(each.chunks_done for each in rolling.farm.statuses().values()), 30)
        began = time.monotonic()
        restarts = 0.0
        for turn in zip(rolling.workers, rolling.schedulers, rolling.doors, strict=True):
            restarts += seconds_of(partial(rolling.restart, turn))
        before = rolling.status().chunks_done
        restarts += seconds_of(lambda: rolling.embed.restart(INTERRUPTED))
        restarts += seconds_of(
            lambda: wait_until(lambda: rolling.status().chunks_done > before, 30)
        )
        wait_until(lambda: rolling.status().embedded, 60)
        elapsed = time.monotonic() - began
        assert rolling.embed.wait() == 0
        tokens = rolling.status().tokens_in
    check_output(rolling.out, rolling.texts, DIMENSIONS)
    assert run("verify", rolling.out, "--against", rolling.corpus).returncode == 0
    assert elapsed <= NOISE * tokens / TOKENS_PER_SECOND / 2 + restarts or not timed
