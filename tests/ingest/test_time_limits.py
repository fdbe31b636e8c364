"""Tests of how long a job may take: as long as it says, or as long as it makes progress."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rq.job import Job
from rq.timeouts import HorseMonitorTimeoutException

from embedfarm.contract.settings import Settings
from embedfarm.ingest.rq_jobs import NO_TIME, note
from embedfarm.ingest.task_job import TaskJob
from embedfarm.ingest.task_worker import TaskWorker
from embedfarm.ingest.tasks import TASKS
from tests.ingest.rq_farm import Door, failure, returned

SECONDS = 1000
SHORT = 9  # what is left of the time before a job says how far it is

Perform = Callable[..., Job]


@pytest.fixture
def perform(door: Door, monkeypatch: pytest.MonkeyPatch) -> Perform:
    """Return a function that runs a task of an RQ job in a forked process, as a worker does."""

    def perform(task: Callable[[], Any], **options: Any) -> Job:  # noqa: ANN401 -- as RQ takes them
        monkeypatch.setitem(TASKS, "producer.tasks.cleanup", task)
        job = door.enqueue("cleanup", **options)
        process = multiprocessing.get_context("fork").Process(
            target=perform_here, args=(Settings(redis_url=door.server.url), job.id)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        return TaskJob.fetch(job.id, door.connection, "json")

    return perform


def perform_here(settings: Settings, name: str) -> None:
    """Do with a job what the forked process of a worker does."""
    worker = TaskWorker(settings)
    job = TaskJob.fetch(name, worker.connection, "json")
    worker.prepare_execution(job)
    worker.perform_job(job, worker.queues[0])


def measure() -> dict[str, Any]:
    """Return which of some notes of progress gave the task more time."""
    gave = list[bool]()
    for facts in ({"done": 1}, {"done": 1}, {"done": 2}, {"of": 7}, {"fetched_bytes": 5}):
        signal.alarm(SHORT)
        note(**facts)
        gave.append(signal.getitimer(signal.ITIMER_REAL)[0] > SHORT)
    return {"gave": gave}


@pytest.mark.parametrize("options", [{}, {"job_timeout": 180}, {"job_timeout": -1}])
def test_who_names_no_time_has_all_that_it_needs(
    perform: Perform, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk done and each byte fetched begins the time of a job anew that names none."""
    monkeypatch.setenv("EMBEDFARM_INGEST_SECONDS_MAX", str(SECONDS))
    job = perform(measure, **options)
    assert job.get_status() == "finished"
    assert job.timeout == NO_TIME
    assert returned(job)["gave"] == [True, False, True, False, True]


def test_who_names_a_time_has_that(perform: Perform) -> None:
    """Progress does not extend the time of a job that names one."""
    job = perform(measure, job_timeout=3600)
    assert (job.get_status(), job.timeout) == ("finished", 3600)
    assert not any(returned(job)["gave"])


def test_who_comes_no_further_fails(perform: Perform, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without progress fails, and says for how long it had none."""
    monkeypatch.setenv("EMBEDFARM_INGEST_SECONDS_MAX", "1")
    job = perform(threading.Event().wait)
    assert job.get_status() == "failed"
    assert failure(job).endswith("TaskStalled: no progress for ingest_seconds_max, 1 s")


def test_no_alarm_comes_between_an_end_and_its_note(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waits to be tried again stays so, whenever RQ's alarm rings as its process ends.

    Here the alarm rings when the end has been taken, if it is still on.
    """
    taken = os.wait4

    def ring(*words: int) -> object:
        end = taken(*words)
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            raise HorseMonitorTimeoutException
        return end

    monkeypatch.setattr(os, "wait4", ring)
    worker = TaskWorker(Settings(redis_url=door.server.url))
    job = TaskJob.fetch(door.enqueue("cleanup").id, worker.connection, "json")
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    monkeypatch.setattr(worker, "_horse_pid", process.pid)
    worker.monitor_work_horse(job, worker.queues[0])
    assert job.get_status() == "queued"
