"""What every request goes through: whose it is, how often, from where, and how large.

It stands before the routes, so that nobody without a key gets a body read.
"""

import asyncio
import contextlib
import ipaddress
import math
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, urlsplit

import anyio.to_thread
from fastapi import HTTPException, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedfarm.broker import UNAVAILABLE
from embedfarm.settings import Settings
from web.keys import ANYBODY, Key, find_key
from web.pages.rendering import here, wants_page
from web.problems import SECURITY_HEADERS, answer_problem
from web.rates import Buckets
from web.sessions import COOKIE, Sessions

OPEN_PATHS: Final = frozenset({
    "/livez", "/readyz", "/health", "/openapi.json", "/login", "/theme",
    "/static/style.css", "/static/live.js", "/static/icon.svg",
})  # fmt: skip
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
UPLOAD_PATHS: Final = frozenset({"/v1/jobs", "/v1/files", "/jobs/new"})
HEAD_BYTES_MAX: Final = 16_384
LINGER_BYTES: Final = 1 << 20
LINGER_SECONDS: Final = 1.0
IDENTITY: Final = "identity"
CLOSE: Final = {"connection": "close"}  # what was sent and not read is in the way of what follows


class Gate:
    """ASGI middleware; the key of a request is in its `state.key` afterwards.

    Args:
        app: What lies behind.
        keys: Who may ask; without any, everybody on this machine.
        settings: Limits of rate, size and time.
        sessions: Who has signed in on the pages.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[Key], settings: Settings, sessions: Sessions
    ) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._settings = settings
        self._buckets = Buckets(
            settings.http_requests_per_second,
            settings.http_requests_burst,
            settings.http_clients_max,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is refused, and let all else through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _secure(_linger(receive, send))
        try:
            scope.setdefault("state", {})["key"] = await self._admit(scope)
        except HTTPException as refusal:
            await _answer_refusal(HTTPConnection(scope), refusal)(scope, receive, send)
        else:
            await self._app(scope, self._bound(receive, is_upload(scope)), send)

    async def _admit(self, scope: Scope) -> Key | None:
        """Whose request it is; None where nobody need say so.

        Raises:
            HTTPException: It is refused.
        """
        headers = Headers(scope=scope)
        check_head(scope, headers)
        key = self._identify(headers)
        # Who has signed in counts by address: a wrong cookie must not be cheaper than no key.
        self._take_turn(key.name if key and self._keys else _address(scope))
        check_origin(headers, scope["method"], keyless=not self._keys)
        key = key or await self._recognise(HTTPConnection(scope).cookies.get(COOKIE, ""))
        if key is None and scope["path"] not in OPEN_PATHS:
            known = "a wrong key" if "authorization" in headers else "no key"
            detail = f"{known}: send one as `Authorization: Bearer KEY`"
            raise HTTPException(401, detail, {"www-authenticate": "Bearer", **CLOSE})
        size = headers.get("content-length", "")
        if size.isdecimal() and int(size) > self._bytes_max(is_upload(scope)):
            raise self._too_large(is_upload(scope))
        return key

    def _identify(self, headers: Headers) -> Key | None:
        if not self._keys:
            return ANYBODY
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        return find_key(self._keys, secret.strip()) if scheme.lower() == "bearer" else None

    async def _recognise(self, session: str) -> Key | None:
        """The key of somebody who has signed in."""
        if not session:
            return None
        try:
            return await anyio.to_thread.run_sync(self._sessions.find, session)
        except UNAVAILABLE as error:
            raise HTTPException(503, "the farm's server is away", CLOSE) from error

    def _take_turn(self, client: str) -> None:
        seconds = self._buckets.take(client, time.monotonic())
        if seconds:
            raise HTTPException(
                429,
                f"more than {self._settings.http_requests_per_second:g} requests a second",
                {"retry-after": str(math.ceil(seconds)), **CLOSE},
            )

    def _bytes_max(self, upload: bool) -> int:  # noqa: FBT001 -- of what kind the body is
        limits = self._settings
        return limits.http_upload_bytes_max if upload else limits.http_body_bytes_max

    def _too_large(self, upload: bool) -> HTTPException:  # noqa: FBT001 -- as above
        return HTTPException(413, f"this body has at most {self._bytes_max(upload)} bytes", CLOSE)

    def _bound(self, receive: Receive, upload: bool) -> Receive:  # noqa: FBT001 -- as above
        """Receives a body that may be neither larger nor slower than the limits.

        An upload has time as a whole, and each piece of it as much as any other body.
        """
        limits = self._settings
        clock = asyncio.get_running_loop().time
        seconds = limits.http_upload_seconds if upload else limits.http_body_seconds
        left = self._bytes_max(upload)
        deadline = clock() + seconds
        whole = False

        async def bounded() -> Message:
            nonlocal left, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(min(deadline, clock() + limits.http_body_seconds)):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, "the body came too slowly", CLOSE) from error
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large(upload)
            whole = not message.get("more_body", False)
            return message

        return bounded


def is_upload(scope: Scope) -> bool:
    """Whether a request's body goes to the disk, and not into the memory."""
    media = Headers(scope=scope).get("content-type", "")
    to_disk = scope["path"] in UPLOAD_PATHS and scope["method"] == "POST"
    return to_disk and not media.lower().startswith("application/json")


