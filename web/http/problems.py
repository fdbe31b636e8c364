"""Every error as one JSON shape, RFC 9457, and in OpenAI's own where its client parses it."""

import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import redis
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import HTTPConnection
from starlette.routing import Match

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.farm_client import FarmFull
from embedfarm.contract.jobs import ChangeRefused
from embedfarm.contract.status import JobGone
from embedfarm.ingest.allow_list import PathRefused
from embedfarm.web.http.rendering import render, wants_page

LOGGER: Final = logging.getLogger(__name__)
REQUEST_ID: Final = "x-request-id"
MEDIA_TYPE: Final = "application/problem+json"
OPENAI_PATHS: Final = ("/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")
OPENAI_ERRORS: Final = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
"""Type and code of an error in OpenAI's shape, by status."""
AWAY_SECONDS: Final = 5
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
FAULTS_MAX: Final = 5  # of a request, that are told
DETAIL_CHARACTERS_MAX: Final = 2000  # names that were sent may be in it
USUAL: Final = (400, 401, 403, 408, 413, 415, 422, 429, 500, 503)  # that every route may give

_PROBLEM: Final = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}

SECURITY_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none, browsers hide the origin of our own forms
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Problem(BaseModel):
    """An error in the shape of RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class ModelNotServed(HTTPException):
    """Raised for a model that may not be asked for (404)."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(404, f"model {model!r} is not served here, but {', '.join(served)}")


class OpenaiFault(BaseModel):
    """An error as OpenAI's API gives it; `param` is the wrong field, if one is at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenaiProblem(BaseModel):
    """An error in the shape of OpenAI's API."""

    error: OpenaiFault


def is_openai(path: str) -> bool:
    """Tell whether a route speaks OpenAI's protocol, errors included."""
    return any(path == each or path.startswith(f"{each}/") for each in OPENAI_PATHS)


