"""Server-sent events: how a job goes, as it changes."""

import zlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, NamedTuple

import anyio.to_thread
import msgspec
from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from embedfarm.watch.overview import JobFacts, read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.job_watch import PLACE, Watching
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, need

EVENT_SECONDS: Final = 1.0
EVENTS_MAX: Final = 100  # of the timeline, at once
TERMINAL: Final = frozenset({"finished", "failed", "cancelled"})
STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`job` when it has changed, at most once a second, and at last `end`; the "
        "data are those of `GET /v1/jobs`. Before each, `timeline` for all that has happened to "
        "it since the one before, with the data of `GET /v1/jobs/{job}/timeline`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class Beginning(NamedTuple):
    """A job when its stream begins, and the ID of the last event of its timeline."""

    facts: JobFacts
    last: str


def _begin(services: Service, job: JobId) -> Beginning:
    newest = services.farm.timeline.newest(1, job)
    return Beginning(read_job(services.farm, job), newest[0].id if newest else "")


@router.get(
    "/{job}/events",
    response_class=EventSourceResponse,
    responses=problems(404) | STREAM,
    dependencies=[*need(Scope.READ), PLACE],
)
async def follow_job(
    services: Service,
    watch: Watching,
    job: JobId,
    beginning: Annotated[Beginning, Depends(_begin)],
    last_event_id: Annotated[str, Header(description="What was seen last is not told again.")] = "",
) -> AsyncIterator[ServerSentEvent]:
    """Stream a job's state and progress when they change, until it has ended or is deleted."""
    (seen, last), told = beginning, last_event_id
    with watch.watching(job):
        while True:
            event = _describe(seen)
            if event.id != told or event.event == "end":
                yield event
            if event.event == "end":
                return
            told = event.id or ""
            await watch.pause(EVENT_SECONDS)
            later = await watch.change(job, seen)
            if later is None or not services.farm.sees(later.tenant):
                return
            seen = later
            happened = await anyio.to_thread.run_sync(
                services.farm.timeline.newest, EVENTS_MAX, job, last
            )
            for entry in reversed(happened):
                last = entry.id
                yield ServerSentEvent(
                    event="timeline", raw_data=msgspec.json.encode(entry).decode()
                )


def _describe(facts: JobFacts) -> ServerSentEvent:
    """Make the event of a job; its id is a checksum of its data, the same in every process."""
    data = msgspec.json.encode(facts)
    return ServerSentEvent(
        event="end" if facts.state in TERMINAL else "job",
        raw_data=data.decode(),
        id=f"{zlib.crc32(data):08x}",
    )
