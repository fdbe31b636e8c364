"""Helpers that give a farm with an RQ door, and a program that has only rq."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import redis
from rq import Queue
from rq.job import Job

from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.collector.output_directory import JOURNAL_FILE
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobStatus
from tests.farm.command_server import Copy
from tests.farm.harness import role
from tests.support import LiveServer, wait_until

LEASE_SECONDS: Final = 3

START_SECONDS: Final = 180  # for what may have to wait for processes to begin
SLOW: Final = "null:16:20000"  # 4,000 chunks of `texts_of` take about nine seconds
ENDLESS: Final = "null:16:5000"  # and here forty: for a job that is to be ended


class Door:
    """A queue as a program sees it that enqueues, and the farm behind it."""

    def __init__(self, server: LiveServer, home: Path) -> None:
        self.server = server
        self.home = home
        self.connection = redis.Redis.from_url(server.url)
        self.queue = Queue("embedfarm", self.connection, serializer="json")
        self.role: Copy | None = None  # that was started last

    def enqueue(self, task: str, *words: Any, **options: Any) -> Job:  # noqa: ANN401 -- what JSON can say
        """Enqueue a task by its name."""
        return self.queue.enqueue(f"producer.tasks.{task}", *words, **options)

    def environment(self, **settings: object) -> dict[str, str]:
        """Return the variables of a role."""
        chosen = {
            "redis_url": self.server.url,
            "ingest_roots": json.dumps([str(self.home)]),
            "ingest_lease_seconds": LEASE_SECONDS,
            "state_directory": self.home / "state",
        } | settings
        return {f"EMBEDFARM_{name.upper()}": str(value) for name, value in chosen.items()}

    @contextlib.contextmanager
    def ingest(self, *words: str, **settings: object) -> Iterator[psutil.Process]:
        """Run `embedfarm ingest`; SIGTERM must end it with status 0, unless the test killed it."""
        with Copy(["ingest", *words], os.environ | self.environment(**settings)) as copy:
            self.role = copy
            process = psutil.Process(copy.pid)
            try:
                yield process
                copy.terminate()
                assert copy.wait(40) in {0, -signal.SIGKILL}
            finally:
                kill_tree(process)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Run one worker with a null model."""
        with role(self.server, self.home, "work", "--devices", "cpu", "--workers", "1"):
            yield

    def farm_jobs(self) -> dict[str, JobStatus]:
        """Return the statuses of the farm's jobs by id."""
        with closing_client(self.server.url) as client:
            return FarmClient(client).statuses()

    def farm_states(self) -> list[str]:
        """Return the states of the farm's jobs, of those that have ended, too."""
        with closing_client(self.server.url) as client:
            farm = FarmClient(client)
            jobs = {*farm.job_ids(), *farm.ended_ids(9)}
            return [farm.job(job).status().state for job in jobs if farm.exists(job)]

    def cancel_farm_job(self, job: str) -> None:
        """Cancel a job on the farm like `embedfarm jobs cancel`."""
        with closing_client(self.server.url) as client:
            FarmClient(client).job(job).cancel()

    def log(self, worker: int = 0) -> str:
        """Return the log of an RQ worker."""
        return (self.home / "state" / "logs" / f"ingest-{worker}.log").read_text()


def kill_tree(process: psutil.Process) -> None:
    """End a process and all below it as a power cut would."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [*process.children(recursive=True), process]
        for each in tree:
            each.suspend()
        for each in tree:
            each.kill()


def wait_for(job: Job, status: str, seconds: float = START_SECONDS) -> None:
    """Wait until an RQ job has a status; fail at once if it has failed instead."""

    def look() -> bool:
        found = job.get_status()
        assert found != "failed" or status == "failed", failure(job)
        return bool(found == status)

    wait_until(look, seconds)


def wait_for_parts(job: Job, out: Path, count: int = 1) -> None:
    """Wait until a running job has so many parts on the disk, and has said so."""
    wait_until(lambda: len(parts(out)) >= count, START_SECONDS)
    wait_until(lambda: job.get_meta().get("done", 0) > 0, START_SECONDS)


def parts(out: Path) -> dict[str, int]:
    """Return the inodes of the parts by name: a part that is written again has another one.

    Of an unfinished output these are the parts in its journal: a crash may cost the newest file.
    """
    journal = out / STATE_DIRECTORY / JOURNAL_FILE
    known = journal.read_text(encoding="utf-8") if journal.exists() else None
    found = {path.name: path.stat().st_ino for path in out.glob("part-*.parquet")}
    return {name: node for name, node in found.items() if known is None or name in known}


def failure(job: Job) -> str:
    """Return the last line of why an RQ job failed."""
    result = job.latest_result()
    assert result is not None
    return (result.exc_string or "").strip().splitlines()[-1]


def returned(job: Job) -> dict[str, Any]:
    """Return what a finished RQ job returned."""
    value = job.return_value()
    assert isinstance(value, dict)
    return value
