"""Streams: entries in the order of their IDs, and the commands on them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from tests.simulation.server.keyspace import Keyspace
from tests.simulation.server.replies import (
    INTEGER_MAX,
    SYNTAX,
    WORDS_KNOWN,
    Command,
    Reply,
    Wait,
    Words,
    failure,
    integer,
    options,
)

Id: TypeAlias = tuple[int, int]

PART_MAX: Final = 2**64 - 1
LOWEST: Final = (0, 0)
HIGHEST: Final = (PART_MAX, PART_MAX)
NODE_ENTRIES: Final = 100  # what an approximate trim drops at a time
INVALID: Final = "ERR Invalid stream ID specified as stream command argument"


class Lease(NamedTuple):
    """The consumer of an unacknowledged entry, its last delivery in Unix ms, and its deliveries."""

    consumer: bytes
    delivered_ms: int
    deliveries: int


@dataclass
class Group:
    """A consumer group: the last ID that it was given, its leases and its consumers."""

    last: Id
    leases: dict[Id, Lease] = field(default_factory=dict)
    consumers: dict[bytes, None] = field(default_factory=dict)

    def ordered(self) -> list[Id]:
        """Return the IDs of the leased entries, the lowest first."""
        return sorted(self.leases)


@dataclass
class Stream:
    """A stream: its entries by ID, their IDs in order, the last ID ever given, and its groups."""

    fields: dict[Id, list[bytes]] = field(default_factory=dict)
    ids: list[Id] = field(default_factory=list)
    last: Id = LOWEST
    groups: dict[bytes, Group] = field(default_factory=dict)

    def add(self, entry: Id, fields: list[bytes]) -> None:
        """Append an entry."""
        self.fields[entry] = fields
        self.ids.append(entry)
        self.last = entry

    def remove(self, entry: Id) -> bool:
        """Remove an entry, but none of its leases; return whether it was there."""
        if self.fields.pop(entry, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry)]
        return True

    def between(self, first: Id, last: Id) -> list[Id]:
        """Return the IDs of the entries between two, both ends inclusive."""
        return self.ids[bisect_left(self.ids, first) : bisect_right(self.ids, last)]

    def after(self, entry: Id) -> list[Id]:
        """Return the IDs of the entries above one."""
        return self.ids[bisect_right(self.ids, entry) :]

    def rows(self, ids: Sequence[Id]) -> list[list[object]]:
        """Return entries in the form of replies: ID and fields."""
        return [[write(each), list(self.fields[each])] for each in ids]

    def cut(self, count: int) -> int:
        """Drop so many of the oldest entries, and return the number."""
        for each in self.ids[:count]:
            del self.fields[each]
        del self.ids[:count]
        return count


@lru_cache(WORDS_KNOWN)
def write(entry: Id) -> bytes:
    """Return an ID in the form of replies."""
    return b"%d-%d" % entry


@lru_cache(WORDS_KNOWN)
def read(word: bytes, rest: int = 0) -> Id:
    """Parse an ID; `rest` is its second part where that is left out."""
    milliseconds, dash, sequence = word.partition(b"-")
    parts = (milliseconds, sequence) if dash else (milliseconds,)
    if not all(part.isdigit() and int(part) <= PART_MAX for part in parts):
        raise failure(INVALID)
    return int(milliseconds), int(sequence) if dash else rest


def successor(entry: Id) -> Id:
    """Return the lowest ID above one."""
    return (entry[0], entry[1] + 1) if entry[1] < PART_MAX else (entry[0] + 1, 0)


def predecessor(entry: Id) -> Id:
    """Return the highest ID below one."""
    return (entry[0], entry[1] - 1) if entry[1] else (entry[0] - 1, PART_MAX)


def read_first(word: bytes) -> Id:
    """Parse the lower end of a range."""
    if word == b"-":
        return LOWEST
    if not word.startswith(b"("):
        return read(word)
    if (bound := read(word[1:])) == HIGHEST:
        raise failure("ERR invalid start ID for the interval")
    return successor(bound)


def read_last(word: bytes) -> Id:
    """Parse the upper end of a range."""
    if word == b"+":
        return HIGHEST
    if not word.startswith(b"("):
        return read(word, PART_MAX)
    if (bound := read(word[1:], PART_MAX)) == LOWEST:
        raise failure("ERR invalid end ID for the interval")
    return predecessor(bound)


def add(keys: Keyspace, words: Words) -> Reply:
    """Run XADD, with MAXLEN or without, and return the new ID."""
    place, most, exact = 2, -1, True
    if words[2].upper() == b"MAXLEN":
        exact = words[3] != b"~"
        place = 4 if words[3] in {b"~", b"="} else 3
        most = integer(words[place])
        place += 1
        if most < 0:
            raise failure("ERR The MAXLEN argument must be >= 0.")
    word, fields = words[place], list(words[place + 1 :])
    if not fields or len(fields) % 2:
        raise failure("ERR wrong number of arguments for 'xadd' command")
    given = None if word == b"*" else read(word)
    if given == LOWEST:
        raise failure("ERR The ID specified in XADD must be greater than 0-0")
    known = keys.find(words[1], Stream)
    entry = _new_id(keys.now_ms, given, known.last if known else LOWEST)
    stream = keys.make(words[1], Stream)
    stream.add(entry, fields)
    keys.changes += 1
    if most >= 0:
        _trim(stream, most, exact=exact)
    return write(entry)


def _new_id(now_ms: int, given: Id | None, last: Id) -> Id:
    if given is None:
        return (now_ms, 0) if now_ms > last[0] else successor(last)
    if given <= last:
        raise failure(
            "ERR The ID specified in XADD is equal or smaller than the target stream top item"
        )
    return given


def _trim(stream: Stream, most: int, *, exact: bool) -> int:
    """Drop the oldest entries beyond `most`; return how many were dropped."""
    surplus = max(0, len(stream.ids) - most)
    return stream.cut(surplus if exact else surplus - surplus % NODE_ENTRIES)


def trim(keys: Keyspace, words: Words) -> Reply:
    """Run XTRIM by MAXLEN or MINID, without "~"."""
    exactly = [word for word in words if word != b"="]
    if len(exactly) != 4:
        raise NotImplementedError(words)
    _, key, kind, bound = exactly
    if kind.upper() not in {b"MAXLEN", b"MINID"}:
        raise failure(SYNTAX)
    by_length = kind.upper() == b"MAXLEN"
    most = integer(bound) if by_length else 0
    lowest = LOWEST if by_length else read(bound)
    if most < 0:
        raise failure("ERR The MAXLEN argument must be >= 0.")
    stream = keys.find(key, Stream)
    if stream is None:
        return 0
    if by_length:
        count = _trim(stream, most, exact=True)
    else:
        count = stream.cut(bisect_left(stream.ids, lowest))
    keys.changes += count
    return count


def remove(keys: Keyspace, words: Words) -> Reply:
    """Run XDEL: remove entries, and return how many there were."""
    stream = keys.find(words[1], Stream)
    if stream is None:
        return 0
    entries = [read(word) for word in words[2:]]
    count = sum(stream.remove(each) for each in entries)
    keys.changes += count
    return count


def length(keys: Keyspace, words: Words) -> Reply:
    """Run XLEN: return the number of entries."""
    stream = keys.find(words[1], Stream)
    return len(stream.ids) if stream else 0


def list_range(keys: Keyspace, words: Words) -> Reply:
    """Run XRANGE or XREVRANGE: return the entries of a range."""
    backwards = words[0].upper() == b"XREVRANGE"
    low, high = (words[3], words[2]) if backwards else (words[2], words[3])
    first, last = read_first(low), read_last(high)
    count = integer(options(words, 4, {b"COUNT": 1}).get(b"COUNT", [b"%d" % INTEGER_MAX])[0])
    stream = keys.find(words[1], Stream)
    if stream is None:
        return []
    if count <= 0:
        return None
    ids = stream.between(first, last)
    return stream.rows((ids[::-1] if backwards else ids)[:count])


def reading(words: Words, first: int) -> tuple[dict[bytes, Words], Words, Words]:
    """Parse XREAD or XREADGROUP: options from word `first` on, keys, and an ID for each key."""
    place = first
    while place < len(words) and words[place].upper() != b"STREAMS":
        place += 1
    rest = words[place + 1 :]
    if not rest or len(rest) % 2:
        raise failure(
            "ERR Unbalanced 'xread' list of streams: for each stream key an ID or '$' must be "
            "specified."
        )
    chosen = options(words[:place], first, {b"COUNT": 1, b"BLOCK": 1, b"GROUP": 2})
    return chosen, rest[: len(rest) // 2], rest[len(rest) // 2 :]


def count_of(chosen: dict[bytes, Words]) -> int:
    """Return the most entries per stream that a reader wants; COUNT of 0 or less means all."""
    count = integer(chosen[b"COUNT"][0]) if b"COUNT" in chosen else 0
    return count if count > 0 else INTEGER_MAX


def waiting(words: Words, chosen: dict[bytes, Words]) -> Wait | None:
    """Return the answer of a reader that found nothing: a `Wait` if it blocks, else None."""
    if b"BLOCK" not in chosen:
        return None
    milliseconds = integer(chosen[b"BLOCK"][0], "ERR timeout is not an integer or out of range")
    if milliseconds < 0:
        raise failure("ERR timeout is negative")
    return Wait(list(words), milliseconds / 1000 or math.inf)


def read_entries(keys: Keyspace, words: Words) -> Reply:
    """Run XREAD: return the entries of streams after an ID each, or wait."""
    chosen, names, ids = reading(words, 1)
    count = count_of(chosen)
    streams = [keys.find(name, Stream) for name in names]
    after = [
        (stream.last if stream else LOWEST) if word == b"$" else read(word)
        for stream, word in zip(streams, ids, strict=True)
    ]
    answer = {
        name: stream.rows(found[:count])
        for name, stream, last in zip(names, streams, after, strict=True)
        if stream and (found := stream.after(last))
    }
    return answer or waiting([*words[: -len(ids)], *map(write, after)], chosen)


COMMANDS = {
    b"XADD": Command(add, -5, writes=True, grows=True),
    b"XTRIM": Command(trim, -4, writes=True),
    b"XDEL": Command(remove, -3, writes=True),
    b"XLEN": Command(length, 2),
    b"XRANGE": Command(list_range, -4),
    b"XREVRANGE": Command(list_range, -4),
    b"XREAD": Command(read_entries, -4),
}
