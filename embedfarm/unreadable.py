"""Records that cannot be read: whoever meets one leaves it out, names it, and goes on."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from embedfarm.records import R, RecordError, decode

NAMED_MAX: Final = 1024

Report: TypeAlias = Callable[[str, str], object]
"""Takes a place on the server, and why what lies there cannot be read."""

log = logging.getLogger(__name__)


@lru_cache(maxsize=NAMED_MAX)
def name_once(place: str, reason: str) -> None:
    """Say in the log what is left out: once, as long as there are not very many."""
    log.warning("%s is left out: %s", place, reason)


def read_or_skip(kind: type[R], data: bytes, place: str, report: Report = name_once) -> R | None:
    """The record in `data`, None for what cannot be read, which is reported."""
    try:
        return decode(kind, data)
    except RecordError as error:
        report(place, str(error))
        return None


def readable(
    kind: type[R], name: bytes, rows: Iterable[Any], place: str, report: Report = name_once
) -> Iterator[tuple[float, R]]:
    """Records in the field `name` of a stream's entries, each after its Unix time.

    Entries without the field are about something else, and are no news.
    """
    for entry, fields in rows:
        if name in fields:
            record = read_or_skip(kind, fields[name], place, report)
            if record is not None:
                yield int(entry.split(b"-")[0]) / 1000, record


def read_words(data: bytes, place: str, report: Report = name_once) -> dict[str, str]:
    """Words by name out of JSON; none where it is something else, which is reported."""
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        report(place, str(error))
        return {}


def names_of(members: Any) -> list[str]:  # noqa: ANN401 # a reply, whose names any program chose
    """Members of a list on the server as text; what is no UTF-8 names nothing that is there."""
    return [each.decode(errors="replace") for each in members]
