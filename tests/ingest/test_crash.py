"""What becomes of a job whose RQ worker dies, is stopped, or is told to drop it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from rq.command import send_stop_job_command
from rq.job import Job

from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.ingest.door import SLOW, Door, failure, kill_tree, parts, wait_for, wait_for_parts
from tests.support import wait_until

COUNT = 6_000
PART_BYTES = 64_000  # a thousand chunks of 16 floats


class Request:
    """A job of some seconds, and its output."""

    def __init__(self, door: Door) -> None:
        self.texts = list(texts_of(COUNT))
        self.corpus = write_corpus(door.home / "corpus.jsonl", self.texts)
        self.out = door.home / "out"
        self.job = self.enqueue(door)

    def enqueue(self, door: Door) -> Job:
        """Ask for it, once more."""
        return door.enqueue("embed_corpus", str(self.corpus), str(self.out), model=SLOW)

    def check(self) -> None:
        """All is there, once and in order."""
        check_output(self.out, self.texts, 16)


@contextmanager
def running(door: Door) -> Iterator[tuple[psutil.Process, Request]]:
    """An ingest role in the middle of a job."""
    with ExitStack() as stack:
        request = Request(door)
        stack.enter_context(door.work())
        process = stack.enter_context(door.ingest(part_bytes_max=PART_BYTES))
        wait_for_parts(request.job, request.out)
        yield process, request


def of(process: psutil.Process, words: str) -> psutil.Process:
    """The process below another one whose command line has these words."""
    tree = process.children(recursive=True)
    return next(each for each in tree if words in " ".join(each.cmdline()))


def test_a_killed_job_goes_on(door: Door) -> None:
    """`kill -9` of the job's process, the RQ worker, the role, all at once: it is resumed."""
    with running(door) as (process, request):
        kept = parts(request.out)
        for words in ("horse", "worker"):
            done = request.job.get_meta()["done"]
            worker = of(process, "producer.main")
            (worker.children()[0] if words == "horse" else worker).kill()
            wait_until(lambda done=done: request.job.get_meta()["done"] > done + 200, 30)
        process.kill()
        with door.ingest(part_bytes_max=PART_BYTES) as successor:
            done = request.job.get_meta()["done"]
            wait_until(lambda: request.job.get_meta()["done"] > done + 200, 30)
            kill_tree(successor)
        assert request.job.get_status() == "started"
        with door.ingest(part_bytes_max=PART_BYTES):
            wait_for(request.job, "finished")
        assert kept.items() <= parts(request.out).items()
        request.check()


def test_a_stopped_role_hands_its_job_back(door: Door) -> None:
    """SIGTERM: status 0, no process left, the job in the queue, and the next role resumes it."""
    with running(door) as (process, request):
        tree = process.children(recursive=True)
        process.terminate()
        assert process.wait(20) == 0
        assert not psutil.wait_procs(tree, timeout=10)[1]
        assert request.job.get_status() == "queued"
        kept = parts(request.out)
        with door.ingest(part_bytes_max=PART_BYTES):
            wait_for(request.job, "finished")
        assert kept.items() <= parts(request.out).items()
        request.check()


def test_a_job_that_kills_its_workers_is_given_up(door: Door) -> None:
    """After `deliveries_max` deaths without progress it fails, with the reason."""
    request = Request(door)
    with door.ingest(deliveries_max=2) as process:  # nobody embeds, so that there is no progress
        for _ in range(2):
            wait_until(lambda: "out" in request.job.get_meta(), 30)
            worker = of(process, "producer.main")
            wait_until(worker.children, 30)
            os.kill(worker.children()[0].pid, signal.SIGKILL)
            wait_until(lambda: not worker.children() or request.job.get_status() != "started", 30)
        wait_for(request.job, "failed")
    assert "terminated unexpectedly" in failure(request.job)


def test_a_running_job_that_nobody_wants(door: Door) -> None:
    """RQ's stop, cancel and delete end it, and the farm's job; asked for again, it is resumed."""
    with running(door) as (_, request):
        job = request.job
        for way in ("stop", "cancel", "delete"):
            if way == "stop":
                send_stop_job_command(door.connection, job.id, serializer="json")
            else:
                job.cancel() if way == "cancel" else job.delete()
            wait_until(lambda: door.farm_states() == ["cancelled"], 30)
            cleaning = door.enqueue("cleanup", 0)
            wait_for(cleaning, "finished")
            assert len(cleaning.return_value()["jobs"]) == 1
            if way != "delete":
                assert job.get_status() == "stopped"
            job = request.enqueue(door)
            wait_until(lambda: door.farm_states() != [] or job.is_finished, 30)  # noqa: B023 -- at once
        wait_for(job, "finished")
        request.check()


def test_a_queued_job_that_nobody_wants(door: Door) -> None:
    """Cancelled before it ran: it never runs. After it was handed back: the farm's job goes too.

    That one can be removed from the farm, which a job that goes on cannot without --force.
    """
    with running(door) as (process, request):
        process.terminate()
        assert process.wait(20) == 0
        fresh = door.enqueue("embed_corpus", str(request.corpus), str(door.home / "other"))
        request.job.cancel()
        fresh.cancel()
        [job] = door.farm_jobs()
        refused = run("jobs", "rm", "--redis", door.server.url, job)
        assert (refused.returncode, "cancel it first" in refused.stderr) == (1, True)
        with door.ingest():
            wait_until(lambda: door.farm_states() == ["cancelled"], 30)
        assert request.job.get_status() == fresh.get_status() == "canceled"
        assert not (door.home / "other").exists()
        assert run("jobs", "rm", "--redis", door.server.url, job[:6]).returncode == 0
        assert not door.connection.keys(f"*{job}*")


def test_a_job_that_takes_too_long(door: Door) -> None:
    """RQ's `job_timeout` ends it and its command; what it has done stays for the next try."""
    request = Request(door)
    with door.ingest():
        out = str(door.home / "late")
        job = door.enqueue("embed_corpus", str(request.corpus), out, job_timeout=2)
        request.job.cancel()
        wait_for(job, "failed", 30)
        assert "JobTimeoutException" in failure(job)


@pytest.mark.slow
def test_a_lost_job_is_picked_up_in_two_minutes(door: Door) -> None:
    """With the real lease: everything of the role is killed at once, and a new one takes over."""
    request = Request(door)
    with door.work():
        with door.ingest(part_bytes_max=PART_BYTES, ingest_lease_seconds=30) as process:
            wait_for_parts(request.job, request.out)
            before = parts(request.out)
            kill_tree(process)
        began = time.monotonic()
        with door.ingest(part_bytes_max=PART_BYTES, ingest_lease_seconds=30):
            wait_for(request.job, "finished", 120)
        assert time.monotonic() - began < 120
        assert before.items() <= parts(request.out).items()
        request.check()
