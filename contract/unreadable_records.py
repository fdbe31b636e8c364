"""Records that cannot be read: every reader skips them, logs their key, and goes on."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from embedfarm.contract.encoding import R, RecordError, decode

NAMED_MAX: Final = 1024

Report: TypeAlias = Callable[[str, str], object]
"""Takes a place on the server, and why what lies there cannot be read."""

log = logging.getLogger(__name__)


@lru_cache(maxsize=NAMED_MAX)
def name_once(place: str, reason: str) -> None:
    """Log a record that is skipped: once for each key and reason, up to a limit."""
    log.warning("%s is left out: %s", place, reason)


def read_or_skip(kind: type[R], data: bytes, place: str, report: Report = name_once) -> R | None:
    """Return the record in `data`; report it and return None if it cannot be read."""
    try:
        return decode(kind, data)
    except RecordError as error:
        report(place, str(error))
        return None


def readable(
    kind: type[R], name: bytes, rows: Iterable[Any], place: str, report: Report = name_once
) -> Iterator[tuple[float, R]]:
    """Yield the records of `readable_entries`, each after its Unix time in seconds."""
    for entry, record in readable_entries(kind, name, rows, place, report):
        yield int(entry.partition("-")[0]) / 1000, record


def readable_entries(
    kind: type[R], name: bytes, rows: Iterable[Any], place: str, report: Report = name_once
) -> Iterator[tuple[str, R]]:
    """Yield the records in the field `name` of a stream's entries, each after its entry's ID.

    Entries without the field are about something else, and are not reported.
    """
    for entry, fields in rows:
        if name in fields:
            record = read_or_skip(kind, fields[name], place, report)
            if record is not None:
                yield entry.decode(), record


def read_words(data: bytes, place: str, report: Report = name_once) -> dict[str, str]:
    """Return words by name out of JSON; report anything else, and return none."""
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        report(place, str(error))
        return {}


def names_of(members: Any) -> list[str]:  # noqa: ANN401 # a reply, whose names any program chose
    """Return members of a list on the server as text; bytes that are no UTF-8 are replaced."""
    return [each.decode(errors="replace") for each in members]
