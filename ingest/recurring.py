"""Jobs by the clock, and retries whose time has come, put into the queue once by one of many.

The lock keeps the others quiet. That a run happens once is made by its id, which names the task and
the time it was due: whoever had the lock and does not know yet that it is lost meets that id.
"""

import hashlib
import json
import logging
import secrets
from datetime import UTC, datetime
from typing import Final, cast

import redis
from croniter import croniter
from rq import Queue, Retry
from rq.exceptions import DuplicateJobError
from rq.registry import ScheduledJobRegistry
from rq.scheduler import RQScheduler

from embedfarm.contract import wire
from embedfarm.contract.entries import read_number
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.server_url import make_pool
from embedfarm.contract.settings import Recurring, Settings
from embedfarm.contract.unreadable_records import name_once
from embedfarm.ingest.rq_keys import ReadableJob, over_unreadable
from embedfarm.ingest.task_job import FAILURE_SECONDS, RESULT_SECONDS
from embedfarm.ingest.tasks import QUEUE, TASKS

MEMORY_SECONDS: Final = 400 * 86400  # longer than a year, which a cron expression may wait
AHEAD_SECONDS_MAX: Final = 3600
"""Time by which clocks may differ; a run that was noted further ahead counts for none."""
NONE: Final = -1  # no time that is known
RETRY_INTERVALS: Final = (5, 30, 120)

log = logging.getLogger(__name__)


class RecurringError(EmbedfarmError, ValueError):
    """Raised when a recurring job has no valid schedule or task; the message says which."""

    exit_status = 2


class Timetable:
    """Timetable of recurring jobs: one elected process of several enqueues those that are due.

    Args:
        client: Client for the lock and the farm's own keys.
        settings: Settings with the recurring jobs and the server's URL.

    Raises:
        RecurringError: A cron expression is not valid, or there is no such task.
    """

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        for entry in settings.recurring:
            if not croniter.is_valid(entry.cron):
                raise RecurringError(f"recurring: {entry.cron!r} is no cron expression")
            if f"producer.tasks.{entry.task}" not in TASKS:
                raise RecurringError(f"recurring: there is no task {entry.task!r}")
        connection = redis.Redis.from_pool(make_pool(settings.queue_server))
        self._client = client
        self._settings = settings
        self._token = secrets.token_hex(8)
        self._queue = Queue(QUEUE, connection, serializer="json")
        self._retries = RQScheduler([QUEUE], connection, serializer="json")
        self._elect = client.register_script(wire.script("elect"))
        self._advance = client.register_script(wire.script("advance"))

    def tick(self, now: float) -> None:
        """Enqueue the jobs that are due at `now`, in Unix seconds, if this process is elected.

        Raises:
            redis.RedisError: The server is away; the next tick makes up for it.
        """
        ttl_ms = int(self._settings.scheduler_ttl_seconds * 1000)
        fence = int(self._elect(keys=[wire.INGEST, wire.INGEST_FENCE], args=[self._token, ttl_ms]))
        if not fence:
            return
        over_unreadable(self._queue, self._enqueue_retries)
        for entry in self._settings.recurring:
            self._enqueue_due(entry, fence, now)

    def _enqueue_retries(self) -> None:
        """Enqueue the postponed jobs whose time has come."""
        if self._retries.acquire_locks():
            self._forget_unreadable()
            self._retries.enqueue_scheduled_jobs()

    def _forget_unreadable(self) -> None:
        """Drop the postponed jobs that cannot be read, over which RQ would end."""
        registry = ScheduledJobRegistry(queue=self._queue)
        due = registry.get_jobs_to_schedule()
        jobs = ReadableJob.fetch_many(due, self._queue.connection, "json")
        for name, job in zip(due, jobs, strict=True):
            if job is None:
                registry.remove(name)

    def _enqueue_due(self, entry: Recurring, fence: int, now: float) -> None:
        """Enqueue the newest run of a recurring job, unless it was; skip the runs before it."""
        due = int(croniter(entry.cron, datetime.fromtimestamp(now, UTC)).get_prev(float))
        name = identify(entry)
        key = wire.recurring_key(name)
        kept = cast("bytes | None", self._client.get(key))
        newest, latest = read_number(kept, NONE), int(now) + AHEAD_SECONDS_MAX
        if newest == NONE and kept is not None:
            name_once(key, "no Unix time")
        elif newest > latest:
            name_once(key, f"{newest} is more than an hour ahead, as by a clock that was wrong")
        elif NONE < newest < due:
            self._enqueue(entry, f"{entry.task}-{name}-{due}")
        self._advance(keys=[wire.INGEST, key], args=[fence, due, MEMORY_SECONDS, latest])

    def _enqueue(self, entry: Recurring, job: str) -> None:
        try:
            self._queue.enqueue_call(
                f"producer.tasks.{entry.task}",
                kwargs=entry.arguments,
                result_ttl=RESULT_SECONDS,
                failure_ttl=FAILURE_SECONDS,
                job_id=job,
                retry=Retry(max=len(RETRY_INTERVALS), interval=list(RETRY_INTERVALS)),
                unique=True,
            )
        except DuplicateJobError:
            log.info("%s is there already", job)


def identify(entry: Recurring) -> str:
    """Return a name for a recurring job, the same in every process that has it."""
    words = json.dumps(entry.model_dump(), sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:12]
