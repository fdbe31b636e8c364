"""Pages that stay fresh: the same address gives a page, or the events that keep it up to date."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import anyio.to_thread
from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.status import JobGone
from embedfarm.web.http.rendering import render, render_block
from embedfarm.web.jobs.job_watch import JobWatch, Watching

REFRESH_SECONDS: Final = 1.0
STREAM_SECONDS: Final = 60.0  # then the browser asks again, and says again who it is
EVENTS: Final = "text/event-stream"
AWAY: Final = "The farm's server is away; what you see is from before."
GONE: Final = "This job is gone; what you see is from before."

Read = Callable[[], Mapping[str, Any]]


def _wants_events(request: Request) -> bool:
    return EVENTS in request.headers.get("accept", "")


async def _take_place(request: Request, watch: Watching) -> AsyncIterator[None]:
    """Take a place for a stream of events; a page needs none, so that it can always be had."""
    if not _wants_events(request):
        yield
        return
    with watch.place():
        yield


LIVE: Final = Depends(_take_place)
"""Of a route that answers with `answer_live`."""


def answer_live(request: Request, template: str, read: Read) -> Response:
    """Answer with the page, or with its events where the request asks for these.

    Args:
        request: Request for the page or for its events.
        template: Name of the template, of which the block `live` changes.
        read: Function that asks the farm for what the template shows; it may block.
    """
    if not _wants_events(request):
        return render(request, template, read())
    stream = _events(request, template, read)
    return StreamingResponse(stream, headers={"cache-control": "no-store"}, media_type=EVENTS)


async def _events(request: Request, template: str, read: Read) -> AsyncIterator[str]:
    """Yield an event about once a second: the changed block, or a comment if nothing changed."""

    def draw() -> str:
        try:
            return _event("page", render_block(request, template, read()))
        except UNAVAILABLE:
            return _event("note", AWAY)
        except JobGone:
            return _event("note", GONE)

    watch: JobWatch = request.app.state.watch
    sent, end = "", time.monotonic() + STREAM_SECONDS
    yield f"retry: {int(REFRESH_SECONDS * 1000)}\n\n"
    while time.monotonic() < end and not watch.closed:
        event = await anyio.to_thread.run_sync(draw)
        yield event if event != sent else ": as before\n\n"  # shows when the browser is gone
        sent = event
        await watch.pause(REFRESH_SECONDS)


def _event(name: str, data: str) -> str:
    """Format a server-sent event; each line of its data gets a line of its own."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines())
    return f"event: {name}\n{lines}\n"