def _linger(receive: Receive, send: Send) -> Send:
    """Takes for a moment what still comes, before a connection is closed behind a response.

    A connection that is closed while unread bytes lie there is reset, and the other side may then
    lose the response that says why.
    """
    closing = False

    async def sending(message: Message) -> None:
        nonlocal closing
        if message["type"] == "http.response.start":
            closing = MutableHeaders(scope=message).get("connection") == "close"
        elif closing and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await _drain(receive)
            message = {"type": "http.response.body"}
        await send(message)

    return sending


async def _drain(receive: Receive) -> None:
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _secure(send: Send) -> Send:
    """Sends the security headers with every response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(SECURITY_HEADERS)
        await send(message)

    return sending


def _answer_refusal(request: HTTPConnection, refusal: HTTPException) -> Response:
    """A problem; to a browser without a key the page that asks for one."""
    if refusal.status_code == HTTPStatus.UNAUTHORIZED and wants_page(request):
        return RedirectResponse(f"/login?then={quote(here(request))}", HTTPStatus.SEE_OTHER)
    return answer_problem(request, refusal.status_code, refusal.detail, refusal.headers)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def check_head(scope: Scope, headers: Headers) -> None:
    """Keep out what another program could take for another request, and what swells.

    Raises:
        HTTPException: It is long, or there are two hosts, two ways to find the end of the body, or
            a coding of it that would have to be undone.
    """
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if size + sum(len(name) + len(value) for name, value in headers.raw) > HEAD_BYTES_MAX:
        raise HTTPException(431, f"a head has at most {HEAD_BYTES_MAX} bytes", CLOSE)
    if len(headers.getlist("host")) > 1:
        raise HTTPException(400, "more than one Host", CLOSE)
    if "content-length" in headers and "transfer-encoding" in headers:
        raise HTTPException(400, "both Content-Length and Transfer-Encoding", CLOSE)
    coded = headers.get("content-encoding", IDENTITY).lower() != IDENTITY
    if coded and not is_upload(scope):  # a file is kept as it comes
        detail = "a body is sent as it is, without Content-Encoding"
        raise HTTPException(415, detail, {"accept-encoding": IDENTITY, **CLOSE})


def check_origin(headers: Headers, method: str, *, keyless: bool) -> None:
    """Keep pages of other sites from using the farm through somebody's browser.

    Such a page can send requests to a loopback address, and with a name that resolves to it (DNS
    rebinding) it can read the answers.

    Raises:
        HTTPException: It looks as if one tried.
    """
    host = headers.get("host", "")
    if keyless and not is_loopback(_hostname(host)):
        raise HTTPException(403, "without keys the farm is asked for as localhost only")
    origin = headers.get("origin", "")
    if origin and method not in SAFE_METHODS and origin.partition("://")[2] != host:
        raise HTTPException(403, f"from a page of another site: {origin}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, reached from nowhere else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """A Host header without the port; "" if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
