"""Templates and how they write numbers, sizes and times; nothing here asks the server."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fastapi import Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import HTTPConnection

from embedfarm.contract.formatting import counted, format_moment, moment_of
from embedfarm.contract.outlook import done_ratio
from embedfarm.contract.scheduling_terms import priority_name
from embedfarm.contract.spending import format_cost, format_device_hours
from embedfarm.web.auth.keys import Key, Scope

THEMES: Final = ("auto", "light", "dark")
THEME_COOKIE: Final = "theme"
PATH_CHARACTERS_MAX: Final = 2000
HEADERS: Final = {"cache-control": "no-store", "vary": "accept, cookie"}

_MILLION: Final = 1_000_000
_BINARY: Final = 1024
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86_400
_FEW: Final = 10  # below, a number has a digit after the point


def number(value: float) -> str:
    """Format a count or a rate, in full below a million."""
    if abs(value) >= _MILLION:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
            if abs(value) >= size:
                return f"{value / size:,.2f} {letter}"
    if value != int(value) and abs(value) < _FEW:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Format bytes in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < _BINARY:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _BINARY
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Format a time span in its two largest units."""
    if seconds < _FEW:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def span(seconds: tuple[float, float]) -> str:
    """Format an estimate from a least to a most; as one time where both read the same."""
    low, high = map(_roughly, seconds)
    return low if low == high else f"{low} to {high}"


def _roughly(seconds: float) -> str:
    """Format a predicted time, no finer than a prediction can be."""
    if seconds < _MINUTE:
        return f"{round(seconds)} s"
    if seconds < _HOUR:
        return f"{round(seconds / _MINUTE)} min"
    return duration(seconds)


def clock(seconds: tuple[float, float]) -> str:
    """Format at which times of day a span that starts now is over, in UTC."""
    now = time.time()
    low, high = (moment_of(now + each) for each in seconds)
    same = "%H:%M" if high.date() == datetime.now(UTC).date() else "%d %b %H:%M"
    first, last = low.strftime(same), high.strftime(same)
    return f"at {first} UTC" if first == last else f"{first} to {last} UTC"


def milliseconds(seconds: float) -> str:
    """Format a short time in milliseconds, or in seconds from one second on."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def percent(part: float) -> str:
    """Format a share of one in percent; 100 % stands only for the whole."""
    return f"{min(part, 0.999) * 100:.1f} %" if part < 1 else f"{part * 100:.0f} %"


def moment(milliseconds_: float) -> str:
    """Format a Unix time in milliseconds for people, in UTC."""
    return format_moment(milliseconds_ / 1000)


def iso(milliseconds_: float) -> str:
    """Format a Unix time in milliseconds as ISO 8601, for programs."""
    return moment_of(milliseconds_ / 1000).isoformat(timespec="seconds")


def ago(milliseconds_: float) -> str:
    """Format how long ago a time was, in its largest unit: a finer one would change each second."""
    seconds = max(0.0, time.time() - milliseconds_ / 1000)
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} ago"
    return "just now"


def segment(text: str) -> str:
    """Quote a text as one segment of a path."""
    return quote(text, safe="")


def prose(text: str) -> Markup:
    """Format a docstring as paragraphs, with what is between backticks as code."""
    paragraphs = (escape(" ".join(each.split())) for each in text.split("\n\n"))
    return Markup("").join(
        Markup("<p>{}</p>").format(Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", each)))  # noqa: S704 # it is escaped
        for each in paragraphs
    )


ENVIRONMENT: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {
    each.__name__: each
    for each in (
        number,
        size,
        duration,
        span,
        clock,
        milliseconds,
        percent,
        done_ratio,
        moment,
        iso,
        ago,
        segment,
        prose,
    )
}
ENVIRONMENT.filters["priority"] = priority_name
ENVIRONMENT.filters["counted"] = counted
ENVIRONMENT.filters["device_time"] = format_device_hours
ENVIRONMENT.filters["cost"] = format_cost


def surroundings(connection: HTTPConnection) -> dict[str, Any]:
    """Return the values that the frame of every page needs: theme, path, key and its rights."""
    key: Key | None = connection.scope.get("state", {}).get("key")
    theme = connection.cookies.get(THEME_COOKIE, "")
    return {
        "theme": theme if theme in THEMES else THEMES[0],
        "path": connection.url.path,
        "here": here(connection),
        "key": key,
        "signed_in": bool(key and key.sha256),
        "may_read": key is not None and key.allows(Scope.READ),
        "may_submit": key is not None and key.allows(Scope.SUBMIT),
        "may_steer": key is not None and key.allows(Scope.ADMIN),
        "sees_all": key is not None and key.tenant is None,
    }


def render(
    request: HTTPConnection, template: str, context: Mapping[str, Any], status: int = 200
) -> Response:
    """Render a whole page."""
    text = ENVIRONMENT.get_template(template).render(surroundings(request) | dict(context))
    return HTMLResponse(text, status, HEADERS)


def render_block(connection: HTTPConnection, template: str, context: Mapping[str, Any]) -> str:
    """Render the part of a page that changes, its block `live`."""
    found = ENVIRONMENT.get_template(template)
    values = found.new_context(surroundings(connection) | dict(context))
    return "".join(found.blocks["live"](values))


def wants_page(connection: HTTPConnection) -> bool:
    """Tell whether the client is a browser that shows the answer to a person."""
    return "text/html" in connection.headers.get("accept", "")


def here(connection: HTTPConnection) -> str:
    """Return the path and query of a request."""
    query = connection.url.query
    return connection.url.path + (f"?{query}" if query else "")


def local_path(path: str) -> str:
    """Return a path on this site that a client sent; "/" for anything that might lead elsewhere."""
    safe = path.startswith("/") and path[1:2] not in {"/", "\\"} and path.isprintable()
    return path if safe and len(path) <= PATH_CHARACTERS_MAX else "/"
