"""Results of a job over HTTP, while it runs and afterwards."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Header, HTTPException, Query, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from embedfarm.collector.manifest import ManifestError, OutputError, read_manifest
from embedfarm.collector.output_directory import read_request
from embedfarm.collector.output_reader import Chunks, NotBegun, OutputReader
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.ingest.allow_list import PathRefused, allow
from embedfarm.producer.feed import is_feed
from embedfarm.runs.own_job import read_own_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.events import TERMINAL
from embedfarm.web.jobs.feeds import INDEX_MAX, NEXT, PLACES, out_of_place, read_feed
from embedfarm.web.jobs.formats import FORMATS, choose_format
from embedfarm.web.jobs.job_watch import PLACE, JobWatch, Watching
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, Services, need

if TYPE_CHECKING:
    from embedfarm.watch.overview import JobFacts

LIMIT_MAX: Final = 100_000
WAIT_SECONDS_MAX: Final = 3600
VECTOR_BYTES_GUESSED: Final = 4096
HEADERS: Final = {
    "x-first-index": ("Index of the first chunk in the answer.", "integer"),
    "x-count": ("Chunks in the answer, the failed ones included.", "integer"),
    NEXT: ("`start` of the next request.", "integer"),
    "x-complete": ("Whether these are the last ones: true or false.", "boolean"),
    "x-state": ("Of the job; after `failed` and `cancelled` there may come no more.", "string"),
}
ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "description": words,
        "headers": {
            name: {"description": meaning, "schema": {"type": kind}}
            for name, (meaning, kind) in HEADERS.items()
        },
    }
    for status, words in ((200, "Chunks."), (204, "None is there, or none any more."))
}
ANSWERS[200]["content"] = {name: {"schema": {"type": "string"}} for name in FORMATS}

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class FoundResults(NamedTuple):
    """Results of a job from a chunk on, as they were found.

    Attributes:
        start: Index of the chunk that was asked for.
        chunks: Chunks from `start` on; None if none is there.
        total: Chunks that the job will have; -1 while that is not known.
        state: State of the job.
    """

    start: int
    chunks: Chunks | None
    total: int
    state: str

    @property
    def next(self) -> int:
        """Index after the last chunk."""
        return self.chunks.end if self.chunks else self.start

    @property
    def settled(self) -> bool:
        """Whether waiting would bring nothing more."""
        return self.chunks is not None or self.next == self.total or self.state in TERMINAL

    def headers(self) -> dict[str, str]:
        """Return the headers of `HEADERS` with their values."""
        complete = "true" if self.next == self.total else "false"
        values = (self.start, self.next - self.start, self.next, complete, self.state)
        return dict(zip(HEADERS, map(str, values), strict=True))


@router.get(
    "/{job}/results",
    response_class=Response,
    responses=problems(404, 406) | PLACES | ANSWERS,
    dependencies=[*need(Scope.READ), PLACE],
)
async def get_results(  # noqa: PLR0913, PLR0917 -- each is a parameter of the query
    services: Service,
    watch: Watching,
    job: JobId,
    accept: Annotated[str, Header(description=f"One of {', '.join(FORMATS)}.")] = "",
    start: Annotated[int, Query(ge=0, le=INDEX_MAX, description="First chunk.")] = 0,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most chunks.")] = 1000,
    wait: Annotated[
        float, Query(ge=0, le=WAIT_SECONDS_MAX, description="Seconds, while none is there.")
    ] = 0.0,
) -> Response:
    """Read chunks of a job in order, those that failed included, as far as they are durable.

    An answer may have fewer than `limit`, and more may follow: go on at `x-next-start` until
    `x-complete`. Reading changes nothing: results of a feed stay until `DELETE` on this path
    acknowledges them.
    """
    media_type = choose_format(accept)
    if media_type is None:
        raise HTTPException(406, f"there are {', '.join(FORMATS)}")
    look = partial(_look, services, job, start, limit)
    found = await run_in_threadpool(look)
    if wait and not found.settled:
        seconds = min(wait, services.settings.http_wait_seconds_max)
        found = await _wait(watch, job, look, found, seconds)
    if found.chunks is None:
        return Response(status_code=204, headers=found.headers())
    body = FORMATS[media_type](found.chunks)
    return StreamingResponse(body, headers=found.headers(), media_type=media_type)


async def _wait(
    watch: JobWatch, job: str, look: Callable[[], FoundResults], found: FoundResults, seconds: float
) -> FoundResults:
    """Look again whenever the job has changed, until there is something or the time is over."""
    seen: JobFacts | None = None
    with watch.watching(job), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not found.settled:
                seen = await watch.change(job, seen)
                found = await run_in_threadpool(look)
                if seen is None:
                    break
    return found


def _look(services: Services, job: str, start: int, limit: int) -> FoundResults:
    """Look which results of a job are there now.

    Raises:
        HTTPException: There are no results here, or not from `start` on.
        JobGone: There is no such job.
    """
    handle = services.farm.job(job)
    status = handle.status()
    try:
        if is_feed(handle):
            chunks = read_feed(services, handle, status, start, limit)
            return FoundResults(start, chunks, status.chunk_count, handle.status().shown_state)
        rows = services.settings.http_results_bytes_max // (
            status.vector_bytes or VECTOR_BYTES_GUESSED
        )
        return _look_on_disk(services.settings, job, status, start, min(limit, max(1, rows)))
    except NotBegun as error:
        if status.state in TERMINAL:
            raise HTTPException(409, f"{error}, or not any more") from error
        return FoundResults(start, None, -1, status.shown_state)
    except (OutputError, RecordError, OSError) as error:
        raise HTTPException(409, f"the output cannot be read: {error}") from error


def _look_on_disk(
    settings: Settings, job: str, status: JobStatus, start: int, limit: int
) -> FoundResults:
    with open_output(settings, job, status) as reader:
        if reader.count is not None and start > reader.count:
            raise out_of_place(f"the job has {reader.count} chunks", reader.count)
        total = -1 if reader.count is None else reader.count
        return FoundResults(start, reader.read(start, limit), total, status.shown_state)


def open_output(settings: Settings, job: str, status: JobStatus) -> OutputReader:
    """Open the output of a job, where it may be read from here.

    Raises:
        HTTPException: The output is not known, below no allowed directory, or another job's.
        NotBegun: There is no output yet, or not any more.
        OutputError, OSError: The output cannot be read.
    """
    if not status.out:
        raise HTTPException(409, "results of this job are where its own program collects them")
    try:
        directory = allow(status.out, settings.task_roots)
    except PathRefused as error:
        raise HTTPException(409, f"results are not served from there: {error}") from error
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(OutputReader(directory))
        filled_by = reader.job or made_for(directory)[0]  # what was opened, or replaced it
        if not filled_by:
            raise NotBegun(f"no job is known to fill {status.out} yet")
        if filled_by != job:
            raise HTTPException(409, f"{status.out} is of another job")
        stack.pop_all()
    return reader


def made_for(directory: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the job that fills an output, finished or not, and what the output was made for.

    The job is "" where none has begun to fill it.

    Raises:
        OutputError, OSError: The output cannot be read, or is there no more.
    """
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        own = read_own_job(directory)
        return own.name if own else "", read_request(directory)
    return manifest.job, manifest.settings
