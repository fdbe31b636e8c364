"""Bodies in JSON: what they hold is counted before it is made, and checked beside the event loop.

A body of a few megabytes may have millions of values, each of which costs many times its bytes as
an object, and more again as an error that names it. So one of too many values is refused unread,
and of what is wrong in a list (`embedfarm.web.http.schemas.Many`) only the first is told.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio.to_thread
import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

COSTS: Final[Mapping[bytes, int]] = {b",": 80, b"[": 200, b"{": 400, b":": 160}
"""About how many bytes an object takes that one of these leads to: an item, a list or an object,
and a member with its name."""
EXPANSION_MAX: Final = 6  # times the largest body: what its values may take
MEMBERS_MAX: Final = 100  # of an object: no schema knows as many, and each is an error of its own
PIECE_BYTES: Final = 1 << 16  # looked at in one step; a body up to this size needs no thread
UNCHECKED: Final = object()  # in place of a body that is refused: no schema takes it

Check = Callable[[Any], tuple[Any, Sequence[Mapping[str, Any]]]]
"""Makes of parsed JSON what a route takes, or says what is wrong with it, as pydantic does."""


class BoundedRoute(APIRoute):
    """A route whose JSON is read by `read_json`, and that FastAPI finds checked already.

    What is wrong with a body is told after what is wrong with its sender, as FastAPI does.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that has a JSON body read and checked before FastAPI's own one runs."""
        handle = super().get_route_handler()
        field = self.body_field
        if field is None or isinstance(field.field_info, Form):
            return handle

        async def read_first(request: Request) -> Response:
            if not is_json(request):
                return await handle(request)
            refusal, value = None, UNCHECKED
            try:
                value = await read_json(request, partial(field.validate, loc=("body",)))
            except (HTTPException, RequestValidationError) as error:
                refusal = error
            try:
                return await handle(_Read(request, value))
            except RequestValidationError as error:
                raise refusal or error from None

        return read_first


class _Read(Request):
    """A request whose JSON body was read and checked before; the bytes themselves are gone."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a stand-in that is not empty, since the bytes of the body are given up."""
        return b"null"

    async def json(self) -> Any:  # noqa: ANN401 -- as its base
        """Return the value that the body was checked to be."""
        return self._value


def media_type(headers: Headers) -> str:
    """Return the media type that a request's headers name, in lower case and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_json(request: Request) -> bool:
    """Tell whether a request says that its body is JSON."""
    media = media_type(request.headers)
    return media.startswith("application/") and media.endswith(("/json", "+json"))


async def read_json(request: Request, check: Check) -> Any:  # noqa: ANN401 -- what the check makes
    """Read a request's JSON body, and return what the check makes of it.

    Raises:
        HTTPException: The body is no JSON, or has too many values.
        RequestValidationError: The body is not what the route takes.
    """
    bytes_max = EXPANSION_MAX * request.app.state.services.settings.http_body_bytes_max
    pieces = [piece async for piece in request.stream()]
    if sum(map(len, pieces)) <= PIECE_BYTES:
        made = _read(pieces, bytes_max, check)
    else:
        made = await anyio.to_thread.run_sync(_read, pieces, bytes_max, check)
    if isinstance(made, Exception):
        raise made
    return made


def _read(pieces: list[bytes], bytes_max: int, check: Check) -> Any:  # noqa: ANN401 -- as above
    """Parse and check the pieces of a body; return its value, or the exception to be raised.

    The exception is not raised here: its traceback would keep the body in memory.
    """
    data = b"".join(pieces)
    pieces.clear()
    if sum(map(_weigh, _outside_strings(data))) > bytes_max:
        detail = f"the values of this body would take more than {bytes_max >> 20} MiB: send fewer"
        return HTTPException(413, detail)
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        return HTTPException(422, f"body: {error}")
    except RecursionError:
        return HTTPException(422, "body: JSON that is nested too deep")
    if _is_too_wide(value):
        return HTTPException(422, f"body: an object of more than {MEMBERS_MAX} members")
    made, faults = check(value)
    if faults:
        return RequestValidationError([{**each, "input": None} for each in faults])
    return made


def _weigh(json: bytes) -> int:
    """Estimate the bytes that the values in JSON take; its strings must be cut out before."""
    return sum(json.count(each) * cost for each, cost in COSTS.items())


def _outside_strings(json: bytes) -> Iterator[bytes]:
    """Yield the parts of JSON that lie outside its strings, in pieces."""
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = 0
    for start in range(0, len(plain), PIECE_BYTES):
        parts = plain[start : start + PIECE_BYTES].split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


def _is_too_wide(value: object) -> bool:
    """Tell whether any object in a value has more than `MEMBERS_MAX` members."""
    left = [value] if isinstance(value, dict | list) else []
    while left:
        each: Any = left.pop()
        if isinstance(each, dict):
            if len(each) > MEMBERS_MAX:
                return True
            each = each.values()
        left += (item for item in each if isinstance(item, dict | list))
    return False