def answer_problem(
    request: HTTPConnection,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> Response:
    """Respond to a request that failed, with a page for a browser, else with JSON.

    Args:
        request: Request that failed; its path and client decide about the shape.
        status: HTTP status; 422 becomes 400 on OpenAI's routes, which know no 422.
        detail: Explanation for people.
        headers: Further headers of the response.
        param: The field of the body or the query that is at fault, if one is.
    """
    openai = is_openai(request.url.path) or _is_unknown(request, status)
    if len(detail) > DETAIL_CHARACTERS_MAX:
        detail = f"{detail[: DETAIL_CHARACTERS_MAX - 1]}…"
    if wants_page(request) and not openai:
        told = {"status": status, "title": HTTPStatus(status).phrase, "detail": detail}
        page = render(request, "problem.html", told, status)
        page.headers.update(headers or {})
        return page
    if openai and status == HTTPStatus.UNPROCESSABLE_ENTITY:
        status = HTTPStatus.BAD_REQUEST
    shape: BaseModel
    if openai:
        shape = OpenaiProblem(error=_openai_fault(status, detail, param))
    else:
        shape = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(
        json.dumps(shape.model_dump()),  # in ASCII: a detail may quote what is no Unicode
        status,
        headers=headers,
        media_type="application/json" if openai else MEDIA_TYPE,
    )


def _is_unknown(request: HTTPConnection, status: int) -> bool:
    """Tell whether a request is for a route of OpenAI's that the farm does not have."""
    unknown = status == HTTPStatus.NOT_FOUND and "route" not in request.scope
    return unknown and request.url.path.startswith("/v1/")


def _openai_fault(status: int, detail: str, param: str | None) -> OpenaiFault:
    server = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
    kind, code = OPENAI_ERRORS.get(status, (server or "invalid_request_error", server or None))
    code = "model_not_found" if (status, param) == (HTTPStatus.NOT_FOUND, "model") else code
    return OpenaiFault(message=detail, type=kind, param=param, code=code)


def problems(*further: int) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route for the OpenAPI document: the usual ones and further ones."""
    return {
        status: {"description": HTTPStatus(status).phrase, **_PROBLEM}
        for status in sorted({*USUAL, *further})
    }


def openai_problems(*further: int) -> dict[int | str, dict[str, Any]]:
    """Return errors of a route like `problems`, but in OpenAI's shape and without 422.

    A request that is no HTTP has no route that could be known, so that 400 has both shapes.
    """
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "model": OpenaiProblem}
        for status in sorted({*USUAL, *further} - {422})
    }
    answers[400] |= _PROBLEM
    return answers


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def _say(status: int) -> Handler:
    """Make a handler that answers with a status, and with the error's own words but for 503."""

    async def answer(request: Request, error: Exception) -> Response:
        if status != HTTPStatus.SERVICE_UNAVAILABLE:
            detail = f"no such job: {error}" if isinstance(error, JobGone) else str(error)
            return answer_problem(request, status, detail)
        LOGGER.warning(
            "%s %s: %s (%s)", request.method, request.url.path, type(error).__name__, _id(request)
        )
        full = isinstance(error, redis.exceptions.OutOfMemoryError)
        detail = f"the farm's server is {'full' if full else 'away'}"
        return answer_problem(request, status, detail, {"retry-after": str(AWAY_SECONDS)})

    return answer


async def _tell_full(request: Request, error: FarmFull) -> Response:
    again = {"retry-after": str(error.retry_after_seconds)}
    return answer_problem(request, HTTPStatus.TOO_MANY_REQUESTS, str(error), again)


async def _tell_refusal(request: Request, error: HTTPException) -> Response:
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": ", ".join(_allowed(request))}
    param = "model" if isinstance(error, ModelNotServed) else None
    return answer_problem(request, error.status_code, error.detail, headers, param)


def _allowed(request: Request) -> list[str]:
    """List all methods of a path; Starlette names only those of its first matching route."""
    found = [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL
            for route in request.app.routes
        )
    ]
    return [*found[:1], "HEAD", *found[1:]] if "GET" in found else found


async def _tell_faults(request: Request, error: RequestValidationError) -> Response:
    """Name the wrong fields, without repeating the values that were sent."""
    faults = error.errors()
    places = [_place(each["loc"]) for each in faults[:FAULTS_MAX]]
    told = [f"{place}: {each['msg']}" for place, each in zip(places, faults, strict=False)]
    if len(faults) > FAULTS_MAX:
        told.append(f"and {len(faults) - FAULTS_MAX} more")
    param = places[0].partition(".")[2] or None
    return answer_problem(request, HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(told), param=param)


def _place(location: Sequence[str | int]) -> str:
    """Return the place of a fault, without the shapes that a field may have."""
    return ".".join(str(part) for part in location if not str(part).startswith("("))


async def _hide(request: Request, _error: Exception) -> Response:
    """Answer an unexpected error without its details; only the log has the traceback."""
    LOGGER.error("%s %s has failed (%s)", request.method, request.url.path, _id(request))
    detail = f"a defect of the farm; its log says more of request {_id(request)}"
    headers = SECURITY_HEADERS | {REQUEST_ID: _id(request)}
    return answer_problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, detail, headers)


def _id(request: HTTPConnection) -> str:
    """Return the id by which the log knows a request, and which its answer has as a header."""
    return str(request.scope.get("state", {}).get("request_id", ""))


HANDLERS: Final[dict[int | type[Exception], Handler]] = {
    JobGone: _say(404),
    FarmFull: _tell_full,
    PathRefused: _say(403),
    ChangeRefused: _say(409),
    RecordError: _say(409),
    redis.exceptions.OutOfMemoryError: _say(503),
    **dict.fromkeys(UNAVAILABLE, _say(503)),
    StarletteException: _tell_refusal,
    RequestValidationError: _tell_faults,
    Exception: _hide,
}
