"""Entries of a job's streams, and leases on them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

DIGITS_MAX: Final = 15


class Entry(NamedTuple):
    """A leased stream entry: its stream and ID, its block as bytes, and the fields beside it.

    A field that another program has left out is b"" or 1.

    Attributes:
        start: Index of the first chunk of a piece of a failed block; -1 where nothing is noted.
        attempts: How often the block was tried that the entry is a piece of.
        generation: Generation of the job for which the entry was pushed.
    """

    stream: str
    id: str
    data: bytes
    chunks: int
    tokens: int
    start: int = -1
    attempts: int = 0
    generation: str = ""


class Pending(NamedTuple):
    """A lease as the server sees it."""

    stream: str
    id: str
    worker: str
    idle_ms: int
    deliveries: int


def read_entries(stream: str, items: Iterable[Any]) -> list[Entry]:
    """Return the entries with a payload; an entry deleted while pending has none and is no work."""
    return [
        Entry(
            stream,
            identifier.decode(),
            fields.get(b"block", b""),
            read_number(fields.get(b"count"), 1),
            read_number(fields.get(b"tokens"), 1),
            read_number(fields.get(b"start"), -1),
            read_number(fields.get(b"attempts"), 0),
            fields.get(b"generation", b"").decode(errors="replace"),
        )
        for identifier, fields in items
        if fields
    ]


def read_pending(stream: str, rows: Iterable[Mapping[str, Any]]) -> list[Pending]:
    """Return the leases in an answer of redis-py to XPENDING."""
    return [
        Pending(
            stream,
            row["message_id"].decode(),
            row["consumer"].decode(),
            row["time_since_delivered"],
            row["times_delivered"],
        )
        for row in rows
    ]


def read_number(value: bytes | None, absent: int) -> int:
    """Return a number beside a record; `absent` where there is none that scripts could count."""
    return int(value) if value and value.isdigit() and len(value) <= DIGITS_MAX else absent
