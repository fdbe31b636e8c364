"""Chunks that failed: those on disk in their order, then those that only the server knows."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel

from embedfarm.collector.manifest import Failure, OutputError
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import ChunkError
from embedfarm.contract.status import JobStatus
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import schema_of
from embedfarm.web.jobs.results import open_output
from embedfarm.web.jobs.routes import After, JobId, Limit
from embedfarm.web.services import Service, Services, need

PLACE: Final = r"^((\d{1,18}-\d{1,18})?@\d{1,16})?$"  # where the next page of the list begins
FIELDS: Final = ("index", "reason", "attempts")
FailedChunk = schema_of(ChunkError)

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class FailurePage(BaseModel):
    """Chunks that failed; with `next`, more may follow, even if fewer than asked for are here."""

    errors: list[FailedChunk]  # type: ignore[valid-type] # it is made at run time
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
    return {
        "errors": [{name: getattr(each, name) for name in FIELDS} for each in failed],
        "next": more,
    }


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
