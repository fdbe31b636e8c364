"""OpenAI's batches: a file of requests, answered as one job of the farm.

What a batch has come to is told by what lies in its directory, and by its job.
"""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel, Field, StringConstraints
from rq.exceptions import DuplicateJobError

from collector.files import replacing
from embedfarm.batches import ENDPOINT
from embedfarm.jobs import ChangeRefused
from embedfarm.records import JobSpec
from embedfarm.status import JobGone, JobStatus
from embedfarm.terms import USUAL
from producer.batches import find_model
from producer.directories import OUTPUT, directory_of, remove_directory
from producer.files import BATCH_INPUT, COMPLETED
from producer.readers import CorpusError
from web.files import find_content
from web.idempotency import IdempotencyKey, answer_once
from web.keys import Scope
from web.problems import openai_problems
from web.services import Caller, Service, Services, need

LOGGER: Final = logging.getLogger(__name__)
WINDOW_SECONDS: Final = 86_400
PREFIX: Final = "batch_"
ASKED: Final = "batch.json"
STOPPED: Final = "stopped.json"

router: Final = APIRouter(prefix="/v1/batches", tags=["OpenAI"])
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
    """What is to be answered."""

    input_file_id: Annotated[str, StringConstraints(max_length=64)]
    endpoint: Literal["/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None


class Fault(BaseModel):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(BaseModel):
    """All reasons."""

    object: Literal["list"] = "list"
    data: list[Fault]


class RequestCounts(BaseModel):
    """How many requests there are, and what they have come to."""

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
    """Some batches, newest first; more follow the last of them if `has_more`."""

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
    source = find_content(services, asked.input_file_id)
    settings = services.settings
    try:
        model = find_model(source, settings.models, settings.batch_requests_max)
    except CorpusError as error:
        raise HTTPException(422, str(error)) from error

    def create(name: str) -> str:
        _create(services, PREFIX + name, asked, source, model)
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
    """Batches, newest first."""
    found = (path.parent.name for path in services.settings.jobs_path.glob(f"{PREFIX}*/{ASKED}"))
    names = sorted((name for name in found if not after or name < after), reverse=True)
    page = [read_batch(services, name) for name in names[:limit]]
    return Batches(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(names) > limit,
    )


@router.get("/{batch}", responses=openai_problems(404), dependencies=need(Scope.READ))
def show_batch(services: Service, batch: BatchId) -> Batch:
    """One batch."""
    return read_batch(services, batch)


@router.post(
    "/{batch}/cancel", responses=openai_problems(404, 409), dependencies=need(Scope.SUBMIT)
)
def cancel_batch(services: Service, who: Caller, batch: BatchId) -> Batch:
    """Answer no more of a batch; what was embedded of it has no file."""
    if read_batch(services, batch).status in {"completed", "failed", "expired"}:
        raise HTTPException(409, f"{batch} has ended: there is nothing to cancel")
    _stop(services, batch, "cancelled")
    LOGGER.info("%s cancels %s", who.name, batch)
    return read_batch(services, batch)


def _create(services: Services, batch: str, asked: BatchRequest, source: Path, model: str) -> None:
    """Make the directory, the farm's job and the RQ job; what is there already stays."""
    settings, handle = services.settings, services.farm.job(batch)
    services.farm.admit(batch, settings.jobs_max)
    directory = settings.jobs_path / batch
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(source, directory / BATCH_INPUT)  # it stays when the file is deleted
        with replacing(directory / ASKED) as file:  # last: nobody sees half a batch
            facts = asked.model_dump() | {"model": model, "created_at": int(time.time())}
            file.write(json.dumps(facts).encode())
            notes = {"out": str(directory / OUTPUT / "vectors")}
            handle.create(JobSpec(model=model, name=batch), 0, USUAL, notes)
            with contextlib.suppress(DuplicateJobError):
                services.submissions.answer(batch, model)
    except BaseException:
        remove_directory(directory)
        handle.delete()
        services.submissions.remove(batch)
        raise


def read_batch(services: Services, batch: str) -> Batch:
    """A batch as it is now; one whose time is over is stopped by that.

    Raises:
        HTTPException: There is no such batch.
    """
    directory = directory_of(services.settings, batch)
    asked = None if directory is None else _load(directory / ASKED)
    if directory is None or asked is None:
        raise HTTPException(404, f"no such batch: {batch}")
    expires_at = asked["created_at"] + WINDOW_SECONDS
    facts = {"id": batch, "expires_at": expires_at, **asked, **_progress(directory)}
    ended = any((directory / name).exists() for name in (COMPLETED, STOPPED))
    if expires_at <= time.time() and not ended:
        _stop(services, batch, "expired")
    return Batch(**facts | _end(services, batch, directory, asked["created_at"]))


def _progress(directory: Path) -> dict[str, Any]:
    """How far a batch is, or was when it ended."""
    out = directory / OUTPUT
    facts: dict[str, Any] = {"status": "validating"}
    plan = _load(out / "plan.json")
    if plan is not None:
        facts["status"], facts["in_progress_at"] = "in_progress", _changed(out / "plan.json")
        facts["request_counts"] = {"total": plan[0], "failed": plan[1]}
    if (out / "vectors" / "manifest.json").exists():
        facts["status"] = "finalizing"
        facts["finalizing_at"] = _changed(out / "vectors" / "manifest.json")
    return facts


def _end(services: Services, batch: str, directory: Path, created_at: int) -> dict[str, Any]:
    """What a batch has come to; nothing while it goes on."""
    report = _load(directory / COMPLETED)
    if report is not None:
        return {
            "status": "completed",
            "completed_at": _changed(directory / COMPLETED),
            "output_file_id": report["output_file_id"],
            "error_file_id": report["error_file_id"],
            "request_counts": {name: report[name] for name in ("total", "completed", "failed")},
            "usage": {"input_tokens": report["tokens"], "total_tokens": report["tokens"]},
        }
    stopped = _load(directory / STOPPED)
    if stopped is not None:
        return _stopped(services, batch, stopped["state"], stopped["at"])
    try:
        status = services.farm.job(batch).status()
    except JobGone:
        status = JobStatus(state="failed", reason="its job is gone", ended_ms=created_at * 1000)
    if status.state == "cancelled":
        return _stopped(services, batch, "cancelled", created_at)
    if status.state == "failed" or not services.submissions.pending(batch):
        if (directory / COMPLETED).exists():  # since it was looked for
            return _end(services, batch, directory, created_at)
        reason = status.reason or "it was given up"
        fault = {"code": "failed", "message": reason}
        failed_at = status.ended_ms // 1000 or created_at
        return {"status": "failed", "errors": {"data": [fault]}, "failed_at": failed_at}
    return {}


def _stopped(services: Services, batch: str, state: str, at: int) -> dict[str, Any]:
    if state == "expired":
        return {"status": state, "expired_at": at}
    if services.submissions.running(batch):
        return {"status": "cancelling", "cancelling_at": at}
    return {"status": "cancelled", "cancelling_at": at, "cancelled_at": at}


def _stop(services: Services, batch: str, state: str) -> None:
    """Let nothing more be done for a batch; the first reason stays."""
    path = services.settings.jobs_path / batch / STOPPED
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(json.dumps({"state": state, "at": int(time.time())}))
    with contextlib.suppress(JobGone, ChangeRefused):
        services.farm.job(batch).cancel()
    services.submissions.cancel(batch)


def _load(path: Path) -> Any:  # noqa: ANN401 -- anything that JSON can say
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _changed(path: Path) -> int:
    return int(path.stat().st_mtime)
