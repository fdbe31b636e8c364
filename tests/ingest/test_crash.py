"""Tests of a job whose RQ worker dies, is stopped, or is told to drop it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
from rq.command import send_stop_job_command
from rq.job import Job

from embedfarm.ingest.rq_jobs import DEATHS
from embedfarm.ingest.task_job import GIVEN_UP
from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.ingest.rq_farm import (
    ENDLESS,
    SLOW,
    START_SECONDS,
    Door,
    failure,
    kill_tree,
    parts,
    wait_for,
    wait_for_parts,
)
from tests.support import wait_until

COUNT = 6_000
SLOWER = "null:16:10000"  # half a minute: on a busy machine the end of SLOW came before the signal
PART_BYTES = 16_000  # 250 chunks of 16 floats
SETTINGS = {"part_bytes_max": PART_BYTES, "deliveries_max": 10}  # more deaths than a test causes


class Request:
    """An RQ job of some seconds, and its output."""

    def __init__(self, door: Door, model: str = SLOW) -> None:
        self.model = model
        self.texts = list(texts_of(COUNT))
        self.corpus = write_corpus(door.home / "corpus.jsonl", self.texts)
        self.out = door.home / "out"
        self.job = self.enqueue(door)

    def enqueue(self, door: Door) -> Job:
        """Enqueue the job, once more."""
        return door.enqueue("embed_corpus", str(self.corpus), str(self.out), model=self.model)

    def check(self) -> None:
        """Assert that all vectors are there, once and in order."""
        check_output(self.out, self.texts, 16)


@contextmanager
def running(door: Door, model: str = SLOW) -> Iterator[tuple[psutil.Process, Request]]:
    """Start a worker and an ingest role, and yield in the middle of a job."""
    with ExitStack() as stack:
        request = Request(door, model)
        stack.enter_context(door.work())
        process = stack.enter_context(door.ingest(**SETTINGS))
        wait_for_parts(request.job, request.out)
        yield process, request


def of(process: psutil.Process, words: str) -> psutil.Process | None:
    """Return the process below another one whose command line has these words, None without one."""
    with suppress(psutil.NoSuchProcess):
        for each in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if f"{words} " in f"{' '.join(each.cmdline())} ":
                    return each
    return None


def worker_of(process: psutil.Process) -> psutil.Process:
    """Return the RQ worker of a role."""
    worker = of(process, "embedfarm.ingest.main")
    assert worker is not None
    return worker


def wait_for_another(process: psutil.Process, command: psutil.Process | None) -> psutil.Process:
    """Wait for a command that embeds other than the given one, and return it."""
    found = list[psutil.Process]()

    def look() -> bool:
        each = of(process, "-m embedfarm embed")
        found[:] = [] if each is None or each == command else [each]
        return bool(found)

    wait_until(look, START_SECONDS)
    return found[0]


def test_a_killed_job_goes_on(door: Door) -> None:
    """A job is resumed after kill -9 of its command, its process, the RQ worker, or the role."""
    with running(door) as (process, request):
        kept = parts(request.out)
        command = wait_for_another(process, None)
        for victim in ("command", "job", "worker"):
            worker = worker_of(process)
            [job] = worker.children()
            {"command": command, "job": job, "worker": worker}[victim].kill()
            command = wait_for_another(process, command)
        process.kill()
        with door.ingest(**SETTINGS) as successor:
            wait_for_another(successor, command)
            kill_tree(successor)
        assert request.job.get_status() == "started"
        with door.ingest(**SETTINGS):
            wait_for(request.job, "finished")
        assert kept.items() <= parts(request.out).items()
        request.check()


def test_a_stopped_command_goes_on(door: Door) -> None:
    """A job whose command alone gets SIGTERM, as from a host that is going down, is resumed.

    When the processes above a command are killed, it ends by itself, and is in nobody's way.
    """
    with running(door) as (process, request):
        command = wait_for_another(process, None)
        command.terminate()
        command = wait_for_another(process, command)
        worker = worker_of(process)
        for each in (worker, *worker.children()):
            each.suspend()
        for each in (*worker.children(), worker):
            each.kill()
        assert not psutil.wait_procs([command], timeout=START_SECONDS)[1]
        wait_for(request.job, "finished")
        request.check()


def test_a_host_that_goes_down(door: Door) -> None:
    """A job is handed back to the queue when all processes get SIGTERM at once."""
    with running(door, ENDLESS) as (process, request):
        tree = process.children(recursive=True)
        for each in reversed(tree):
            each.terminate()
        process.terminate()
        assert door.role is not None
        assert door.role.wait(40) == 0
        assert request.job.get_status() == "queued"
        assert DEATHS not in request.job.get_meta()


def test_a_stopped_role_hands_its_job_back(door: Door) -> None:
    """A role that gets SIGTERM ends with status 0, and its job is in the queue again.

    If the job is cancelled there, it never runs; the farm's job is cancelled as well, and can then
    be removed without --force. If it is asked for again, it is resumed.
    """
    with running(door, SLOWER) as (process, request):
        tree = process.children(recursive=True)
        process.terminate()
        assert door.role is not None
        assert door.role.wait(20) == 0
        assert not psutil.wait_procs(tree, timeout=10)[1]
        wait_for(request.job, "queued", 0)
        kept = parts(request.out)
        fresh = door.enqueue("embed_corpus", str(request.corpus), str(door.home / "other"))
        request.job.cancel()
        fresh.cancel()
        [job] = door.farm_jobs()
        remove = ("jobs", "rm", "--redis", door.server.url, job[:6])
        refused = run(*remove)
        assert (refused.returncode, "cancel it first" in refused.stderr) == (1, True)
        with door.ingest(part_bytes_max=PART_BYTES):
            wait_until(lambda: door.farm_states() == ["cancelled"], START_SECONDS)
            assert run(*remove).returncode == 0
            assert not door.connection.keys(f"*{job}*")
            wait_for(request.enqueue(door), "finished")
        assert request.job.get_status() == fresh.get_status() == "canceled"
        assert not (door.home / "other").exists()
        assert kept.items() <= parts(request.out).items()
        request.check()


def test_a_job_that_goes_wrong_ends(door: Door) -> None:
    """A job fails after `deliveries_max` deaths without progress, or after its `job_timeout`."""
    request = Request(door)
    command = None
    with door.ingest(deliveries_max=2) as process:  # nobody embeds, so that there is no progress
        for _ in range(2):
            command = wait_for_another(process, command)
            worker_of(process).children()[0].kill()
        wait_for(request.job, "failed")
        killed = request.enqueue(door)
        for _ in range(2):
            command = wait_for_another(process, command)
            command.kill()
        wait_for(killed, "failed")
        out = str(door.home / "late")
        late = door.enqueue("embed_corpus", str(request.corpus), out, job_timeout=1)
        wait_for(late, "failed")
        assert of(process, "-m embedfarm") is None
    assert "JobTimeoutException" in failure(late)
    for job, whose in ((request.job, "its process was"), (killed, "embedfarm embed was")):
        assert f"{GIVEN_UP}: {whose} ended by SIGKILL" in failure(job)
        assert "out of memory" in failure(job)


def test_a_running_job_that_nobody_wants(door: Door) -> None:
    """RQ's stop, cancel and delete end a running job, and the worker takes the next one."""
    with running(door, ENDLESS) as (_, request):
        job = request.job
        for way in ("stop", "cancel", "delete"):
            if way == "stop":
                send_stop_job_command(door.connection, job.id, serializer="json")
            else:
                job.cancel() if way == "cancel" else job.delete()
            wait_until(lambda: door.farm_states() == ["cancelled"], START_SECONDS)
            if way != "delete":
                wait_for(job, "stopped")
            wait_for(door.enqueue("cleanup", 0), "finished")
            assert not door.farm_jobs()
            job = request.enqueue(door)
            wait_until(door.farm_jobs, START_SECONDS)


@pytest.mark.slow
def test_a_lost_job_is_picked_up_in_two_minutes(door: Door) -> None:
    """A job whose role was killed as a whole is finished by a new one, with the default lease."""
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
