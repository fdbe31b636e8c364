"""Sign-in and the choice of colours: the only things that pages keep in cookies."""

import logging
from http import HTTPStatus
from typing import Annotated, Final, cast

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from embedfarm.web.auth.sessions import COOKIE, Sessions
from embedfarm.web.http.rendering import (
    PATH_CHARACTERS_MAX,
    THEME_COOKIE,
    THEMES,
    local_path,
    render,
)
from embedfarm.web.services import Caller

LOGGER: Final = logging.getLogger(__name__)
THEME_SECONDS: Final = 365 * 86_400
KEY_CHARACTERS_MAX: Final = 200

router: Final = APIRouter(include_in_schema=False)
Then = Annotated[str, Form(max_length=PATH_CHARACTERS_MAX)]


@router.get("/login")
def ask_key(request: Request, then: str = "/") -> Response:
    """Ask for a key, where keys are asked for."""
    if not _sessions(request).keys.asked:
        return leave_for("/")
    return render(request, "login.html", {"then": local_path(then), "wrong": False})


@router.post("/login")
def sign_in(
    request: Request, secret: Annotated[str, Form(alias="key")] = "", then: Then = "/"
) -> Response:
    """Begin a session; the key itself is kept nowhere."""
    sessions = _sessions(request)
    key = sessions.keys.find(secret.strip()) if len(secret) <= KEY_CHARACTERS_MAX else None
    if key is None:
        LOGGER.warning("somebody tries to sign in with a key that is none")
        told = {"then": local_path(then), "wrong": True}
        return render(request, "login.html", told, HTTPStatus.UNAUTHORIZED)
    LOGGER.info("%s signs in", key.name)
    answer = leave_for(then)
    answer.set_cookie(
        COOKIE,
        sessions.begin(key),
        max_age=sessions.seconds,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout")
def sign_out(request: Request, key: Caller) -> Response:
    """End a session, also for a copy of its cookie."""
    LOGGER.info("%s signs out", key.name)
    _sessions(request).end(request.cookies.get(COOKIE, ""))
    answer = leave_for("/login")
    answer.delete_cookie(COOKIE)
    return answer


@router.post("/theme")
def choose_theme(theme: Annotated[str, Form()], then: Then = "/") -> Response:
    """Remember the colours in the browser."""
    answer = leave_for(then)
    if theme in THEMES:
        answer.set_cookie(THEME_COOKIE, theme, THEME_SECONDS, httponly=True, samesite="strict")
    return answer


def leave_for(path: str) -> Response:
    """Send the browser to a page of this site, with GET."""
    return RedirectResponse(local_path(path), HTTPStatus.SEE_OTHER)


def _sessions(request: Request) -> Sessions:
    return cast("Sessions", request.app.state.sessions)
