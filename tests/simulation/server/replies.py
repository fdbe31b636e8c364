"""Parts of commands and replies: words, numbers, options, errors."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import redis
from redis._parsers.base import BaseParser

INTEGER_MIN: Final = -(2**63)
WORDS_KNOWN: Final = 4096  # so many numbers and IDs are not parsed again
INTEGER_MAX: Final = 2**63 - 1
WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"
NO_INTEGER: Final = "ERR value is not an integer or out of range"
SYNTAX: Final = "ERR syntax error"

Words: TypeAlias = Sequence[bytes]
Reply: TypeAlias = Any  # what redis-py's parser gives: bytes, int, float, None, list, dict


class Status(bytes):
    """A reply such as OK, which scripts see as a table and not as data."""


OK: Final = Status(b"OK")


class Wait(NamedTuple):
    """A command that found nothing and waits.

    Attributes:
        words: The command to be executed again after a write; "$" has become an ID.
        seconds: Seconds until it gives up, and its answer is None.
    """

    words: list[bytes]
    seconds: float


class Command(NamedTuple):
    """The function of a command, and what is checked before it is run.

    Attributes:
        run: Takes the data that it works on, and the words of the command with its name.
        length: Number of its words, with its name; negative when that is the least.
        writes: Whether it may change something.
        grows: Whether it is refused when the server's memory is full.
    """

    run: Callable[[Any, Words], Reply]
    length: int
    writes: bool = False
    grows: bool = False


def failure(message: str) -> redis.ResponseError:
    """Return the exception that redis-py makes of an error reply, with the reply as a note."""
    error = BaseParser.parse_error(message)
    assert isinstance(error, redis.ResponseError)
    error.add_note(message)
    return error


@lru_cache(WORDS_KNOWN)
def integer(word: bytes, complaint: str = NO_INTEGER) -> int:
    """Return a 64-bit integer; like the server, refuse forms such as "-0", "+1" or " 1"."""
    try:
        number = int(word)
    except ValueError:
        raise failure(complaint) from None
    if b"%d" % number != word or not INTEGER_MIN <= number <= INTEGER_MAX:
        raise failure(complaint)
    return number


def score(word: bytes, complaint: str = "ERR value is not a valid float") -> float:
    """Return a word as a floating-point number, or raise the server's error."""
    try:
        return float(word)
    except ValueError:
        raise failure(complaint) from None


def span(first: int, last: int, length: int) -> slice:
    """Return the slice of a range: both ends are inclusive, negative ones count from the end."""
    first = max(0, first + length if first < 0 else first)
    last = last + length if last < 0 else last
    return slice(first, max(first, last + 1))


def options(words: Words, first: int, counts: dict[bytes, int]) -> dict[bytes, Words]:
    """Return the options from word `first` on, each with as many values as `counts` says.

    Raises:
        NotImplementedError: An option is not in `counts`.
    """
    found: dict[bytes, Words] = {}
    place = first
    while place < len(words):
        name = words[place].upper()
        if name not in counts:
            raise NotImplementedError(f"option {name!r} of {words[0]!r}")
        place += 1
        found[name] = words[place : place + counts[name]]
        if len(found[name]) < counts[name]:
            raise failure(SYNTAX)
        place += counts[name]
    return found
