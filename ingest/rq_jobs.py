"""Progress of RQ jobs, kept in their metadata, and the farm's jobs behind them."""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rq import get_current_job
from rq.command import send_command
from rq.exceptions import DeserializationError, InvalidJobOperation
from rq.job import Job, JobStatus

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import ChangeRefused
from embedfarm.contract.redaction import hide_urls
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.ingest.allow_list import PathRefused, allow
from embedfarm.ingest.child_command import LOOK_SECONDS, check_stop
from embedfarm.ingest.webhooks import tell
from embedfarm.runs.own_job import JOB_ID_FILE

PROGRESS: Final = ("done", "fetched_bytes")  # what tells that a job comes further
NO_TIME: Final = -1  # as RQ says that a job may take as long as it likes
SECONDS_MAX: Final = 10 * 365 * 86_400  # for whatever time is named
DEATHS: Final = "deaths"  # runs in a row that ended without a word and without progress
DIED_AT: Final = "died_at"  # what was done when the last of them ended
OWED: Final = "owed"  # that the farm has not been told of the failure yet

log = logging.getLogger(__name__)


def begin(description: str, out: Path | None = None) -> None:
    """Give the current job a description, unless it was enqueued with one."""
    job = get_current_job()
    if job is None:
        return
    if job.description == hide_urls(job.get_call_string() or ""):
        job.description = description
        job.connection.hset(job.key, "description", description)
    note(state="running", **({} if out is None else {"out": str(out)}))


def note(**facts: Any) -> None:  # noqa: ANN401 -- anything that JSON can say
    """Keep facts in the current job's `meta`, if they are news; progress gives it more time."""
    job = get_current_job()
    if job is None or job.meta | facts == job.meta:
        return
    if any(name in facts and facts[name] != job.meta.get(name) for name in PROGRESS):
        expect_progress(job)
    job.meta |= facts
    job.save_meta()


def expect_progress(job: Job) -> None:
    """Have RQ end a job that names no time itself, unless it comes further in time.

    Only while RQ waits for that signal: to anybody else it means the end of the process.
    """
    if job.timeout == NO_TIME and callable(signal.getsignal(signal.SIGALRM)):
        signal.alarm(min(Settings().ingest_seconds_max, SECONDS_MAX))


def count_death(job: Job) -> int:
    """Count a run that died; return how many did so in a row since the job last came further."""
    meta = job.get_meta()
    done, before = number_in(meta, "done"), number_in(meta, DIED_AT)
    deaths = 1 if done > before else 1 + number_in(meta, DEATHS)
    job.meta |= {DEATHS: deaths, DIED_AT: max(done, before)}
    job.save_meta()
    return deaths


def number_in(meta: Mapping[str, Any], name: str) -> int:
    """Return a count in a job's `meta`; 0 where there is none, whatever stands there."""
    value = meta.get(name)
    return max(0, value) if isinstance(value, int) else 0


def look(farm: FarmClient, out: Path, *, outlives: bool = False) -> None:
    """Note the progress of the current job, and end the job if it was cancelled or deleted.

    Args:
        farm: Farm that has the job.
        out: The job's output directory.
        outlives: Whether the command has something to do after a cancelled job has ended, and then
            ends by itself.
    """
    try:
        for job in farm_jobs(out):
            with contextlib.suppress(JobGone):
                status = farm.job(job).status()
                note(
                    job=job,
                    state=status.shown_state,
                    done=status.done,
                    of=status.chunk_count,
                    failed=status.chunks_failed,
                )
        _end_unwanted(farm, out, outlives=outlives)
    except UNAVAILABLE as error:
        log.warning("the server does not say how far the job is: %s", error)


