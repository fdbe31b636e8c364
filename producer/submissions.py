"""The RQ jobs behind jobs by HTTP: one for each at a time, named after it."""

from dataclasses import dataclass
from typing import Any, Final

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.worker_registration import get_keys

from embedfarm.settings import Settings
from producer.directories import Call, directory_of, is_submitted, remove_directory
from producer.ingest import FAILURE_SECONDS, OVER, RESULT_SECONDS
from producer.requests import ReadableJob
from producer.tasks import QUEUE

PREFIX: Final = "http-"


@dataclass(frozen=True)
class Submissions:
    """What HTTP asks of `embedfarm ingest`."""

    client: redis.Redis
    settings: Settings

    @property
    def _queue(self) -> Queue:
        return Queue(QUEUE, self.client, serializer="json")

    def embed(self, job: str, call: Call, task: str = "embed_corpus") -> None:
        """Have a task of `producer.tasks` done for a job.

        Raises:
            rq.exceptions.DuplicateJobError: Another one for it is not done yet.
        """
        self._enqueue(task, job, (call.corpus, call.out), call.options)

    def answer(self, batch: str, model: str) -> None:
        """Have the requests of a batch answered.

        Raises:
            As `embed`.
        """
        self._enqueue("embed_batch", batch, (), {"job_id": batch, "model": model})

    def _enqueue(
        self, task: str, job: str, words: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        before = self._request(job)
        if before is not None and not self.pending(job):
            before.delete()
        self._queue.enqueue_call(
            f"producer.tasks.{task}",
            args=words,
            kwargs=options,
            timeout=self.settings.ingest_seconds_max,
            result_ttl=RESULT_SECONDS,
            failure_ttl=FAILURE_SECONDS,
            job_id=PREFIX + job,
            unique=True,
        )

    def cancel(self, job: str) -> None:
        """Have nothing more done for a job; what runs is stopped within seconds."""
        request = self._request(job)
        if request is not None and self.pending(job):
            request.cancel()

    def remove(self, job: str) -> None:
        """Forget what was to be done for a job, and remove its directory."""
        request = self._request(job)
        if request is not None:
            request.delete()
        directory = directory_of(self.settings, job)
        if directory is not None:
            remove_directory(directory)

    def pending(self, job: str) -> bool:
        """Whether something is yet to be done for a job."""
        request = self._request(job)
        return request is not None and request.get_status() not in OVER

    def running(self, job: str) -> bool:
        """Whether an ingest worker is at it."""
        started = self._queue.started_job_registry.get_job_ids(cleanup=False)
        return PREFIX + job in started

    def _request(self, job: str) -> Job | None:
        if not is_submitted(job):
            return None
        try:
            return ReadableJob.fetch(PREFIX + job, self.client, serializer="json")
        except NoSuchJobError:
            return None


def has_worker(client: redis.Redis) -> bool:
    """Whether an ingest worker is alive."""
    keys = get_keys(Queue(QUEUE, client, serializer="json"))
    return bool(keys) and bool(client.exists(*keys))
