"""Hashes, lists and sorted sets. One that is empty is no more: its key is gone."""

import fnmatch
import math

from tests.simulation.server.keyspace import Keyspace
from tests.simulation.server.replies import (
    OK,
    SYNTAX,
    Command,
    Reply,
    Wait,
    Words,
    failure,
    integer,
    options,
    score,
    span,
)


class Hash(dict[bytes, bytes]):
    """Fields and values, in the order in which they came."""


class List(list[bytes]):
    """Items, the left one first."""


class SortedSet(dict[bytes, float]):
    """Members and scores."""

    def ordered(self) -> list[tuple[float, bytes]]:
        """Scores and members, the lowest first."""
        return sorted((score, member) for member, score in self.items())


def _shrink(keys: Keyspace, key: bytes, value: Hash | List | SortedSet, count: int) -> int:
    """Note that `count` things were taken out of a value."""
    keys.changes += count
    if not value:
        keys.drop(key)
    return count


# Hashes.


def hash_set(keys: Keyspace, words: Words) -> Reply:
    """HSET."""
    if len(words) % 2:
        raise failure("ERR wrong number of arguments for 'hset' command")
    fields = keys.make(words[1], Hash)
    known = len(fields)
    fields.update(zip(words[2::2], words[3::2], strict=True))
    keys.changes += 1
    return len(fields) - known


def hash_set_first(keys: Keyspace, words: Words) -> Reply:
    """HSETNX."""
    fields = keys.make(words[1], Hash)
    if words[2] in fields:
        return 0
    fields[words[2]] = words[3]
    keys.changes += 1
    return 1


def hash_get(keys: Keyspace, words: Words) -> Reply:
    """HGET."""
    fields = keys.find(words[1], Hash)
    return None if fields is None else fields.get(words[2])


def hash_get_some(keys: Keyspace, words: Words) -> Reply:
    """HMGET."""
    fields = keys.find(words[1], Hash) or Hash()
    return [fields.get(name) for name in words[2:]]


def hash_get_all(keys: Keyspace, words: Words) -> Reply:
    """HGETALL."""
    return dict(keys.find(words[1], Hash) or Hash())


def hash_names(keys: Keyspace, words: Words) -> Reply:
    """HKEYS."""
    return list(keys.find(words[1], Hash) or Hash())


def hash_values(keys: Keyspace, words: Words) -> Reply:
    """HVALS."""
    return list((keys.find(words[1], Hash) or Hash()).values())


def hash_length(keys: Keyspace, words: Words) -> Reply:
    """HLEN."""
    return len(keys.find(words[1], Hash) or Hash())


def hash_value_length(keys: Keyspace, words: Words) -> Reply:
    """HSTRLEN."""
    return len((keys.find(words[1], Hash) or Hash()).get(words[2], b""))


def hash_delete(keys: Keyspace, words: Words) -> Reply:
    """HDEL."""
    fields = keys.find(words[1], Hash)
    if fields is None:
        return 0
    gone = [name for name in dict.fromkeys(words[2:]) if fields.pop(name, None) is not None]
    return _shrink(keys, words[1], fields, len(gone))


def hash_add(keys: Keyspace, words: Words) -> Reply:
    """HINCRBY."""
    grown = integer(words[3])
    known = keys.find(words[1], Hash) or Hash()
    number = integer(known.get(words[2], b"0"), "ERR hash value is not an integer") + grown
    keys.make(words[1], Hash)[words[2]] = b"%d" % number
    keys.changes += 1
    return number


def hash_scan(keys: Keyspace, words: Words) -> Reply:
    """HSCAN, which finds everything at once."""
    chosen = options(words, 3, {b"MATCH": 1, b"COUNT": 1})
    pattern = chosen.get(b"MATCH", [b"*"])[0]
    fields = keys.find(words[1], Hash) or Hash()
    found = [pair for pair in fields.items() if fnmatch.fnmatchcase(pair[0], pattern)]
    return [b"0", [word for pair in found for word in pair]]


# Lists.


def list_push(keys: Keyspace, words: Words) -> Reply:
    """LPUSH and RPUSH."""
    items = keys.make(words[1], List)
    if words[0].upper() == b"LPUSH":
        items[:0] = words[:1:-1]
    else:
        items += words[2:]
    keys.changes += 1
    return len(items)


def list_trim(keys: Keyspace, words: Words) -> Reply:
    """LTRIM."""
    first, last = integer(words[2]), integer(words[3])
    items = keys.find(words[1], List)
    if items is not None:
        known = len(items)
        items[:] = items[span(first, last, known)]
        _shrink(keys, words[1], items, known - len(items))
    return OK


def list_range(keys: Keyspace, words: Words) -> Reply:
    """LRANGE."""
    items = keys.find(words[1], List) or List()
    return list(items[span(integer(words[2]), integer(words[3]), len(items))])


