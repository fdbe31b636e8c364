"""Consumer groups: which consumer has which entry, since when, and after how many deliveries."""

from collections import Counter

from tests.simulation.server.keyspace import Keyspace
from tests.simulation.server.replies import (
    OK,
    SYNTAX,
    Command,
    Reply,
    Words,
    failure,
    integer,
    options,
)
from tests.simulation.server.streams import (
    LOWEST,
    Group,
    Id,
    Lease,
    Stream,
    count_of,
    read,
    read_first,
    read_last,
    reading,
    waiting,
    write,
)


def _group(keys: Keyspace, key: bytes, name: bytes, suffix: str = "") -> tuple[Stream, Group]:
    """Return a stream and its group.

    Raises:
        redis.ResponseError: There is no such stream or group (NOGROUP).
    """
    stream = keys.find(key, Stream)
    if stream is None or name not in stream.groups:
        words = f"{key.decode(errors='replace')}' or consumer group '{name.decode()}'"
        raise failure(f"NOGROUP No such key '{words}{suffix}")
    return stream, stream.groups[name]


def create(keys: Keyspace, words: Words) -> Reply:
    """Run XGROUP CREATE, with MKSTREAM or without."""
    if words[1].upper() != b"CREATE":
        raise NotImplementedError(words)
    chosen = options(words, 5, {b"MKSTREAM": 0})
    _, _, key, name, word = words[:5]
    stream = keys.find(key, Stream)
    if stream is None and b"MKSTREAM" not in chosen:
        raise failure(
            "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may "
            "want to use the MKSTREAM option to create an empty stream automatically."
        )
    last = (stream.last if stream else LOWEST) if word == b"$" else read(word)
    if stream and name in stream.groups:
        raise failure("BUSYGROUP Consumer Group name already exists")
    keys.make(key, Stream).groups[name] = Group(last)
    keys.changes += 1
    return OK


def describe(keys: Keyspace, words: Words) -> Reply:
    """Run XINFO GROUPS, without what it says about lag, which is wrong after XDEL."""
    if words[1].upper() != b"GROUPS":
        raise NotImplementedError(words)
    stream = keys.find(words[2], Stream)
    if stream is None:
        raise failure("ERR no such key")
    return [
        {
            b"name": name,
            b"consumers": len(group.consumers),
            b"pending": len(group.leases),
            b"last-delivered-id": write(group.last),
        }
        for name, group in sorted(stream.groups.items())
    ]


def read_new(keys: Keyspace, words: Words) -> Reply:
    """Run XREADGROUP for new entries; one stream without the group fails them all."""
    chosen, names, ids = reading(words, 1)
    if b"GROUP" not in chosen or any(word != b">" for word in ids):
        raise NotImplementedError(words)
    name, consumer = chosen[b"GROUP"]
    count = count_of(chosen)
    suffix = " in XREADGROUP with GROUP option"
    groups = [_group(keys, key, name, suffix) for key in names]
    answer = {}
    for key, (stream, group) in zip(names, groups, strict=True):
        if consumer not in group.consumers:
            group.consumers[consumer] = None
            keys.changes += 1
        found = stream.after(group.last)[:count]
        if found:
            group.last = found[-1]
            group.leases |= {each: Lease(consumer, keys.now_ms, 1) for each in found}
            keys.changes += 1
            answer[key] = stream.rows(found)
    return answer or waiting(words, chosen)


def pending(keys: Keyspace, words: Words) -> Reply:
    """Run XPENDING, in both forms."""
    if len(words) == 3:
        return _summary(_group(keys, words[1], words[2])[1])
    idle = integer(words[4]) if words[3].upper() == b"IDLE" else 0
    rest = words[5:] if words[3].upper() == b"IDLE" else words[3:]
    if len(rest) not in {3, 4}:
        raise failure(SYNTAX)
    first, last, count = read_first(rest[0]), read_last(rest[1]), integer(rest[2])
    _, group = _group(keys, words[1], words[2])
    ids = [first] if first == last else [each for each in group.ordered() if first <= each <= last]
    rows = [
        [write(each), lease.consumer, max(0, keys.now_ms - lease.delivered_ms), lease.deliveries]
        for each in ids
        if (lease := group.leases.get(each))
        and (not idle or keys.now_ms - lease.delivered_ms >= idle)
        and (len(rest) == 3 or lease.consumer == rest[3])
    ]
    return rows[: max(0, count)]


def _summary(group: Group) -> Reply:
    if not group.leases:
        return [0, None, None, None]
    ids = group.ordered()
    counts = Counter(lease.consumer for lease in group.leases.values())
    rows = [[name, b"%d" % count] for name, count in sorted(counts.items())]
    return [len(ids), write(ids[0]), write(ids[-1]), rows]


def claim(keys: Keyspace, words: Words) -> Reply:
    """Run XCLAIM with IDLE, RETRYCOUNT, JUSTID; a lease of a deleted entry is dropped."""
    stream, group = _group(keys, words[1], words[2])
    consumer = words[3]
    least = max(0, integer(words[4], "ERR Invalid min-idle-time argument for XCLAIM"))
    place = 5
    ids: list[Id] = []
    while place < len(words) and words[place][:1].isdigit():
        ids.append(read(words[place]))
        place += 1
    chosen = options(words, place, {b"IDLE": 1, b"RETRYCOUNT": 1, b"JUSTID": 0})
    idle = max(0, integer(chosen.get(b"IDLE", [b"0"])[0]))
    count = integer(chosen.get(b"RETRYCOUNT", [b"-1"])[0])
    claimed = []
    for each in ids:
        lease = group.leases.get(each)
        if lease is None:
            continue
        if each not in stream.fields:
            del group.leases[each]
            keys.changes += 1
        elif not least or keys.now_ms - lease.delivered_ms >= least:
            more = b"JUSTID" not in chosen
            deliveries = count if count >= 0 else lease.deliveries + more
            group.leases[each] = Lease(consumer, keys.now_ms - idle, deliveries)
            group.consumers[consumer] = None
            keys.changes += 1
            claimed.append(each)
    return list(map(write, claimed)) if b"JUSTID" in chosen else stream.rows(claimed)


def acknowledge(keys: Keyspace, words: Words) -> Reply:
    """Run XACK: drop the leases of entries, and return how many there were."""
    stream = keys.find(words[1], Stream)
    group = stream.groups.get(words[2]) if stream else None
    if group is None:
        return 0
    entries = [read(word) for word in words[3:]]
    count = sum(group.leases.pop(each, None) is not None for each in entries)
    keys.changes += count
    return count


COMMANDS = {
    b"XGROUP": Command(create, -2, writes=True, grows=True),
    b"XINFO": Command(describe, -2),
    b"XREADGROUP": Command(read_new, -7, writes=True),
    b"XPENDING": Command(pending, -3),
    b"XCLAIM": Command(claim, -6, writes=True),
    b"XACK": Command(acknowledge, -4, writes=True),
}
