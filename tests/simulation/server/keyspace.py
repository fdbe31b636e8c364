"""Keys, what lies under them, and when they expire."""

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
    """All data of a server.

    Attributes:
        now_ms: The time of the command that runs; whoever runs one sets it.
        changes: Grows with every change.
        full: Whether the server's memory is.
    """

    def __init__(self) -> None:
        self.now_ms = 0
        self.changes = 0
        self.full = False
        self._values: dict[bytes, object] = {}
        self._expiries: dict[bytes, int] = {}

    def keys(self) -> list[bytes]:
        """All keys that have not expired."""
        return [key for key in list(self._values) if self.get(key) is not None]

    def get(self, key: bytes) -> object | None:
        """What lies under a key, whatever it is."""
        if key in self._expiries and self.now_ms > self._expiries[key]:
            del self._values[key], self._expiries[key]
        return self._values.get(key)

    def find(self, key: bytes, kind: type[T]) -> T | None:
        """What lies under a key, if it is of that kind.

        Raises:
            redis.ResponseError: It is of another.
        """
        value = self.get(key) if key in self._expiries else self._values.get(key)
        if value is None or type(value) is kind:
            return value
        raise failure(WRONG_TYPE)

    def make(self, key: bytes, kind: type[T]) -> T:
        """As `find`, but it makes what is missing."""
        value = self.find(key, kind)
        if value is None:
            value = kind()
            self._values[key] = value
        return value

    def put(self, key: bytes, value: object) -> None:
        """Put something under a key, for ever."""
        self._values[key] = value
        self._expiries.pop(key, None)
        self.changes += 1

    def drop(self, key: bytes) -> bool:
        """Remove a key; whether it was there."""
        if self.get(key) is None:
            return False
        del self._values[key]
        self._expiries.pop(key, None)
        self.changes += 1
        return True

    def expire(self, key: bytes, at_ms: int) -> None:
        """Have a key expire once `at_ms` is over."""
        if at_ms <= self.now_ms:
            self.drop(key)
            return
        self._expiries[key] = at_ms
        self.changes += 1

    def expiry(self, key: bytes) -> int | None:
        """Unix ms at which a key expires, None for never."""
        return self._expiries.get(key)


def delete(keys: Keyspace, words: Words) -> Reply:
    """DEL and UNLINK."""
    return sum(keys.drop(key) for key in words[1:])


def exists(keys: Keyspace, words: Words) -> Reply:
    """EXISTS."""
    return sum(keys.get(key) is not None for key in words[1:])


def expire(keys: Keyspace, words: Words) -> Reply:
    """EXPIRE and PEXPIRE, without options."""
    if len(words) > 3:
        raise NotImplementedError(words)
    unit = 1 if words[0].upper() == b"PEXPIRE" else 1000
    life = unit * integer(words[2])
    if keys.get(words[1]) is None:
        return 0
    keys.expire(words[1], keys.now_ms + life)
    return 1


def time_to_live(keys: Keyspace, words: Words) -> Reply:
    """PTTL."""
    if keys.get(words[1]) is None:
        return -2
    expiry = keys.expiry(words[1])
    return -1 if expiry is None else expiry - keys.now_ms


def tell_time(keys: Keyspace, _: Words) -> Reply:
    """TIME."""
    return [b"%d" % (keys.now_ms // 1000), b"%d" % (keys.now_ms % 1000 * 1000)]


def get(keys: Keyspace, words: Words) -> Reply:
    """GET."""
    return keys.find(words[1], bytes)


def put(keys: Keyspace, words: Words) -> Status | None:
    """SET with EX, PX, NX, XX."""
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
    """INCR; it keeps the time to live."""
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