def list_pop_waiting(keys: Keyspace, words: Words) -> Reply:
    """BLPOP."""
    complaint = "ERR timeout is not a float or out of range"
    seconds = score(words[-1], complaint)
    if math.isnan(seconds):
        raise failure(complaint)
    if seconds < 0:
        raise failure("ERR timeout is negative")
    for key in words[1:-1]:
        items = keys.find(key, List)
        if items is not None:
            item = items.pop(0)
            _shrink(keys, key, items, 1)
            return [key, item]
    return Wait(list(words), seconds or math.inf)


# Sorted sets.


def set_add(keys: Keyspace, words: Words) -> Reply:
    """ZADD, with NX or without; how many members are new."""
    first_only = words[2].upper() == b"NX"
    rest = words[2 + first_only :]
    if not rest or len(rest) % 2:
        raise failure(SYNTAX)
    pairs = [(member, score(word)) for word, member in zip(rest[::2], rest[1::2], strict=True)]
    members = keys.make(words[1], SortedSet)
    known = len(members)
    for member, number in pairs:
        if not (first_only and member in members):
            keys.changes += members.get(member) != number
            members[member] = number
    return len(members) - known


def set_remove(keys: Keyspace, words: Words) -> Reply:
    """ZREM."""
    members = keys.find(words[1], SortedSet)
    if members is None:
        return 0
    gone = [each for each in dict.fromkeys(words[2:]) if members.pop(each, None) is not None]
    return _shrink(keys, words[1], members, len(gone))


def set_count(keys: Keyspace, words: Words) -> Reply:
    """ZCARD."""
    return len(keys.find(words[1], SortedSet) or ())


def set_score(keys: Keyspace, words: Words) -> Reply:
    """ZSCORE."""
    members = keys.find(words[1], SortedSet)
    return None if members is None else members.get(words[2])


def set_range(keys: Keyspace, words: Words) -> Reply:
    """ZRANGE and ZREVRANGE by place."""
    chosen = options(words, 4, {b"WITHSCORES": 0})
    rows = (keys.find(words[1], SortedSet) or SortedSet()).ordered()
    if words[0].upper() == b"ZREVRANGE":
        rows.reverse()
    rows = rows[span(integer(words[2]), integer(words[3]), len(rows))]
    if b"WITHSCORES" in chosen:
        return [[member, number] for number, member in rows]
    return [member for _, member in rows]


def _between(keys: Keyspace, words: Words) -> list[bytes]:
    """Members whose score is between two bounds, those that begin with "(" excluded."""
    complaint = "ERR min or max is not a float"
    low, high = (score(word.removeprefix(b"("), complaint) for word in words[2:4])
    low_open, high_open = (word.startswith(b"(") for word in words[2:4])
    return [
        member
        for number, member in (keys.find(words[1], SortedSet) or SortedSet()).ordered()
        if (low < number if low_open else low <= number)
        and (number < high if high_open else number <= high)
    ]


def set_range_by_score(keys: Keyspace, words: Words) -> Reply:
    """ZRANGEBYSCORE."""
    options(words, 4, {})
    return _between(keys, words)


def set_remove_by_score(keys: Keyspace, words: Words) -> Reply:
    """ZREMRANGEBYSCORE."""
    return set_remove(keys, [words[0], words[1], *_between(keys, words)])


COMMANDS = {
    b"HSET": Command(hash_set, -4, writes=True, grows=True),
    b"HSETNX": Command(hash_set_first, 4, writes=True, grows=True),
    b"HGET": Command(hash_get, 3),
    b"HMGET": Command(hash_get_some, -3),
    b"HGETALL": Command(hash_get_all, 2),
    b"HKEYS": Command(hash_names, 2),
    b"HVALS": Command(hash_values, 2),
    b"HLEN": Command(hash_length, 2),
    b"HSTRLEN": Command(hash_value_length, 3),
    b"HDEL": Command(hash_delete, -3, writes=True),
    b"HINCRBY": Command(hash_add, 4, writes=True, grows=True),
    b"HSCAN": Command(hash_scan, -3),
    b"LPUSH": Command(list_push, -3, writes=True, grows=True),
    b"RPUSH": Command(list_push, -3, writes=True, grows=True),
    b"LTRIM": Command(list_trim, 4, writes=True),
    b"LRANGE": Command(list_range, 4),
    b"BLPOP": Command(list_pop_waiting, -3, writes=True),
    b"ZADD": Command(set_add, -4, writes=True, grows=True),
    b"ZREM": Command(set_remove, -3, writes=True),
    b"ZCARD": Command(set_count, 2),
    b"ZSCORE": Command(set_score, 3),
    b"ZRANGE": Command(set_range, -4),
    b"ZREVRANGE": Command(set_range, -4),
    b"ZRANGEBYSCORE": Command(set_range_by_score, -4),
    b"ZREMRANGEBYSCORE": Command(set_remove_by_score, 4, writes=True),
}
