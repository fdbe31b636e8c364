"""Commands on hashes, lists and sorted sets; the key of an empty one is removed."""

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
    """A hash: fields and values, in the order in which they were set."""


class List(list[bytes]):
    """A list of items, the leftmost first."""


class SortedSet(dict[bytes, float]):
    """A sorted set: members and their scores."""

    def ordered(self) -> list[tuple[float, bytes]]:
        """Return the scores and members, the lowest first."""
        return sorted((score, member) for member, score in self.items())


def _shrink(keys: Keyspace, key: bytes, value: Hash | List | SortedSet, count: int) -> int:
    """Note that `count` items were taken out of a value, and drop its key if it is empty."""
    keys.changes += count
    if not value:
        keys.drop(key)
    return count


# Hashes.


def hash_set(keys: Keyspace, words: Words) -> Reply:
    """Run HSET: set fields, and return how many are new."""
    if len(words) % 2:
        raise failure("ERR wrong number of arguments for 'hset' command")
    fields = keys.make(words[1], Hash)
    known = len(fields)
    fields.update(zip(words[2::2], words[3::2], strict=True))
    keys.changes += 1
    return len(fields) - known


def hash_set_first(keys: Keyspace, words: Words) -> Reply:
    """Run HSETNX: set a field unless it exists, and return 1 if it was set."""
    fields = keys.make(words[1], Hash)
    if words[2] in fields:
        return 0
    fields[words[2]] = words[3]
    keys.changes += 1
    return 1


def hash_get(keys: Keyspace, words: Words) -> Reply:
    """Run HGET: return the value of a field."""
    fields = keys.find(words[1], Hash)
    return None if fields is None else fields.get(words[2])


def hash_get_some(keys: Keyspace, words: Words) -> Reply:
    """Run HMGET: return the values of some fields."""
    fields = keys.find(words[1], Hash) or Hash()
    return [fields.get(name) for name in words[2:]]


def hash_get_all(keys: Keyspace, words: Words) -> Reply:
    """Run HGETALL: return all fields and values."""
    return dict(keys.find(words[1], Hash) or Hash())


def hash_names(keys: Keyspace, words: Words) -> Reply:
    """Run HKEYS: return the names of all fields."""
    return list(keys.find(words[1], Hash) or Hash())


def hash_values(keys: Keyspace, words: Words) -> Reply:
    """Run HVALS: return the values of all fields."""
    return list((keys.find(words[1], Hash) or Hash()).values())


def hash_length(keys: Keyspace, words: Words) -> Reply:
    """Run HLEN: return the number of fields."""
    return len(keys.find(words[1], Hash) or Hash())


def hash_value_length(keys: Keyspace, words: Words) -> Reply:
    """Run HSTRLEN: return the length of a field's value."""
    return len((keys.find(words[1], Hash) or Hash()).get(words[2], b""))


def hash_delete(keys: Keyspace, words: Words) -> Reply:
    """Run HDEL: delete fields, and return how many there were."""
    fields = keys.find(words[1], Hash)
    if fields is None:
        return 0
    gone = [name for name in dict.fromkeys(words[2:]) if fields.pop(name, None) is not None]
    return _shrink(keys, words[1], fields, len(gone))


def hash_add(keys: Keyspace, words: Words) -> Reply:
    """Run HINCRBY: add to a field's integer, and return the sum."""
    grown = integer(words[3])
    known = keys.find(words[1], Hash) or Hash()
    number = integer(known.get(words[2], b"0"), "ERR hash value is not an integer") + grown
    keys.make(words[1], Hash)[words[2]] = b"%d" % number
    keys.changes += 1
    return number


def hash_scan(keys: Keyspace, words: Words) -> Reply:
    """Run HSCAN, which returns all fields at once."""
    chosen = options(words, 3, {b"MATCH": 1, b"COUNT": 1})
    pattern = chosen.get(b"MATCH", [b"*"])[0]
    fields = keys.find(words[1], Hash) or Hash()
    found = [pair for pair in fields.items() if fnmatch.fnmatchcase(pair[0], pattern)]
    return [b"0", [word for pair in found for word in pair]]


# Lists.


def list_push(keys: Keyspace, words: Words) -> Reply:
    """Run LPUSH or RPUSH: add items at an end, and return the list's length."""
    items = keys.make(words[1], List)
    if words[0].upper() == b"LPUSH":
        items[:0] = words[:1:-1]
    else:
        items += words[2:]
    keys.changes += 1
    return len(items)


def list_trim(keys: Keyspace, words: Words) -> Reply:
    """Run LTRIM: keep the items of a range only."""
    first, last = integer(words[2]), integer(words[3])
    items = keys.find(words[1], List)
    if items is not None:
        known = len(items)
        items[:] = items[span(first, last, known)]
        _shrink(keys, words[1], items, known - len(items))
    return OK


def list_range(keys: Keyspace, words: Words) -> Reply:
    """Run LRANGE: return the items of a range."""
    first, last = integer(words[2]), integer(words[3])
    items = keys.find(words[1], List) or List()
    return list(items[span(first, last, len(items))])


def list_pop_waiting(keys: Keyspace, words: Words) -> Reply:
    """Run BLPOP: pop the first item of the first list that has one, or wait."""
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
    """Run ZADD, with NX or without, and return how many members are new."""
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
    """Run ZREM: remove members, and return how many there were."""
    members = keys.find(words[1], SortedSet)
    if members is None:
        return 0
    gone = [each for each in dict.fromkeys(words[2:]) if members.pop(each, None) is not None]
    return _shrink(keys, words[1], members, len(gone))


def set_count(keys: Keyspace, words: Words) -> Reply:
    """Run ZCARD: return the number of members."""
    return len(keys.find(words[1], SortedSet) or ())


def set_score(keys: Keyspace, words: Words) -> Reply:
    """Run ZSCORE: return the score of a member."""
    members = keys.find(words[1], SortedSet)
    return None if members is None else members.get(words[2])


def set_range(keys: Keyspace, words: Words) -> Reply:
    """Run ZRANGE or ZREVRANGE: return the members of a range of ranks."""
    chosen = options(words, 4, {b"WITHSCORES": 0})
    first, last = integer(words[2]), integer(words[3])
    rows = (keys.find(words[1], SortedSet) or SortedSet()).ordered()
    if words[0].upper() == b"ZREVRANGE":
        rows.reverse()
    rows = rows[span(first, last, len(rows))]
    if b"WITHSCORES" in chosen:
        return [[member, number] for number, member in rows]
    return [member for _, member in rows]


def _between(keys: Keyspace, words: Words) -> list[bytes]:
    """Return members by two bounds of their score; a bound that begins with "(" is excluded."""
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
    """Run ZRANGEBYSCORE: return the members between two scores."""
    options(words, 4, {})
    return _between(keys, words)


def set_remove_by_score(keys: Keyspace, words: Words) -> Reply:
    """Run ZREMRANGEBYSCORE: remove the members between two scores."""
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
