"""The gate that every request passes: whose it is, how often, from where, and how large.

The gate stands before the routes, so that no body is read for a client without a key.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import time
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, urlsplit
from uuid import uuid4

import anyio.to_thread
from fastapi import HTTPException, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.settings import Settings
from embedfarm.web.auth.keys import ANYBODY, Key, Keyring
from embedfarm.web.auth.rates import Buckets, TenantTurns, TooMuchError
from embedfarm.web.auth.sessions import COOKIE, Sessions
from embedfarm.web.http.answers import MEDIA_TYPE
from embedfarm.web.http.bodies import media_type
from embedfarm.web.http.problems import REQUEST_ID, SECURITY_HEADERS, answer_problem
from embedfarm.web.http.rendering import here, wants_page

LOGGER: Final = logging.getLogger(__name__)
OPEN_PATHS: Final = frozenset({
    "/livez", "/readyz", "/health", "/openapi.json", "/docs", "/login", "/theme",
    "/static/style.css", "/static/live.js", "/static/icon.svg",
})  # fmt: skip
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
UPLOAD_PATHS: Final = frozenset({"/v1/jobs", "/v1/files", "/jobs/new"})
HEAD_BYTES_MAX: Final = 16_384
LINGER_BYTES: Final = 1 << 20
LINGER_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 1.0  # between looks at the file of keys
IDENTITY: Final = "identity"
CLOSE: Final = {"connection": "close"}  # unread bytes would stand before the next request


class KeyTakenAwayError(Exception):
    """Raised when the key of a request is taken away while its answer is sent."""


class Gate:
    """ASGI middleware; the key of a request is in its `state.key` afterwards.

    Args:
        app: The application behind the gate.
        keys: Keys of those who may ask; without any, everybody on this machine may.
        settings: Limits of rate, size and time.
        sessions: Sessions of those who have signed in on the pages.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, settings: Settings, sessions: Sessions) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._settings = settings
        self._buckets = Buckets(
            settings.http_requests_per_second,
            settings.http_requests_burst,
            settings.http_clients_max,
        )
        self._turns = TenantTurns(settings)
        self._look_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and let all others through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = f"req_{uuid4().hex}"
        send = _secure(_linger(receive, send), state["request_id"])
        try:
            key = state["key"] = await self._admit(scope)
        except HTTPException as refusal:
            await _answer_refusal(HTTPConnection(scope), refusal)(scope, receive, send)
            return
        try:
            with self._turns.turn(key.tenant if key else None, time.monotonic()):
                body = self._while_known(key, self._bound(receive, is_upload(scope)))
                await self._app(scope, body, self._breaking(key, send))
        except TooMuchError as error:
            enough = too_often(str(error), error.retry_after_seconds)
            await _answer_refusal(HTTPConnection(scope), enough)(scope, receive, send)
        except KeyTakenAwayError:  # the connection breaks, so that nobody takes half for the whole
            LOGGER.warning("an answer breaks off: key %s was taken away", key.name if key else "")

    async def _admit(self, scope: Scope) -> Key | None:
        """Find the key of a request; None on a path that is open to everybody.

        Raises:
            HTTPException: The request is refused.
        """
        headers = Headers(scope=scope)
        check_head(scope, headers)
        await self._refresh()
        key = self._identify(headers)
        # Who has signed in counts by address: a wrong cookie must not be cheaper than no key.
        self._take_turn(key.name if key and self._keys.asked else _address(scope))
        check_origin(headers, scope["method"], keyless=not self._keys.asked)
        key = key or await self._recognise(HTTPConnection(scope).cookies.get(COOKIE, ""))
        if key is None and scope["path"] not in OPEN_PATHS:
            known = "a wrong key" if "authorization" in headers else "no key"
            raise unauthorised(f"{known}: send one as `Authorization: Bearer KEY`")
        size = headers.get("content-length", "")
        if size.isdecimal() and int(size) > self._bytes_max(is_upload(scope)):
            raise self._too_large(is_upload(scope))
        return key

    def _identify(self, headers: Headers) -> Key | None:
        if not self._keys.asked:
            return ANYBODY
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        return self._keys.find(secret.strip()) if scheme.lower() == "bearer" else None

    async def _refresh(self) -> None:
        """Follow the file of keys; a disk that does not answer must not stop the loop."""
        now = time.monotonic()
        if self._keys.path is not None and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            await anyio.to_thread.run_sync(self._keys.refresh)

    async def _is_known(self, key: Key | None) -> bool:
        """Tell whether the key that a request came with counts still."""
        if key is None or not self._keys.asked:
            return True
        await self._refresh()
        return self._keys.known(key.sha256) == key

    def _while_known(self, key: Key | None, receive: Receive) -> Receive:
        """Wrap `receive`, so that nothing is made of a body whose key is taken away meanwhile."""

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not await self._is_known(key):
                raise unauthorised("the key was taken away")
            return message

        return receiving

    def _breaking(self, key: Key | None, send: Send) -> Send:
        """Wrap `send`, so that an answer in many parts breaks off once its key is taken away."""

        async def sending(message: Message) -> None:
            if message.get("more_body") and not await self._is_known(key):
                raise KeyTakenAwayError
            await send(message)

        return sending

    async def _recognise(self, session: str) -> Key | None:
        """Find the key of a signed-in user by the session in the cookie."""
        if not session:
            return None
        try:
            return await anyio.to_thread.run_sync(self._sessions.find, session)
        except UNAVAILABLE as error:
            raise HTTPException(503, "the farm's server is away", CLOSE) from error

    def _take_turn(self, client: str) -> None:
        seconds = self._buckets.take(client, time.monotonic())
        if seconds:
            limit = self._settings.http_requests_per_second
            raise too_often(f"more than {limit:g} requests a second", seconds)

    def _bytes_max(self, upload: bool) -> int:  # noqa: FBT001 -- of what kind the body is
        limits = self._settings
        return limits.http_upload_bytes_max if upload else limits.http_body_bytes_max

    def _too_large(self, upload: bool) -> HTTPException:  # noqa: FBT001 -- as above
        limit = f"EMBEDFARM_HTTP_{'UPLOAD' if upload else 'BODY'}_BYTES_MAX"
        detail = f"this body has at most {self._bytes_max(upload)} bytes ({limit})"
        return HTTPException(413, detail, CLOSE)

    def _bound(self, receive: Receive, upload: bool) -> Receive:  # noqa: FBT001 -- as above
        """Wrap `receive`, so that a body can be neither larger nor slower than the limits.

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
    """Tell whether a request's body goes to the disk, and not into memory."""
    to_disk = scope["path"] in UPLOAD_PATHS and scope["method"] == "POST"
    return to_disk and media_type(Headers(scope=scope)) != MEDIA_TYPE


