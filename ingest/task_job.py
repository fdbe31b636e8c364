"""An RQ job that can only be one of the tasks on the list, with JSON arguments."""

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import redis
from rq import Queue, Retry
from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.timeouts import JobTimeoutException

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.redaction import hide_urls
from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import PathRefused
from embedfarm.ingest.child_command import CommandDied, StopRequested
from embedfarm.ingest.rq_jobs import (
    NO_TIME,
    SECONDS_MAX,
    cancel_request,
    count_death,
    expect_progress,
)
from embedfarm.ingest.rq_keys import ReadableJob
from embedfarm.ingest.tasks import DAY_SECONDS, TASKS, OptionRefused
from embedfarm.ingest.webhooks import tell

RESULT_SECONDS: Final = DAY_SECONDS
FAILURE_SECONDS: Final = 7 * DAY_SECONDS
OVER: Final = frozenset(
    {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}
)
GIVEN_UP: Final = "given up: as many runs died in a row without progress as deliveries_max allows"

log = logging.getLogger(__name__)


class TaskRefused(RuntimeError):
    """Raised when a job asks for something that is on no list; nothing of it was run."""


# The same job would be refused again, so that it is not tried again.
REFUSED: Final = (TaskRefused, PathRefused, OptionRefused, DeserializationError, TypeError)


class TaskStalled(RuntimeError):
    """Raised when a job has made no progress for too long."""


class TaskJob(ReadableJob):
    """An RQ job that can only be one of `producer.tasks.TASKS`, with JSON arguments.

    Attributes:
        given_up: Why a job that only died is not repeated; "" while it may be.
    """

    given_up = ""

    def restore(self, raw_data: Any) -> Any:  # noqa: ANN401 -- as RQ has it
        """Load the job from the server, with default time limits where it has none.

        RQ's own times are 3 minutes and a year. A job that names none may run for as long as it
        makes progress.

        RQ logs the description, which is made of the arguments unless the job came with another, so
        URLs in it are hidden.
        """
        super().restore(raw_data)
        self.description = hide_urls(self.description or "")
        if not self.timeout or self.timeout < 0 or self.timeout == Queue.DEFAULT_TIMEOUT:
            self.timeout = NO_TIME
        if self.failure_ttl is None:
            self.failure_ttl = FAILURE_SECONDS
        self._limit_times()
        self.get_meta(refresh=False)

    def _limit_times(self) -> None:
        """Limit the job's times to values that the server and the system can represent."""
        self.timeout = _limit(self.timeout)
        self.failure_ttl = _limit(self.failure_ttl)
        self.result_ttl = _limit(self.result_ttl)
        self.ttl = _limit(self.ttl)
        if self.retry_intervals is not None:
            self.retry_intervals = [max(0, _limit(int(n)) or 0) for n in self.retry_intervals]

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 -- as RQ has it
        """Return the job's metadata; {} if they are not an object."""
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
        """Always None: a callback would be another dotted path to import."""

    @property
    def failure_callback(self) -> None:
        """Always None: a callback would be another dotted path to import."""

    @property
    def stopped_callback(self) -> Callable[[Job, redis.Redis], Any]:
        """The function that RQ calls after it has killed a job on demand."""
        return _cancel_stopped

    def send_webhooks(self, status: str | JobStatus, *, exc_string: str | None = None) -> None:
        """Send nothing: RQ's webhooks would call any address for anyone."""

    def perform(self) -> Any:  # noqa: ANN401 -- as RQ has it
        """Run the task; an interrupted one goes back into the queue, which costs no retry.

        A job that is refused is not tried again, whatever its retries.
        """
        try:
            return self._perform()
        except REFUSED:
            self.retries_left = 0
            raise

    def _perform(self) -> Any:  # noqa: ANN401 -- as RQ has it
        names = (
            self._success_callback_name,
            self._failure_callback_name,
            self._stopped_callback_name,
        )
        if any(names) or self.webhooks:
            raise TaskRefused("refused: a job may bring no callbacks and no webhooks")
        expect_progress(self)
        try:
            result = super().perform()
        except JobTimeoutException as error:
            if self.timeout != NO_TIME:
                raise
            seconds = Settings().ingest_seconds_max
            raise TaskStalled(f"no progress for ingest_seconds_max, {seconds:,} s") from error
        except StopRequested:
            return Retry(max=sys.maxsize)
        except CommandDied as error:
            if count_death(self) < Settings().deliveries_max:
                log.warning("job %s goes on: %s", self.id, error)
                return Retry(max=sys.maxsize)
            raise CommandDied(f"{GIVEN_UP}: {error}") from error
        tell(self, "finished")
        return result


def _cancel_stopped(job: Job, queue: redis.Redis) -> None:
    """Cancel what the farm does for a stopped job; while its server is away that is left undone."""
    del queue
    try:
        cancel_request(job)
    except UNAVAILABLE as error:
        log.warning("job %s was stopped, which the farm is told once it is back: %s", job.id, error)


def _limit(seconds: float | None) -> int | None:
    return None if seconds is None else int(min(seconds, SECONDS_MAX))
