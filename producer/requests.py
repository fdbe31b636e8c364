"""What an RQ job says of itself while it runs, and the farm's jobs behind it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import redis
from rq import get_current_job
from rq.command import send_command
from rq.exceptions import DeserializationError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus

from embedfarm.broker import UNAVAILABLE
from embedfarm.farm import Farm
from embedfarm.settings import Settings
from embedfarm.status import JobGone
from producer.command import LOOK_SECONDS, check_stop
from producer.notices import tell
from producer.outbound import hide_urls
from producer.roots import PathRefused, allow

JOB_ID_FILE: Final = ".embedfarm/job-id"  # in an output directory, while it is unfinished
# What RQ raises over a hash with other fields than it writes, or over what is no hash.
UNREADABLE: Final = (ValueError, TypeError, AttributeError, AssertionError, redis.ResponseError)
DEATHS: Final = "deaths"  # runs in a row that ended without a word and without progress


log = logging.getLogger(__name__)


class ReadableJob(Job):
    """An RQ job that is not there when it cannot be read, so that nobody ends over it."""

    @classmethod
    def fetch_many(
        cls,
        job_ids: Iterable[str],
        connection: redis.Redis,
        serializer: Any = None,  # noqa: ANN401 -- as RQ has it
    ) -> list[Job | None]:
        """The jobs, None for each that is not there or cannot be read."""
        return [cls._find(each, connection, serializer) for each in job_ids]

    @classmethod
    def _find(cls, name: str, connection: redis.Redis, serializer: Any) -> Job | None:  # noqa: ANN401 -- as above
        with contextlib.suppress(NoSuchJobError):
            return cls.fetch(name, connection, serializer)
        return None

    def refresh(self) -> None:
        """Read the job.

        Raises:
            NoSuchJobError: It is not there, or whoever wrote it was not RQ.
        """
        try:
            super().refresh()  # type: ignore[no-untyped-call] # RQ is typed in part
        except UNREADABLE as error:
            if isinstance(error, redis.ResponseError) and "WRONGTYPE" not in str(error):
                raise
            log.warning("job %s is refused: it cannot be read: %r", self.id, error)
            raise NoSuchJobError(f"{self.id} cannot be read") from error


def begin(description: str, out: Path | None = None) -> None:
    """Say in words what the current job does, unless it was enqueued with words of its own."""
    job = get_current_job()
    if job is None:
        return
    if job.description == hide_urls(job.get_call_string() or ""):
        job.description = description
        job.connection.hset(job.key, "description", description)
    note(state="running", **({} if out is None else {"out": str(out)}))


def note(**facts: Any) -> None:  # noqa: ANN401 -- anything that JSON can say
    """Keep facts in the current job's `meta`, if they are news; progress forgives deaths."""
    job = get_current_job()
    if job is None:
        return
    changed = job.meta | facts
    if facts.get("done", 0) > job.meta.get("done", 0):
        changed.pop(DEATHS, None)
    if changed != job.meta:
        job.meta = changed
        job.save_meta()


def look(farm: Farm, out: Path) -> None:
    """Note how far the farm is with the current job, and end that job if nobody wants it now."""
    try:
        for job in farm_jobs(out):
            with contextlib.suppress(JobGone):
                status = farm.job(job).status()
                note(
                    job=job,
                    state=status.state,
                    done=status.first_chunk + status.chunks_done,
                    of=status.chunk_count,
                    failed=status.chunks_failed,
                )
        _end_unwanted(farm, out)
    except UNAVAILABLE as error:
        log.warning("the server does not say how far the job is: %s", error)


class Watch:
    """Notes how much of a corpus was fetched, and ends the fetching as a command would be ended.

    Args:
        look: Called about once a second.

    Raises:
        Interrupted: When called, as `stop_when_asked` says.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._next = 0.0

    def __call__(self, size: int) -> None:
        """So many bytes are there."""
        check_stop()
        if time.monotonic() >= self._next:
            note(state="fetching", fetched_bytes=size)
            self._look()
            self._next = time.monotonic() + LOOK_SECONDS


def _end_unwanted(farm: Farm, out: Path) -> None:
    """A job that was cancelled or deleted while it runs asks its worker to stop it."""
    job = get_current_job()
    if job is None:
        return
    try:
        wanted = job.get_status() != JobStatus.CANCELED
    except InvalidJobOperation:
        cancel_farm_jobs(farm, out)  # the worker does not do it for a job that it cannot read
        wanted = False
    if not wanted and job.worker_name:
        send_command(job.connection, job.worker_name, "stop-job", job_id=job.id)


def farm_jobs(out: Path) -> Iterator[str]:
    """The farm's jobs for an unfinished output: its own, and that of a retry of what failed."""
    for path in (out / JOB_ID_FILE, *out.glob(f".embedfarm/retry-*/{JOB_ID_FILE}")):
        with contextlib.suppress(FileNotFoundError):
            yield path.read_text(encoding="utf-8")


def cancel_farm_jobs(farm: Farm, out: Path) -> None:
    """Cancel the farm's jobs for an output; those that are gone already are none."""
    for job in farm_jobs(out):
        with contextlib.suppress(JobGone):
            farm.job(job).cancel()


def cancel_request(job: Job, connection: redis.Redis) -> None:
    """Cancel what the farm does for an RQ job that was stopped or cancelled, once, and tell so."""
    meta = job.get_meta()
    if meta.get("state") != "cancelled":
        if "out" in meta:
            with contextlib.suppress(PathRefused):  # whoever enqueues a job may have written it
                out = allow(str(meta["out"]), Settings().task_roots)
                cancel_farm_jobs(Farm(connection), out)
        job.meta["state"] = "cancelled"
        job.save_meta()
    tell(job, "cancelled")


def end_farm_job(job: Job, reason: str, settings: Settings) -> None:
    """Note that the farm's job of an RQ job failed, if it was given one and that still goes on.

    Args:
        job: It names its job on the farm by the option `job_id`.
        reason: Why.
        settings: How long the record is kept.
    """
    try:
        name = job.kwargs["job_id"]
    except (DeserializationError, LookupError, TypeError):  # nobody has looked at them before
        return
    if not isinstance(name, str):
        return
    farm = Farm(job.connection)
    with contextlib.suppress(JobGone):
        status = farm.job(name).status()
        if not status.ended and status.state != "cancelled":
            farm.end(name, "failed", reason, settings)
