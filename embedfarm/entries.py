"""Entries of a job's streams, and leases on them."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

DIGITS_MAX: Final = 15


class Entry(NamedTuple):
    """A leased stream entry: where it is pending, what it holds, and what is noted beside that.

    What another program has left out is b"" or 1.

    Attributes:
        start: First chunk of a piece of a block that failed; -1 where nothing is noted.
        attempts: Tries of the block that it is a piece of.
    """

    stream: str
    id: str
    data: bytes
    chunks: int
    tokens: int
    start: int = -1
    attempts: int = 0


class Pending(NamedTuple):
    """A lease as the server sees it."""

    stream: str
    id: str
    worker: str
    idle_ms: int
    deliveries: int


def read_entries(stream: str, items: Iterable[Any]) -> list[Entry]:
    """Entries with a payload; one deleted while pending has none and is nobody's work any more."""
    return [
        Entry(
            stream,
            identifier.decode(),
            fields.get(b"block", b""),
            read_number(fields.get(b"count"), 1),
            read_number(fields.get(b"tokens"), 1),
            read_number(fields.get(b"start"), -1),
            read_number(fields.get(b"attempts"), 0),
        )
        for identifier, fields in items
        if fields
    ]


def read_number(value: bytes | None, absent: int) -> int:
    """A number beside a record; `absent` where there is none that the scripts could count."""
    return int(value) if value and value.isdigit() and len(value) <= DIGITS_MAX else absent
