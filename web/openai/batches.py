"""OpenAI's batches: a file of requests, answered as one job of the farm.

What a batch has come to is told by what lies in its directory, and by its job.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel, Field, StringConstraints
from rq.exceptions import DuplicateJobError

from embedfarm.contract.batch_requests import ENDPOINT, ENDS, PLAN, REQUESTS
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import ChangeRefused
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.scheduling_terms import USUAL
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.ingest.job_directories import OUTPUT, put, read_kept
from embedfarm.ingest.openai_batches import BatchPlan, count_done, find_model, read_bad
from embedfarm.ingest.openai_files import ASKED, BATCH_INPUT, COMPLETED
from embedfarm.readers import CorpusError
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import openai_problems
from embedfarm.web.jobs.idempotency import IdempotencyKey, answer_once
from embedfarm.web.services import Caller, Service, Services, need

LOGGER: Final = logging.getLogger(__name__)
WINDOW_SECONDS: Final = 86_400
SECONDS_MAX: Final = 2**40  # a Unix time that every client can read
PREFIX: Final = "batch_"
STOPPED: Final = "stopped.json"
FAULTS_MAX: Final = 100  # reasons that a failed batch lists

Seconds = Annotated[int, msgspec.Meta(ge=0, le=SECONDS_MAX)]
router: Final = APIRouter(prefix="/v1/batches", tags=["OpenAI"], route_class=BoundedRoute)
BatchId = Annotated[str, InPath(max_length=64)]
Metadata = dict[
    Annotated[str, StringConstraints(max_length=64)],
    Annotated[str, StringConstraints(max_length=512)],
]
State = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip


class BatchRequest(BaseModel):
    """A request for a batch: the file of requests, the endpoint and the window."""

    input_file_id: Annotated[str, StringConstraints(max_length=64)]
    endpoint: Literal["/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None


class AskedBatch(msgspec.Struct):
    """Record of the request that made a batch, and of its tenant."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    model: str
    created_at: Seconds
    tenant: str = ""


class StoppedBatch(msgspec.Struct):
    """Record of a batch that was cancelled or has expired, and when."""

    state: Literal["cancelled", "expired"]
    at: Seconds


class CompletedBatch(msgspec.Struct):
    """Record of what has come of a batch: counts, tokens and the ids of its files.

    Attributes:
        cancelled: Whether the batch was cancelled, so that the files have a part of the answers.
    """

    total: int
    completed: int
    failed: int
    tokens: int
    output_file_id: str | None
    error_file_id: str | None
    cancelled: bool = False


class Fault(BaseModel):
    """A reason why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(BaseModel):
    """All reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[Fault]


class RequestCounts(BaseModel):
    """Counts of a batch's requests: all, those with an answer, and those that failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(BaseModel):
    """Tokens of the requests that have an answer."""

    input_tokens: int
    input_tokens_details: dict[str, int] = {"cached_tokens": 0}
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = {"reasoning_tokens": 0}
    total_tokens: int


class Batch(BaseModel):
    """A batch; times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str = ENDPOINT
    model: str
    input_file_id: str
    completion_window: str = "24h"
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: State
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None


class Batches(BaseModel):
    """A page of batches, newest first; more follow the last of them if `has_more`."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post(
    "",
    response_model=Batch,
    responses=openai_problems(404, 409),
    dependencies=need(Scope.SUBMIT),
)
def create_batch(
    services: Service,
    who: Caller,
    asked: BatchRequest,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Answer the requests of a file, by the model of the first one that names a served one."""

    def create(name: str) -> str:
        _create(services, PREFIX + name, asked)
        LOGGER.info("%s submits %s%s", who.name, PREFIX, name)
        return read_batch(services, PREFIX + name).model_dump_json()

    _, answer = answer_once(services, who, idempotency_key, asked.model_dump(), create)
    return Response(answer, media_type="application/json")


