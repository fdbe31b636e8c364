"""The RQ worker: runs the tasks on a list and nothing else, and repeats what a crash cut off.

RQ by itself would run any dotted path, look for the dead after 405 seconds at the earliest, and
fail what they left unless the job was enqueued with retries.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

import redis
from rq import Queue, Retry, Worker
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)
from rq.utils import now
from rq.worker_registration import clean_worker_registry

from embedfarm.broker import host_name
from embedfarm.server_url import make_pool
from embedfarm.settings import Settings
from producer.command import Interrupted, stop_when_asked
from producer.notices import tell
from producer.outbound import hide_urls
from producer.requests import DEATHS, ReadableJob, cancel_request, end_farm_job
from producer.rescue import find_lost, take
from producer.tasks import DAY_SECONDS, QUEUE, TASKS

RESULT_SECONDS: Final = DAY_SECONDS
FAILURE_SECONDS: Final = 7 * DAY_SECONDS
CANCELLED_MAX: Final = 1000  # newest cancelled jobs that are looked at
GIVEN_UP: Final = "given up: as many workers died with this job as deliveries_max allows"
OVER: Final = frozenset(
    {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}
)

log = logging.getLogger(__name__)


def worker_name(pid: int) -> str:
    """What a process of this host is called among RQ's workers."""
    return f"{host_name()}-ingest-{pid}"


def are_registered(client: redis.Redis, pids: Collection[int]) -> bool:
    """Whether RQ knows all these processes of this host as workers."""
    prefix = Worker.redis_worker_namespace_prefix
    keys = [f"{prefix}{worker_name(pid)}" for pid in pids]
    return bool(keys) and client.exists(*keys) == len(keys)


class TaskRefused(RuntimeError):
    """A job that asks for something that is on no list; nothing of it was run."""


class TaskJob(ReadableJob):
    """An RQ job that can only be one of `producer.tasks.TASKS`, with JSON arguments."""

    def restore(self, raw_data: Any) -> Any:  # noqa: ANN401 -- as RQ has it
        """Give times to a job that was enqueued without; RQ's own are 3 minutes and a year.

        RQ logs the description, which is made of the arguments unless the job came with another.
        """
        super().restore(raw_data)
        self.description = hide_urls(self.description or "")
        if self.timeout in {None, Queue.DEFAULT_TIMEOUT}:
            self.timeout = Settings().ingest_seconds_max
        if self.failure_ttl is None:
            self.failure_ttl = FAILURE_SECONDS
        self.get_meta(refresh=False)

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 -- as RQ has it
        """What the job says of itself; whoever enqueued it may have put anything there."""
        meta: Any = None
        with contextlib.suppress(ValueError):  # no JSON
            meta = super().get_meta(refresh)
        self.meta = meta if isinstance(meta, dict) else {}
        return self.meta

    def _deserialize_data(self) -> None:
        try:
            super()._deserialize_data()  # type: ignore[no-untyped-call] # RQ is typed in part
        except DeserializationError as error:
            raise DeserializationError(
                'refused: the job is not JSON; enqueue with Queue(…, serializer="json")'
            ) from error

    @property
    def func(self) -> Callable[..., Any]:
        """The task, found by its name on the list; nothing is imported for it."""
        task = TASKS.get(str(self.func_name))
        if task is None or self.instance is not None:
            raise TaskRefused(f"refused: {self.func_name!r} is none of {', '.join(TASKS)}")
        return task

    @property
    def success_callback(self) -> None:
        """None: it would be another dotted path."""

    @property
    def failure_callback(self) -> None:
        """None: it would be another dotted path."""

    @property
    def stopped_callback(self) -> Callable[[Job, redis.Redis], Any]:
        """What RQ calls after it has killed a job on demand."""
        return cancel_request

    def send_webhooks(self, status: str | JobStatus, *, exc_string: str | None = None) -> None:
        """Call no address for anyone."""

    def perform(self) -> Any:  # noqa: ANN401 -- as RQ has it
        """Run the task; one that is interrupted goes back into the queue, and costs no retry."""
        names = (
            self._success_callback_name,
            self._failure_callback_name,
            self._stopped_callback_name,
        )
        if any(names) or self.webhooks:
            raise TaskRefused("refused: a job may bring no callbacks and no webhooks")
        try:
            result = super().perform()
        except Interrupted:
            return Retry(max=sys.maxsize)
        tell(self, "finished")
        return result


