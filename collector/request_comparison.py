"""What tells the request of an output from another one, in words for people."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

import msgspec

from embedfarm.collector.manifest import OutputError

SAID_CHARACTERS_MAX: Final = 200


def compare_requests(directory: Path, stored: dict[str, Any], request: dict[str, Any]) -> None:
    """Refuse a request that is not the stored one, by name of what differs."""
    words = describe_differences(stored, request)
    if words:
        raise OutputError(
            f"{directory} belongs to another request, and needs a directory of its own: {words}"
        )


def describe_differences(stored: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Say what a request has that the stored one has not, by name; "" if they are the same."""
    # JSON knows fewer types than Python: compare what would be stored.
    asked = msgspec.json.decode(msgspec.json.encode(request))
    return "; ".join(
        f"{name.removeprefix('read_').replace('_', ' ')}:"
        f" {_say(stored, name)} before, {_say(asked, name)} now"
        for name in sorted(stored.keys() | asked.keys())
        if stored.get(name) != asked.get(name)
    )


def _say(request: Mapping[str, Any], name: str) -> str:
    """Return what a request has for a field, in words for people."""
    match request.get(name, "the default"):
        case bool(given):
            return "yes" if given else "no"
        case None | "":
            return "none"
        case list(given):
            return shorten(", ".join(map(str, given)), SAID_CHARACTERS_MAX) or "none"
        case given:
            return str(given)