@router.get("", responses=openai_problems(), dependencies=need(Scope.READ))
def list_batches(
    services: Service,
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Batches:
    """List batches, newest first."""
    found = (path.parent.name for path in services.settings.jobs_path.glob(f"{PREFIX}*/{ASKED}"))
    names = sorted((name for name in found if not after or name < after), reverse=True)
    batches = list(islice(_readable(services, names), limit + 1))
    page = batches[:limit]
    return Batches(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(batches) > limit,
    )


def _readable(services: Services, names: Iterable[str]) -> Iterator[Batch]:
    """Yield the batches that the caller may see, without deleted and damaged ones."""
    for name in names:
        with contextlib.suppress(HTTPException):
            yield read_batch(services, name)


@router.get("/{batch}", responses=openai_problems(404), dependencies=need(Scope.READ))
def show_batch(services: Service, batch: BatchId) -> Batch:
    """Show a batch."""
    return read_batch(services, batch)


@router.post(
    "/{batch}/cancel", responses=openai_problems(404, 409), dependencies=need(Scope.SUBMIT)
)
def cancel_batch(services: Service, who: Caller, batch: BatchId) -> Batch:
    """Cancel a batch; what is embedded already is answered in its files, once it has ended."""
    if read_batch(services, batch).status in {"completed", "failed", "expired"}:
        raise HTTPException(409, f"{batch} has ended: there is nothing to cancel")
    _cancel(services, batch)
    LOGGER.info("%s cancels %s", who.name, batch)
    return read_batch(services, batch)


def _create(services: Services, batch: str, asked: BatchRequest) -> None:
    """Make a batch and have it done, or go on where an earlier try to do so has ended.

    Raises:
        HTTPException: There is no such file, or it is no file of requests.
        JobGone: The batch was made before, and the farm knows nothing of it any more.
    """
    directory = services.settings.jobs_path / batch
    if (directory / ASKED).exists():
        return
    there = services.submissions.was_made(batch)
    try:
        if not there:
            _make(services, batch, asked, directory)
        handle = services.farm.job(batch)
        model, status = handle.spec().model, handle.status()
        if services.submissions.is_forgotten(batch):
            with contextlib.suppress(DuplicateJobError):
                services.submissions.answer(batch, model)
        created_at = status.created_ms // 1000
        facts = {"model": model, "created_at": created_at, "tenant": status.tenant}
        kept = msgspec.json.encode(asked.model_dump() | facts)
        put(directory / ASKED, kept)  # last: nobody sees half a batch
    except BaseException:
        if not there:
            services.farm.job(batch).delete()  # first: what is on the farm has its input
            services.submissions.remove(batch)
        raise


def _make(services: Services, batch: str, asked: BatchRequest, directory: Path) -> None:
    """Put a batch into its directory and on the farm."""
    settings, source = services.settings, services.find_file(asked.input_file_id)
    try:
        model = find_model(source, settings.models, settings.batch_requests_max)
    except CorpusError as error:
        raise HTTPException(422, str(error)) from error
    terms = services.grant(USUAL)
    services.find_room(1)
    services.farm.admit(batch, settings.jobs_max)
    make_private(directory)
    with contextlib.suppress(FileExistsError):
        os.link(source, directory / BATCH_INPUT)  # it stays when the file is deleted
    notes = {"out": str(directory / OUTPUT / "vectors")}
    services.farm.job(batch).create(JobSpec(model=model, name=batch), 0, terms, notes)


def read_batch(services: Services, batch: str) -> Batch:
    """Return a batch as it is now; this changes nothing.

    Raises:
        HTTPException: There is no such batch, or it cannot be read.
    """
    directory = services.find_batch(batch)
    if not (directory / ASKED).exists():
        raise HTTPException(404, f"no such batch: {batch}")
    asked = read_kept(directory / ASKED, AskedBatch)
    if asked is None:
        raise HTTPException(404, f"what is kept of {batch} cannot be read")
    status = _status(services, batch, asked.created_at)
    facts = {
        "id": batch,
        "expires_at": asked.created_at + WINDOW_SECONDS,
        **msgspec.structs.asdict(asked),
        **_progress(directory, status),
    }
    return Batch(**facts | _end(services, batch, directory, status))


def _status(services: Services, batch: str, created_at: int) -> JobStatus:
    """Return the status of a batch's job; a job that is gone has failed."""
    try:
        return services.farm.job(batch).status()
    except JobGone:
        return JobStatus(state="failed", reason="its job is gone", ended_ms=created_at * 1000)


def _progress(directory: Path, status: JobStatus) -> dict[str, Any]:
    """Tell from the files of a batch and its job how far it is, or was when it ended."""
    out = directory / OUTPUT
    facts: dict[str, Any] = {"status": "validating"}
    planned = _changed(out / PLAN)
    if planned is not None:
        facts["status"], facts["in_progress_at"] = "in_progress", planned
        plan = read_kept(out / PLAN, BatchPlan)
        if plan is not None:
            done = count_done(out / ENDS, status.done)
            facts["request_counts"] = {"total": plan.total, "completed": done, "failed": plan.bad}
    written = _changed(out / "vectors" / "_manifest.json")
    if written is not None:
        facts["status"], facts["finalizing_at"] = "finalizing", written
    return facts


def _end(services: Services, batch: str, directory: Path, status: JobStatus) -> dict[str, Any]:
    """Return the facts of a batch that has ended or was stopped; nothing while it goes on."""
    facts: dict[str, Any] = {}
    stopped = _stopped(directory, status)
    if stopped is not None:
        going = stopped.state == "cancelled" and _is_ending(services, batch, status)
        facts = _stop_times(stopped, going=going)
    elif status.state == "failed" or not services.submissions.pending(batch):
        facts = _failed(_faults(directory, status), (status.ended_ms or status.created_ms) // 1000)
    completed_at = _changed(directory / COMPLETED)  # last: it may come while the others are read
    return facts if completed_at is None else _completed(directory, completed_at)


def _faults(directory: Path, status: JobStatus) -> list[Fault]:
    """Return why a batch failed: for each of its first lines, if none of them can be done."""
    plan = read_kept(directory / OUTPUT / PLAN, BatchPlan)
    all_bad = plan is not None and plan.bad == plan.total
    bad = read_bad(directory / OUTPUT / REQUESTS, FAULTS_MAX) if all_bad else []
    faults = [Fault(code=each.code, message=each.message, line=each.line) for each in bad]
    return faults or [Fault(code="failed", message=status.reason or "it was given up")]


def _completed(directory: Path, at: int) -> dict[str, Any]:
    """Return the facts of a batch of which nothing more comes: all its requests, or a part."""
    report = read_kept(directory / COMPLETED, CompletedBatch)
    if report is None:
        return _failed([Fault(code="failed", message="what it came to cannot be read")], at)
    end: dict[str, Any] = {"status": "completed", "completed_at": at}
    if report.cancelled:
        stopped = read_kept(directory / STOPPED, StoppedBatch) or StoppedBatch("cancelled", at)
        end = _stop_times(stopped, going=False) | {"cancelled_at": at}
    return end | {
        "output_file_id": report.output_file_id,
        "error_file_id": report.error_file_id,
        "request_counts": {
            "total": report.total,
            "completed": report.completed,
            "failed": report.failed,
        },
        "usage": {"input_tokens": report.tokens, "total_tokens": report.tokens},
    }


def _failed(faults: list[Fault], at: int) -> dict[str, Any]:
    return {"status": "failed", "errors": Faults(data=faults), "failed_at": at}


def _stopped(directory: Path, status: JobStatus) -> StoppedBatch | None:
    """Return when and how a batch was stopped; None for one that was not."""
    at = _changed(directory / STOPPED)
    if at is not None:
        return read_kept(directory / STOPPED, StoppedBatch) or StoppedBatch("cancelled", at)
    if status.cancelled:  # as a job, and not as a batch
        return StoppedBatch("cancelled", (status.ended_ms or status.created_ms) // 1000)
    return None


def _stop_times(stopped: StoppedBatch, *, going: bool) -> dict[str, Any]:
    if stopped.state == "expired":
        return {"status": stopped.state, "expired_at": stopped.at}
    if going:
        return {"status": "cancelling", "cancelling_at": stopped.at}
    return {"status": "cancelled", "cancelling_at": stopped.at, "cancelled_at": stopped.at}


def _is_ending(services: Services, batch: str, status: JobStatus) -> bool:
    """Tell whether something is still done for a batch that was cancelled, such as its files."""
    return not status.ended or services.submissions.is_executed(batch)


def _cancel(services: Services, batch: str) -> None:
    """Let nothing more be done for a batch; the time of the first cancel stays."""
    path = services.settings.jobs_path / batch / STOPPED
    if not path.exists():
        put(path, msgspec.json.encode(StoppedBatch("cancelled", int(time.time()))))
    with contextlib.suppress(JobGone, ChangeRefused):
        services.farm.job(batch).cancel()
    services.submissions.cancel(batch)


def _changed(path: Path) -> int | None:
    """Return when a file was last written, in Unix seconds; None where there is no file."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return None