class TaskWorker(Worker):
    """Forks a process per job, keeps the job's lease, and looks for jobs whose lease ran out.

    Args:
        settings: Limits; the server is `redis_url`, on a connection of its own, since RQ changes
            its waiting times.

    Attributes:
        asked: Whether it was asked to stop.
    """

    asked = False

    def __init__(self, settings: Settings) -> None:
        connection = redis.Redis.from_pool(make_pool(settings.redis_url))
        self._settings = settings
        self._lease_seconds = settings.ingest_lease_seconds
        tick = self._lease_seconds // 3
        super().__init__(
            [Queue(QUEUE, connection, serializer="json", job_class=TaskJob)],
            name=worker_name(os.getpid()),
            connection=connection,
            job_class=TaskJob,
            serializer="json",
            default_result_ttl=RESULT_SECONDS,
            maintenance_interval=self._lease_seconds,
            job_monitoring_interval=tick,
            worker_ttl=15 + tick,  # RQ waits 15 s less for a job before it looks around
        )

    def get_heartbeat_ttl(self, job: Job) -> int:
        """Seconds after which a silent worker has lost its job."""
        del job
        return self._lease_seconds

    # Stopping.

    def handle_warm_shutdown_request(self) -> None:
        """Hand the running job back instead of waiting for its end."""
        self.asked = True
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call] # as above
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def setup_work_horse_signals(self) -> None:
        """In the process of a job: stop its command when asked, or when the worker is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_when_asked(self.pid or 0)

    # What fails, and what a crash leaves.

    def handle_job_failure(
        self,
        job: Job,
        queue: Queue,
        started_job_registry: StartedJobRegistry | None = None,
        exc_string: str = "",
    ) -> None:
        """End the farm's job, and tell of a failure, if the job is not tried again.

        Both come first: a failed job has a reason, and once it has failed it may be deleted or
        enqueued again at any moment, by the same name.
        """
        if not job.should_retry and self._stopped_job_id != job.id:
            reason = _last_sentence(exc_string) or "no reason is known"
            end_farm_job(job, reason, self._settings)
            cancelled = job.get_meta().get("state") == "cancelled"
            tell(job, "cancelled" if cancelled else "failed", reason)
        super().handle_job_failure(job, queue, started_job_registry, exc_string)

    # What a crash leaves.

    def handle_work_horse_killed(
        self,
        job: Job,
        retpid: int | None,
        ret_val: int | None,
        rusage: Any,  # noqa: ANN401 -- as RQ has it
    ) -> None:
        """Repeat a job whose process was killed, by the system for its memory for example."""
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)  # type: ignore[no-untyped-call] # as above
        if retpid is None:  # RQ has killed it, a minute after its time was up
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(retpid, signal.SIGKILL)  # the job's command
        if self._forgive(job):
            job.retries_left = (job.retries_left or 0) + 1

    def _forgive(self, job: Job) -> bool:
        """Whether a run that died may be repeated: until as many died without any progress."""
        before = job.get_meta().get(DEATHS)
        deaths = before + 1 if isinstance(before, int) else 1
        job.meta[DEATHS] = deaths
        job.save_meta()
        return bool(deaths < self._settings.deliveries_max)

    def clean_registries(self) -> None:
        """RQ's maintenance, but that lost jobs are repeated, and cancelled ones left by the farm.

        Without RQ's lock, which a worker that dies in here would hold for a quarter of an hour:
        each step is atomic.
        """
        [queue] = self.queues
        for registry in (FinishedJobRegistry, FailedJobRegistry, DeferredJobRegistry):
            registry(queue=queue, job_class=TaskJob).cleanup()
        clean_worker_registry(queue)
        self._repeat_lost(queue)
        self._cancel_cancelled(queue)
        self.last_cleaned_at = now()  # type: ignore[assignment] # RQ types what it begins with

    def _repeat_lost(self, queue: Queue) -> None:
        """Repeat the jobs of dead workers, but not for ever."""
        for lost in find_lost(queue, self._lease_seconds):
            try:
                job = TaskJob.fetch(lost.job, self.connection, "json")
            except NoSuchJobError:
                take(queue, lost, repeat=False)
                continue
            over = job.get_status() in OVER
            repeat = not over and self._forgive(job)
            if take(queue, lost, repeat=repeat) and not over:
                log.warning("job %s was lost with its worker", lost.job)
                if not repeat:
                    self.handle_job_failure(job, queue, exc_string=GIVEN_UP)

    def _cancel_cancelled(self, queue: Queue) -> None:
        """Cancel on the farm what was cancelled in the queue, having run before."""
        registry = CanceledJobRegistry(queue=queue)
        for name in registry.get_job_ids(0, CANCELLED_MAX - 1, desc=True):
            with contextlib.suppress(NoSuchJobError):
                cancel_request(TaskJob.fetch(name, self.connection, "json"), self.connection)


def _last_sentence(trace: str) -> str:
    """What an exception said, without its name and where it was raised."""
    lines = trace.strip().splitlines()
    name, separator, said = lines[-1].partition(": ") if lines else ("", "", "")
    return said if separator and " " not in name else "".join(lines[-1:])
