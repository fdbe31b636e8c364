"""HEAD requests, which no route has to know."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GONE: Message = {"type": "http.disconnect"}


class HeadRequests:
    """ASGI middleware that answers HEAD with what GET would answer, but for the body.

    Source: RFC 9110, 9.3.2. An answer that would not end, such as a stream of events, ends with its
    first part: to the route it looks as if the client had gone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through; one for a head as one for the whole."""
        if scope.get("method") != "HEAD":
            await self._app(scope, receive, send)
            return
        inside: Scope = {**scope, "method": "GET"}
        ended = asyncio.Event()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended.is_set():
                ended.set()
                await send({"type": "http.response.body"})

        async def receiving() -> Message:
            coming, ending = asyncio.ensure_future(receive()), asyncio.ensure_future(ended.wait())
            try:
                await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
                return GONE if ended.is_set() else coming.result()
            finally:
                coming.cancel()
                ending.cancel()

        try:
            await self._app(inside, receiving, sending)
        finally:
            scope["route"] = inside.get("route")  # by which requests are counted