def unauthorised(detail: str) -> HTTPException:
    """Make the refusal (401) of a client without a key that counts."""
    return HTTPException(401, detail, {"www-authenticate": "Bearer", **CLOSE})


def too_often(detail: str, seconds: float) -> HTTPException:
    """Make the refusal (429) of a client that sends too many requests, until `seconds` later."""
    return HTTPException(429, detail, {"retry-after": str(math.ceil(seconds)), **CLOSE})


def _linger(receive: Receive, send: Send) -> Send:
    """Wrap `send`, to take what still comes for a moment before a connection is closed.

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


def _secure(send: Send, request_id: str) -> Send:
    """Wrap `send`, to add the security headers and the request's id to every response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(SECURITY_HEADERS | {REQUEST_ID: request_id})
        await send(message)

    return sending


def _answer_refusal(request: HTTPConnection, refusal: HTTPException) -> Response:
    """Answer with a problem, or send a browser without a key to the page that asks for one."""
    if refusal.status_code == HTTPStatus.UNAUTHORIZED and wants_page(request):
        return RedirectResponse(f"/login?then={quote(here(request))}", HTTPStatus.SEE_OTHER)
    return answer_problem(request, refusal.status_code, refusal.detail, refusal.headers)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def check_head(scope: Scope, headers: Headers) -> None:
    """Refuse a head that another program could take for another request, or that is too large.

    Raises:
        HTTPException: The head is too long, or it has two hosts, two ways to find the end of the
            body, or a coding of the body that would have to be undone.
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
    """Refuse requests that pages of other sites send through a user's browser.

    Such a page can send requests to a loopback address, and with a name that resolves to it (DNS
    rebinding) it can read the answers.

    Raises:
        HTTPException: The request looks like one from a page of another site.
    """
    host = headers.get("host", "")
    if keyless and not is_loopback(_hostname(host)):
        raise HTTPException(403, "without keys the farm is asked for as localhost only")
    origin = headers.get("origin", "")
    if origin and method not in SAFE_METHODS and origin.partition("://")[2] != host:
        raise HTTPException(403, f"from a page of another site: {origin}")


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address means this machine, reached from nowhere else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """Return the name in a Host header without the port; "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
