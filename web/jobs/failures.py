"""Chunks that failed: those on disk in their order, then those that only the server knows."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query
from fastapi import Path as InPath
from pydantic import BaseModel

from embedfarm.collector.manifest import Failure, OutputError
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import ChunkError
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.ingest.allow_list import PathRefused, allow
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.chunk_texts import chunk_texts
from embedfarm.web.jobs.feeds import INDEX_MAX
from embedfarm.web.jobs.results import made_for, open_output
from embedfarm.web.jobs.routes import After, JobId, Limit
from embedfarm.web.services import Service, Services, need

PLACE: Final = r"^(([0-9]{1,18}-[0-9]{1,18})?@[0-9]{1,16})?$"  # of the next page
FAILURES_KEPT: Final = 10_000  # by the server, of a job

ChunkIndex = Annotated[int, InPath(ge=0, le=INDEX_MAX, description="Index of the chunk.")]

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class FailedChunk(BaseModel):
    """A chunk that was given up on; its id is known when it is on disk, and its corpus has ids."""

    index: int
    id: str | None
    reason: str
    attempts: int


class FailedText(FailedChunk):
    """A chunk that was given up on, with the beginning of its text where that can be read here."""

    text: str | None


class FailurePage(BaseModel):
    """Chunks that failed; with `next`, more may follow, even if fewer than asked for are here."""

    errors: list[FailedChunk]
    next: str | None


@router.get(
    "/{job}/errors",
    response_model=FailurePage,
    responses=problems(404),
    dependencies=need(Scope.READ),
)
def list_failures(
    services: Service,
    job: JobId,
    limit: Limit = 100,
    after: Annotated[After, Query(pattern=PLACE)] = "",
) -> dict[str, Any]:
    """List the chunks of a job that failed so far, with the reason.

    Failed chunks on disk come first, in their order, if they can be read from here; then those of
    the server's newest 10,000 that are not on disk, as they failed.
    """
    failed, more = read_failures(services, job, limit, after)
    return {"errors": [_facts(each) for each in failed], "next": more}


@router.get("/{job}/errors/{index}", responses=problems(404), dependencies=need(Scope.READ))
def show_failure(services: Service, job: JobId, index: ChunkIndex) -> FailedText:
    """Show one chunk of a job that failed, with the first 2,000 characters of its text.

    The text is null where the corpus may not or cannot be read from here, has another text there
    now, or is larger than `EMBEDFARM_HTTP_SEARCH_BYTES_MAX`.
    """
    return find_failure(services, job, index)


def find_failure(services: Services, job: str, index: int) -> FailedText:
    """Return a failed chunk by its index, with its text; this reads the corpus up to the chunk.

    Raises:
        HTTPException: The chunk has not failed, or its record is not kept any more.
        JobGone: There is no such job.
    """
    handle = services.farm.job(job)
    status = handle.status()
    failed: list[Failure | ChunkError] = []
    failed += _on_disk(services, job, status, index, 1)[0]
    failed += handle.results.failures(FAILURES_KEPT)[1]
    for each in failed:
        if each.index == index:
            text = _text(services.settings, handle, status, index)
            return FailedText(**_facts(each), text=text)
    raise HTTPException(404, f"no failure of chunk {index} of job {job} is known")


def _facts(failure: Failure | ChunkError) -> dict[str, Any]:
    """Return what is told of a failed chunk; the server's records have no id."""
    return {
        "index": failure.index,
        "id": getattr(failure, "id", None),
        "reason": failure.reason,
        "attempts": failure.attempts,
    }


def _text(settings: Settings, job: Job, status: JobStatus, index: int) -> str | None:
    """Return the beginning of a chunk's text; None where it cannot be read here."""
    try:
        checksum = job.results.checksum(index)  # first: what is not there any more is on the disk
        out = allow(status.out, settings.task_roots)
        filled_by, identity = made_for(out)
    except (PathRefused, OutputError, OSError, RecordError):
        return None
    if filled_by != job.id:  # another one's corpus, since
        return None
    checksums = {} if checksum is None else {index: checksum}
    return chunk_texts(out, identity, [index], settings, checksums).get(index)


def read_failures(
    services: Services, job: str, limit: int, after: str
) -> tuple[Sequence[Failure | ChunkError], str | None]:
    """Return up to `limit` failed chunks, as `list_failures` lists them, and where more may follow.

    Raises:
        JobGone: There is no such job.
    """
    handle = services.farm.job(job)
    status = handle.status()
    entry, _, index = after.partition("@")
    if not entry:
        failed, durable = _on_disk(services, job, status, int(index or 0), limit)
        if len(failed) == limit:
            return failed, f"@{failed[-1].index + 1}"
        later, more = _on_server(handle, limit - len(failed), "", durable)
        return [*failed, *later], more
    return _on_server(handle, limit, entry, int(index))


def _on_disk(
    services: Services, job: str, status: JobStatus, start: int, limit: int
) -> tuple[list[Failure], int]:
    """Read failed chunks from one on, and the index after the last chunk that is on disk."""
    try:
        with open_output(services.settings, job, status) as reader:
            return reader.failures(start, limit), reader.available
    except (HTTPException, OutputError, OSError):  # there is what the server has
        return [], 0


def _on_server(job: Job, limit: int, after: str, start: int) -> tuple[list[ChunkError], str | None]:
    """Read failed chunks from index `start` on that the server knows, and where to go on."""
    last, failed = job.results.failures(limit, after)
    more = f"{last}@{start}" if len(failed) == limit else None
    return [each for each in failed if each.index >= start], more
