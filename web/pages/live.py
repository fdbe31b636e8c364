"""Pages that stay fresh: the same address gives a page, or the events that keep it up to date."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import anyio.to_thread
from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse

from embedfarm.broker import UNAVAILABLE
from embedfarm.status import JobGone
from web.pages.rendering import render, render_block
from web.watch import Watch, Watching

REFRESH_SECONDS: Final = 1.0
STREAM_SECONDS: Final = 60.0  # then the browser asks again, and says again who it is
EVENTS: Final = "text/event-stream"
AWAY: Final = "The farm's server is away; what you see is from before."
GONE: Final = "This job is gone; what you see is from before."

Read = Callable[[], Mapping[str, Any]]


def _wants_events(request: Request) -> bool:
    return EVENTS in request.headers.get("accept", "")


async def _take_place(request: Request, watch: Watching) -> AsyncIterator[None]:
    """Only events take a place: a page is always to be had."""
    if not _wants_events(request):
        yield
        return
    with watch.place():
        yield


LIVE: Final = Depends(_take_place)
"""Of a route that answers with `answer_live`."""


def answer_live(request: Request, template: str, read: Read) -> Response:
    """The page, or its events for whoever asks for these.

    Args:
        request: Of one or the other.
        template: Its block `live` is what changes.
        read: Asks the farm for what the template shows; it may block.
    """
    if not _wants_events(request):
        return render(request, template, read())
    stream = _events(request, template, read)
    return StreamingResponse(stream, headers={"cache-control": "no-store"}, media_type=EVENTS)


async def _events(request: Request, template: str, read: Read) -> AsyncIterator[str]:
    """What has changed, about once a second."""

    def draw() -> str:
        try:
            return _event("page", render_block(request, template, read()))
        except UNAVAILABLE:
            return _event("note", AWAY)
        except JobGone:
            return _event("note", GONE)

    watch: Watch = request.app.state.watch
    sent, end = "", time.monotonic() + STREAM_SECONDS
    yield f"retry: {int(REFRESH_SECONDS * 1000)}\n\n"
    while time.monotonic() < end and not watch.closed:
        event = await anyio.to_thread.run_sync(draw)
        yield event if event != sent else ": as before\n\n"  # by which a lost browser shows
        sent = event
        await watch.pause(REFRESH_SECONDS)


def _event(name: str, data: str) -> str:
    """An event; a line break in its data begins another line of it."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines())
    return f"event: {name}\n{lines}\n"
