"""The RQ jobs behind jobs by HTTP: each job has one at a time, which is named after it."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import redis
from rq import Queue
from rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.executions import ExecutionRegistry
from rq.results import Result
from rq.utils import get_call_string
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.broker import block_ms
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.redaction import hide_urls
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.contract.unreadable_records import name_once
from embedfarm.ingest.job_directories import (
    OUTPUT,
    Call,
    directory_of,
    is_submitted,
    read_call,
    remove_directory,
)
from embedfarm.ingest.openai_files import BATCH_INPUT
from embedfarm.ingest.rq_jobs import end_farm_jobs
from embedfarm.ingest.rq_keys import ReadableJob
from embedfarm.ingest.task_job import FAILURE_SECONDS, OVER, RESULT_SECONDS
from embedfarm.ingest.tasks import QUEUE

PREFIX: Final = "http-"
END_SECONDS: Final = 5.0
WAITING_MAX: Final = 1000  # jobs whose places in the queue are told
DESCRIBED_CHARACTERS: Final = 75  # of an argument, as RQ describes a job that says nothing


@dataclass(frozen=True)
class Submissions:
    """Requests of the HTTP server to `embedfarm ingest`.

    Attributes:
        client: Client of the farm's server.
        settings: The farm's settings.
        rq: Client of the server of RQ's queue.
    """

    client: redis.Redis
    settings: Settings
    rq: redis.Redis

    @property
    def _queue(self) -> Queue:
        return Queue(QUEUE, self.rq, serializer="json")

    def embed(self, job: str, call: Call, task: str = "embed_corpus") -> None:
        """Enqueue a task of `producer.tasks` for a job.

        Raises:
            rq.exceptions.DuplicateJobError: Another task for the job is not done yet.
        """
        self._enqueue(task, job, (call.corpus, call.out), call.options)

    def answer(self, batch: str, model: str) -> None:
        """Enqueue the task that answers the requests of a batch.

        Raises:
            rq.exceptions.DuplicateJobError: Another task for the batch is not done yet.
        """
        self._enqueue("embed_batch", batch, (), {"job_id": batch, "model": model})

    def _enqueue(
        self, task: str, job: str, words: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        before = self._request(job)
        if before is not None and not self.pending(job):
            before.forget()
        name = f"producer.tasks.{task}"
        said = get_call_string(name, words, options, DESCRIBED_CHARACTERS) or ""
        self._queue.enqueue_call(
            name,
            args=words,
            kwargs=options,
            result_ttl=RESULT_SECONDS,
            failure_ttl=FAILURE_SECONDS,
            description=hide_urls(said),
            job_id=PREFIX + job,
            unique=True,
        )

    def cancel(self, job: str) -> None:
        """Cancel the RQ job behind a job that was cancelled; the job ends if it had not begun.

        One that runs ends within seconds, once what was embedded of it is on the disk.
        """
        if not is_submitted(job):
            return
        running = self.running(job)  # RQ takes it off the list of those when it is cancelled
        request = self._request(job)
        if request is not None and self.pending(job):
            request.cancel()
        if not running:
            with contextlib.suppress(JobGone):
                FarmClient(self.client).end(job, "cancelled", "", self.settings)

    def remove(self, job: str) -> None:
        """Remove the RQ job behind a job, and the job's directory; a retry of it is cancelled."""
        request = self._request(job)
        if request is not None:
            request.forget()
        directory = directory_of(self.settings, job)
        if directory is not None:
            end_farm_jobs(FarmClient(self.client), directory / OUTPUT, self.settings)
            remove_directory(directory)

    def was_made(self, job: str) -> bool:
        """Tell whether a job is there, in whatever state, so that nothing of it is made again.

        Raises:
            JobGone: The job was there, and is there no more.
        """
        if FarmClient(self.client).exists(job):
            return True
        output = self.settings.jobs_path / job / OUTPUT
        if output.exists() or self._request(job) is not None:
            raise JobGone(job)
        return False

    def is_forgotten(self, job: str) -> bool:
        """Tell whether an unfinished job has no RQ job behind it."""
        status = FarmClient(self.client).job(job).status()
        return not status.over and self._request(job) is None

    def enqueue_forgotten(self) -> list[str]:
        """Enqueue jobs that were made and never enqueued; return their names.

        Their maker died in between, or the server has lost the end of its log. A job that has an
        owner was begun once: somebody may run it by hand.
        """
        made = [job for job in FarmClient(self.client).job_ids() if is_submitted(job)]
        pipe = self.rq.pipeline(transaction=False)
        for job in made:
            pipe.exists(ReadableJob.key_for(PREFIX + job))
        left = [job for job, known in zip(made, pipe.execute(), strict=True) if not known]
        unfinished = [x.job for x in read_backlogs(self.client, left) if not x.status.over]
        return [job for job in unfinished if self._enqueue_anew(job)]

    def _enqueue_anew(self, job: str) -> bool:
        """Enqueue a job that no run has begun, if its input is there; tell whether it was done."""
        handle, directory = FarmClient(self.client).job(job), self.settings.jobs_path / job
        call = read_call(directory)
        with contextlib.suppress(JobGone, DuplicateJobError):
            if handle.noted("owner"):
                return False
            if call is not None:
                self.embed(job, call)
                return True
            if job.startswith("batch_") and (directory / BATCH_INPUT).exists():
                self.answer(job, handle.spec().model)
                return True
        return False

    def pending(self, job: str) -> bool:
        """Tell whether something is yet to be done for a job."""
        request = self._request(job)
        with contextlib.suppress(ValueError, InvalidJobOperation):  # a state that is none, or gone
            return request is not None and request.get_status() not in OVER
        return False

    def await_end(self, job: str) -> bool:
        """Tell whether nothing is yet to be done for a job, after a moment for what is ending.

        A job has ended on the farm a moment before its RQ job has.
        """
        deadline = time.monotonic() + END_SECONDS
        key = Result.get_key(PREFIX + job)
        try:
            while self.pending(job) and (left := deadline - time.monotonic()) > 0:
                latest: Any = self.rq.xrevrange(key, count=1)
                if self.pending(job):  # what comes from here on is behind `latest`
                    after: bytes = latest[0][0] if latest else b"0"
                    self.rq.xread({key: after}, block=block_ms(left))
        except redis.ResponseError as error:
            _name_foreign(key, error)
        return not self.pending(job)

    def waiting(self) -> list[str]:
        """List the jobs that wait for an ingest worker, up to 1,000, the next one first."""
        first = partial(self.rq.lrange, start=0, end=WAITING_MAX - 1)
        requests = [each.decode(errors="replace") for each in _members(first, self._queue.key)]
        return [each.removeprefix(PREFIX) for each in requests if each.startswith(PREFIX)]

    def running(self, job: str) -> bool:
        """Tell whether an ingest worker is at work on a job."""
        all_of = partial(self.rq.zrange, start=0, end=-1)
        started = _members(all_of, self._queue.started_job_registry.key)
        return (PREFIX + job).encode() in {each.partition(b":")[0] for each in started}

    def is_executed(self, job: str) -> bool:
        """Tell whether an ingest worker executes a job's RQ job, be that cancelled or not."""
        if not is_submitted(job):
            return False
        executions = ExecutionRegistry(PREFIX + job, self.rq)
        try:
            return bool(self.rq.zcount(executions.key, time.time(), "+inf"))
        except redis.ResponseError as error:
            _name_foreign(executions.key, error)
            return False

    def _request(self, job: str) -> ReadableJob | None:
        if not is_submitted(job):
            return None
        try:
            return ReadableJob.fetch(PREFIX + job, self.rq, serializer="json")
        except NoSuchJobError:
            return None


def has_worker(rq: redis.Redis) -> bool:
    """Tell whether an ingest worker is alive, by the server of RQ's queue."""
    keys = _members(rq.smembers, WORKERS_BY_QUEUE_KEY % QUEUE)
    return bool(keys) and bool(rq.exists(*keys))


def _members(read: Callable[[str], Any], key: str) -> list[bytes]:
    """Return the members of one of RQ's sets; none if the key has another type.

    They stay bytes: who may write there may write what is no text, over which RQ would end.
    """
    try:
        return list(read(key))
    except redis.ResponseError as error:
        _name_foreign(key, error)
        return []


def _name_foreign(key: str, error: redis.ResponseError) -> None:
    """Name a key of another type than RQ gives it; raise any other error again."""
    if "WRONGTYPE" not in str(error):
        raise error
    name_once(key, str(error))
