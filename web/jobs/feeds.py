"""Feeds: jobs whose texts come over time, and whose results stay until they are acknowledged."""

import contextlib
import logging
import uuid
from typing import Annotated, Any, Final, Self

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from embedfarm.collector.feed_results import acknowledge, take
from embedfarm.collector.output_reader import Chunks
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Rows
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.producer.feed import NOTE, OutOfPlace, WindowFull, close, extend, is_feed
from embedfarm.producer.submitter import JobRefused
from embedfarm.watch.overview import JobFacts, read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import WHOLE, Body, Many
from embedfarm.web.jobs.job_requests import EmbeddingOptions, Words
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Caller, Service, Services, need

LOGGER: Final = logging.getLogger(__name__)
NEXT: Final = "x-next-start"
FULL_SECONDS: Final = 1
TEXTS_MAX: Final = 8192
INDEX_MAX: Final = 2**52  # the scripts on the server count in floats
# More than a body has; a text with a bound is checked to be Unicode.
TEXT_CHARACTERS_MAX: Final = 1 << 22
PLACES: Final[dict[int | str, dict[str, Any]]] = {
    409: problems(409)[409]
    | {
        "headers": {
            NEXT: {
                "description": "Where to go on, if the request was out of place.",
                "schema": {"type": "integer"},
            }
        }
    }
}

router: Final = APIRouter(prefix="/v1", tags=["feeds"], route_class=BoundedRoute)
Index = Annotated[int, Field(ge=0, le=INDEX_MAX), WHOLE]
Text = Annotated[str, StringConstraints(max_length=TEXT_CHARACTERS_MAX)]


class FeedRequest(EmbeddingOptions):
    """A request for a feed; only the terms of the job can be changed later."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="after")
    def _check_stored(self) -> Self:
        """Refuse results past the server, on which those of a feed wait for their reader."""
        if self.stored:
            raise ValueError("stored is for corpora: a feed is read off the server")
        if self.texts_from != "blocks":
            raise ValueError("texts_from is for corpora: a feed has no files")
        return self


class Texts(Body):
    """Texts that go on where the feed ends; to send texts that it has changes nothing."""

    model_config = ConfigDict(extra="forbid")

    start: Index = Field(description="Index of the first one.")
    texts: Annotated[Many[Text], Field(max_length=TEXTS_MAX)]
    ids: Annotated[Many[Words], Field(max_length=TEXTS_MAX)] | None = Field(
        default=None, description="One for each text, if any has one."
    )
    read: Index = Field(
        default=0,
        description="Results below this index were read, so that their texts are not asked for "
        "again if the server has lost them. It acknowledges nothing.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what cannot be numbered or stored."""
        if self.ids is not None and len(self.ids) != len(self.texts):
            raise ValueError("ids: one for each text, or none")
        return self


class Accepted(BaseModel):
    """Index below which texts are taken; send those from `next` on again."""

    next: int


class Closing(Body):
    """The number of all texts of a feed, with which it is closed."""

    model_config = ConfigDict(extra="forbid")

    count: Index


@router.post("/feeds", status_code=201, responses=problems(404), dependencies=need(Scope.SUBMIT))
def make_feed(services: Service, key: Caller, request: FeedRequest, response: Response) -> JobFacts:
    """Make a job that takes texts until it is closed, and keeps results until acknowledged."""
    farm, spec = services.farm, request.spec(services.find_model(request.model))
    terms = services.grant(request.terms())
    name = uuid.uuid4().hex
    farm.admit(name, services.settings.jobs_max)
    farm.job(name).create(spec, 0, terms, {NOTE: "1"})
    LOGGER.info("%s makes feed %r", key.name, name)
    response.headers["location"] = f"/v1/jobs/{name}"
    return read_job(farm, name)


@router.post("/jobs/{job}/texts", responses=problems(404) | PLACES, dependencies=need(Scope.SUBMIT))
def add_texts(services: Service, job: JobId, sent: Texts) -> Accepted:
    """Put texts into a feed; 429 while its window is full of results that are kept."""
    handle = _feed(services, job)
    try:
        rows = Rows(sent.texts, sent.ids)
        return Accepted(next=extend(handle, services.settings, sent.start, rows, sent.read))
    except WindowFull as error:
        raise HTTPException(429, str(error), {"retry-after": str(FULL_SECONDS)}) from error
    except OutOfPlace as error:
        raise out_of_place(str(error), error.expected) from error
    except JobRefused as error:
        raise HTTPException(409, str(error)) from error


@router.post("/jobs/{job}/close", responses=problems(404) | PLACES, dependencies=need(Scope.SUBMIT))
def close_feed(services: Service, job: JobId, closing: Closing) -> JobFacts:
    """Say that a feed has all its texts; it is finished once all results were acknowledged."""
    try:
        close(_feed(services, job), closing.count)
    except OutOfPlace as error:
        raise out_of_place(str(error), error.expected) from error
    except JobRefused as error:
        raise HTTPException(409, str(error)) from error
    return read_job(services.farm, job)


@router.delete(
    "/jobs/{job}/results", responses=problems(404) | PLACES, dependencies=need(Scope.SUBMIT)
)
def acknowledge_results(
    services: Service,
    job: JobId,
    upto: Annotated[int, Query(ge=0, le=INDEX_MAX, description="First chunk that is kept.")],
) -> JobFacts:
    """Have the server forget the results of a feed below an index, which makes room for texts.

    A feed that is closed is finished once all its results were acknowledged, also those that the
    server does not have: it may have lost what was read. To acknowledge results again changes
    nothing.
    """
    handle = _feed(services, job)
    status = handle.status()
    if upto > status.pushed_upto:
        raise _expects(status.pushed_upto)
    if upto > status.drained_upto and not status.ended:
        acknowledge(handle, upto)
    if upto == status.chunk_count and status.state in {"closed", "paused"}:
        with contextlib.suppress(JobGone):
            services.farm.end(job, "finished", "", services.settings, drained_upto=upto)
    return read_job(services.farm, job)


def read_feed(
    services: Services, job: Job, status: JobStatus, start: int, limit: int
) -> Chunks | None:
    """Read results of a feed from chunk `start` on, if there are any; reading changes nothing.

    Raises:
        HTTPException: `start` is not where a reader may be.
        OutputError: A result contradicts itself.
    """
    if start < status.drained_upto:
        kept = status.drained_upto
        raise out_of_place(f"results below {kept} were acknowledged", kept)
    if start > status.pushed_upto:
        raise _expects(status.pushed_upto)
    if status.ended:
        return None
    return take(job, start, limit, services.settings.http_results_bytes_max)


def _expects(index: int) -> HTTPException:
    """Make the refusal of a request that is ahead of the feed's texts."""
    return out_of_place(f"text {index} is expected next", index)


def out_of_place(detail: str, expected: int) -> HTTPException:
    """Make the refusal of a request that does not go on where the feed does."""
    return HTTPException(409, detail, {NEXT: str(expected)})


def _feed(services: Services, job: str) -> Job:
    """Return the handle of a job that is a feed.

    Raises:
        HTTPException: The job is no feed.
        JobGone: There is no such job.
    """
    handle = services.farm.job(job)
    handle.status()
    if not is_feed(handle):
        raise HTTPException(409, f"job {job} is no feed: its texts come from its corpus")
    return handle