class DownloadProgress:
    """Notes how much of a corpus was fetched, and ends the fetching as a command would be ended.

    Args:
        look: Called about once a second.

    Raises:
        StopRequested: A call came after this process was asked to stop.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._next = 0.0

    def __call__(self, size: int) -> None:
        """Note that `size` bytes are there, unless this process was asked to stop."""
        check_stop()
        if time.monotonic() >= self._next:
            note(state="fetching", fetched_bytes=size)
            self._look()
            self._next = time.monotonic() + LOOK_SECONDS


def _end_unwanted(farm: FarmClient, out: Path, *, outlives: bool) -> None:
    """Ask the worker to stop the current job if that was cancelled or deleted while it runs.

    A job that was cancelled on the farm ends by itself, once what was embedded is on the disk.
    """
    job = get_current_job()
    if job is None:
        return
    with contextlib.suppress(InvalidJobOperation):  # deleted, or nobody can read it
        if job.get_status() != JobStatus.CANCELED:
            return
    cancel_farm_jobs(farm, out)
    if job.worker_name and not any(_ends(farm, each, outlives) for each in farm_jobs(out)):
        send_command(job.connection, job.worker_name, "stop-job", job_id=job.id)


def _ends(farm: FarmClient, job: str, outlives: bool) -> bool:  # noqa: FBT001 -- as `look` has it
    """Tell whether the command of a cancelled job of the farm ends by itself."""
    with contextlib.suppress(JobGone):
        status = farm.job(job).status()
        return status.cancelled and (outlives or not status.ended)
    return False


def farm_jobs(out: Path) -> Iterator[str]:
    """Yield the farm's jobs for an unfinished output: its own, and those that retry failures."""
    for path in (out / JOB_ID_FILE, *out.glob(f".embedfarm/retry-*/{JOB_ID_FILE}")):
        with contextlib.suppress(FileNotFoundError):
            yield from path.read_text(encoding="utf-8", errors="replace").split()[:1]


def cancel_farm_jobs(farm: FarmClient, out: Path) -> None:
    """Cancel the farm's jobs for an output, but for those that are gone or have ended already."""
    for job in farm_jobs(out):
        with contextlib.suppress(JobGone, ChangeRefused):
            farm.job(job).cancel()


def end_farm_jobs(farm: FarmClient, out: Path, settings: Settings) -> None:
    """Cancel the farm's jobs for an output that nobody collects any more, and end them."""
    cancel_farm_jobs(farm, out)
    for job in farm_jobs(out):
        with contextlib.suppress(JobGone):
            if not farm.job(job).status().ended:
                farm.end(job, "cancelled", "", settings)


def cancel_request(job: Job) -> None:
    """Cancel, once, what the farm does for a stopped or cancelled RQ job, and send the notice.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The farm's server is away.
    """
    meta = job.get_meta()
    if meta.get("state") != "cancelled":
        if "out" in meta:
            settings = Settings()
            with (
                contextlib.suppress(PathRefused),  # whoever enqueues a job may have written it
                closing_client(settings.redis_url) as client,
            ):
                out = allow(str(meta["out"]), settings.task_roots)
                end_farm_jobs(FarmClient(client), out, settings)
        job.meta["state"] = "cancelled"
        job.save_meta()
    tell(job, "cancelled")


def fail_request(job: Job, reason: str, settings: Settings) -> None:
    """Note why an RQ job failed, and end its job on the farm: now, or when `settle` can.

    Args:
        job: RQ job, which need not have failed in the queue yet.
        reason: Why it failed.
        settings: Settings that name the farm's server, and say how long the record is kept.
    """
    job.meta |= {"reason": reason, OWED: True}
    job.save_meta()
    try:
        _pay(job, settings)
    except UNAVAILABLE as error:
        log.warning("job %s has failed, which the farm is told once it is back: %s", job.id, error)


def settle(job: Job, settings: Settings) -> None:
    """Do for an RQ job that has ended what its end has left undone on the farm.

    Args:
        job: RQ job, as just fetched.
        settings: Settings that name the farm's server, and say how long the record is kept.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The farm's server is away.
    """
    status = job.get_status(refresh=False)
    if status in {JobStatus.CANCELED, JobStatus.STOPPED}:
        cancel_request(job)
    elif status == JobStatus.FAILED and OWED in job.meta:
        _pay(job, settings)


def _pay(job: Job, settings: Settings) -> None:
    """End the farm's job of an RQ job that has failed, and note that."""
    end_farm_job(job, str(job.meta.get("reason", "")), settings)
    del job.meta[OWED]
    job.save_meta()


def end_farm_job(job: Job, reason: str, settings: Settings) -> None:
    """End the farm's job of an RQ job that failed, or note the failure with a finished one.

    Nothing is noted for an RQ job that names no job of the farm.

    Args:
        job: RQ job, which names its job on the farm by the option `job_id`.
        reason: Why it failed.
        settings: Settings that name the farm's server, and say how long the record is kept.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The farm's server is away.
    """
    try:
        name = job.kwargs["job_id"]
    except (DeserializationError, LookupError, TypeError):  # nobody has looked at them before
        return
    if not isinstance(name, str):
        return
    with closing_client(settings.redis_url) as client, contextlib.suppress(JobGone):
        farm = FarmClient(client)
        status = farm.job(name).status()
        if not status.over:
            farm.end(name, "failed", reason, settings, cause="ingest")
        elif status.state == "finished":
            farm.job(name).note("reason", f"failed after its end: {reason}")
