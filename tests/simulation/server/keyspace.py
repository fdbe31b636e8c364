"""Keys, their values, and when they expire."""

from typing import TypeVar

from tests.simulation.server.replies import (
    OK,
    SYNTAX,
    WRONG_TYPE,
    Command,
    Reply,
    Status,
    Words,
    failure,
    integer,
    options,
)

T = TypeVar("T")


class Keyspace:
    """The data of a server, by key.

    Attributes:
        now_ms: Unix ms of the command that runs; its caller sets it.
        changes: A counter that grows with every change.
        full: Whether the server's memory is full.
    """

    def __init__(self) -> None:
        self.now_ms = 0
        self.changes = 0
        self.full = False
        self._values: dict[bytes, object] = {}
        self._expiries: dict[bytes, int] = {}

    def keys(self) -> list[bytes]:
        """Return all keys that have not expired."""
        return [key for key in list(self._values) if self.get(key) is not None]

    def get(self, key: bytes) -> object | None:
        """Return the value of a key, whatever its type; None if there is none."""
        if key in self._expiries and self.now_ms > self._expiries[key]:
            del self._values[key], self._expiries[key]
        return self._values.get(key)

    def find(self, key: bytes, kind: type[T]) -> T | None:
        """Return the value of a key, if it is of a type; None if there is none.

        Raises:
            redis.ResponseError: The value is of another type.
        """
        value = self.get(key) if key in self._expiries else self._values.get(key)
        if value is None or type(value) is kind:
            return value
        raise failure(WRONG_TYPE)

    def make(self, key: bytes, kind: type[T]) -> T:
        """Return the value of a key like `find`, but make an empty one if there is none."""
        value = self.find(key, kind)
        if value is None:
            value = kind()
            self._values[key] = value
        return value

    def put(self, key: bytes, value: object) -> None:
        """Set the value of a key, without expiry."""
        self._values[key] = value
        self._expiries.pop(key, None)
        self.changes += 1

    def drop(self, key: bytes) -> bool:
        """Remove a key; return whether it was there."""
        if self.get(key) is None:
            return False
        del self._values[key]
        self._expiries.pop(key, None)
        self.changes += 1
        return True

    def expire(self, key: bytes, at_ms: int) -> None:
        """Let a key expire once `at_ms` is over."""
        if at_ms <= self.now_ms:
            self.drop(key)
            return
        self._expiries[key] = at_ms
        self.changes += 1

    def expiry(self, key: bytes) -> int | None:
        """Return the Unix ms at which a key expires, None for never."""
        return self._expiries.get(key)


def delete(keys: Keyspace, words: Words) -> Reply:
    """Run DEL or UNLINK: remove keys, and return how many there were."""
    return sum(keys.drop(key) for key in words[1:])


def exists(keys: Keyspace, words: Words) -> Reply:
    """Run EXISTS: return how many of the keys exist."""
    return sum(keys.get(key) is not None for key in words[1:])


def expire(keys: Keyspace, words: Words) -> Reply:
    """Run EXPIRE or PEXPIRE, without options."""
    if len(words) > 3:
        raise NotImplementedError(words)
    unit = 1 if words[0].upper() == b"PEXPIRE" else 1000
    life = unit * integer(words[2])
    if keys.get(words[1]) is None:
        return 0
    keys.expire(words[1], keys.now_ms + life)
    return 1


def time_to_live(keys: Keyspace, words: Words) -> Reply:
    """Run PTTL: return the milliseconds until a key expires, -1 for never, -2 without the key."""
    if keys.get(words[1]) is None:
        return -2
    expiry = keys.expiry(words[1])
    return -1 if expiry is None else expiry - keys.now_ms


def tell_time(keys: Keyspace, _: Words) -> Reply:
    """Run TIME: return seconds and microseconds."""
    return [b"%d" % (keys.now_ms // 1000), b"%d" % (keys.now_ms % 1000 * 1000)]


def get(keys: Keyspace, words: Words) -> Reply:
    """Run GET: return the value of a string."""
    return keys.find(words[1], bytes)


def put(keys: Keyspace, words: Words) -> Status | None:
    """Run SET with EX, PX, NX, XX."""
    chosen = options(words, 3, {b"EX": 1, b"PX": 1, b"NX": 0, b"XX": 0})
    if {b"EX", b"PX"} <= chosen.keys() or {b"NX", b"XX"} <= chosen.keys():
        raise failure(SYNTAX)
    lives = [
        integer(chosen[name][0]) * unit
        for name, unit in ((b"EX", 1000), (b"PX", 1))
        if name in chosen
    ]
    if lives and lives[0] <= 0:
        raise failure("ERR invalid expire time in 'set' command")
    known = keys.get(words[1]) is not None
    if (b"NX" in chosen and known) or (b"XX" in chosen and not known):
        return None
    keys.put(words[1], words[2])
    if lives:
        keys.expire(words[1], keys.now_ms + lives[0])
    return OK


def increment(keys: Keyspace, words: Words) -> Reply:
    """Run INCR, which keeps the time to live, and return the new number."""
    number = integer(b"0" if (value := keys.find(words[1], bytes)) is None else value) + 1
    expiry = keys.expiry(words[1])
    keys.put(words[1], b"%d" % number)
    if expiry is not None:
        keys.expire(words[1], expiry)
    return number


COMMANDS = {
    b"DEL": Command(delete, -2, writes=True),
    b"UNLINK": Command(delete, -2, writes=True),
    b"EXISTS": Command(exists, -2),
    b"EXPIRE": Command(expire, -3, writes=True),
    b"PEXPIRE": Command(expire, -3, writes=True),
    b"PTTL": Command(time_to_live, 2),
    b"TIME": Command(tell_time, 1),
    b"GET": Command(get, 2),
    b"SET": Command(put, -3, writes=True, grows=True),
    b"INCR": Command(increment, 2, writes=True, grows=True),
}
