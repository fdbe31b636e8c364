"""Strategies that draw commands: mostly sensible, on a few keys, so that they meet."""

from collections.abc import Iterable
from typing import Final, TypeAlias

from hypothesis import strategies as st

Part: TypeAlias = st.SearchStrategy[bytes] | st.SearchStrategy[list[bytes]]

KEYS: Final = [b"text", b"hash", b"list", b"zset", b"stream", b"other", b"nothing"]


def key(kind: bytes) -> st.SearchStrategy[bytes]:
    """Draw a key, which usually holds a value of that type, or nothing."""
    return st.sampled_from([kind] * 12 + KEYS)


def some(part: st.SearchStrategy[bytes], most: int = 3) -> st.SearchStrategy[list[bytes]]:
    """Draw one or a few of something."""
    return st.lists(part, min_size=1, max_size=most)


def maybe(*parts: Part | bytes) -> st.SearchStrategy[list[bytes]]:
    """Draw all of the parts, or nothing."""
    return st.one_of(st.just([]), command(*parts))


def command(*parts: Part | bytes) -> st.SearchStrategy[list[bytes]]:
    """Draw a command from its parts, some of which are drawn themselves."""
    drawn = [st.just(part) if isinstance(part, bytes) else part for part in parts]
    return st.tuples(*drawn).map(_flat)


def _flat(parts: Iterable[bytes | list[bytes]]) -> list[bytes]:
    return [word for part in parts for word in ([part] if isinstance(part, bytes) else list(part))]


number = st.sampled_from([b"0", b"1", b"2", b"-1", b"5", b"-3", b"100"] * 3 + [b"x", b"", b"-0"])
count = st.sampled_from([b"1", b"2", b"10"])
word = st.sampled_from([b"", b"a", b"b", b"7", b"-2", b"\xff\x00", b"1.5"])
name = st.sampled_from([b"a", b"b", b"c"])
score = st.sampled_from([b"1", b"2.5", b"-3", b"1e3", b"1795297873.568691", b"inf"] * 3 + [b"x"])
bound = st.sampled_from([b"-inf", b"+inf", b"1", b"(1", b"2.5", b"(1e3"] * 3 + [b"x"])
milliseconds = st.sampled_from([b"1", b"3", b"20", b"100000"] * 3 + [b"0", b"-5", b"x"])
idle = st.sampled_from([b"0", b"1", b"3", b"1000"])
stream = key(b"stream")
parts = st.integers(0, 3).map(lambda n: b"%d" % n)
entry = st.one_of(
    st.tuples(parts, parts).map(b"-".join),
    st.sampled_from([b"2", b"18446744073709551615-18446744073709551615", b"x", b"1-x", b""]),
)
high = st.tuples(st.integers(1, 9), st.integers(0, 1)).map(lambda pair: b"%d-%d" % pair)
start = st.one_of(st.just(b"-"), entry, entry.map(b"(".__add__))
end = st.one_of(st.just(b"+"), entry, entry.map(b"(".__add__))
group = st.sampled_from([b"farm"] * 6 + [b"others"])
worker = st.sampled_from([b"one", b"two", b"three"])
pair = command(name, word)

COMMANDS: Final = [
    command(b"DEL", some(key(b"text"))),
    command(b"UNLINK", some(st.sampled_from(KEYS))),
    command(b"EXISTS", some(st.sampled_from(KEYS))),
    command(b"EXPIRE", st.sampled_from(KEYS), number),
    command(b"PEXPIRE", st.sampled_from(KEYS), milliseconds),
    command(b"PTTL", st.sampled_from(KEYS)),
    command(b"GET", key(b"text")),
    command(b"SET", key(b"text"), word),
    command(b"SET", key(b"text"), word, st.sampled_from([b"EX", b"PX"]), milliseconds),
    command(b"SET", key(b"text"), word, st.sampled_from([b"NX", b"XX"]), maybe(b"PX", number)),
    command(b"INCR", key(b"text")),
    command(b"HSET", key(b"hash"), pair, maybe(pair), maybe(name)),
    command(b"HSETNX", key(b"hash"), pair),
    command(b"HGET", key(b"hash"), name),
    command(b"HMGET", key(b"hash"), some(name)),
    command(b"HGETALL", key(b"hash")),
    command(b"HKEYS", key(b"hash")),
    command(b"HVALS", key(b"hash")),
    command(b"HLEN", key(b"hash")),
    command(b"HSTRLEN", key(b"hash"), name),
    command(b"HDEL", key(b"hash"), some(name)),
    command(b"HINCRBY", key(b"hash"), name, number),
    command(b"HSCAN", key(b"hash"), b"0", maybe(b"MATCH", st.sampled_from([b"a*", b"*"]))),
    command(b"LPUSH", key(b"list"), some(word)),
    command(b"RPUSH", key(b"list"), some(word)),
    command(b"LTRIM", key(b"list"), number, number),
    command(b"LRANGE", key(b"list"), number, number),
    command(b"BLPOP", some(key(b"list")), st.sampled_from([b"0.001", b"0.002", b"-1", b"x"])),
    command(b"ZADD", key(b"zset"), maybe(b"NX"), score, name, maybe(score, name), maybe(score)),
    command(b"ZREM", key(b"zset"), some(name)),
    command(b"ZCARD", key(b"zset")),
    command(b"ZSCORE", key(b"zset"), name),
    command(b"ZRANGE", key(b"zset"), number, number, maybe(b"WITHSCORES")),
    command(b"ZREVRANGE", key(b"zset"), number, number, maybe(b"WITHSCORES")),
    command(b"ZRANGEBYSCORE", key(b"zset"), bound, bound),
    command(b"ZREMRANGEBYSCORE", key(b"zset"), bound, bound),
    command(b"XADD", stream, st.one_of(st.just(b"*"), high, entry), pair, maybe(name)),
    command(b"XADD", stream, b"MAXLEN", maybe(b"="), number, b"*", pair),
    command(b"XADD", stream, b"MAXLEN", b"~", b"1000", b"*", pair),
    command(b"XLEN", stream),
    command(b"XDEL", stream, some(st.one_of(entry, high))),
    command(b"XTRIM", stream, b"MAXLEN", maybe(b"="), number),
    command(b"XTRIM", stream, b"MINID", st.one_of(entry, high)),
    command(b"XRANGE", stream, start, end, maybe(b"COUNT", number)),
    command(b"XREVRANGE", stream, end, start, maybe(b"COUNT", count)),
    command(b"XREAD", maybe(b"COUNT", number), b"STREAMS", stream, st.one_of(entry, st.just(b"$"))),
    command(b"XREAD", b"BLOCK", b"1", b"STREAMS", stream, st.just(b"other"), b"$", entry),
    command(b"XGROUP", b"CREATE", stream, group, st.one_of(entry, st.just(b"$"))),
    command(b"XGROUP", b"CREATE", stream, group, b"0", b"MKSTREAM"),
    command(b"XINFO", b"GROUPS", stream),
    command(b"XREADGROUP", b"GROUP", group, worker, b"STREAMS", stream, b">"),
    command(b"XREADGROUP", b"GROUP", group, worker, b"COUNT", count, b"STREAMS", stream, b">"),
    command(
        b"XREADGROUP", b"GROUP", group, worker, b"BLOCK", b"1",
        b"STREAMS", stream, b"other", b">", b">",
    ),
    command(b"XPENDING", stream, group),
    command(b"XPENDING", stream, group, start, end, count, maybe(worker)),
    command(b"XPENDING", stream, group, b"IDLE", idle, b"-", b"+", count, maybe(worker)),
    command(b"XCLAIM", stream, group, worker, idle, some(high), maybe(b"JUSTID")),
    command(
        b"XCLAIM", stream, group, worker, idle, high,
        b"IDLE", idle, b"RETRYCOUNT", number, maybe(b"JUSTID"),
    ),
    command(b"XACK", stream, group, some(st.one_of(high, entry))),
]  # fmt: skip

# What scripts see of replies, and what callers see of answers.
SCRIPTS: Final = [
    b"return {1, 2.9, -2.9, 'a', {'b', {}}, false, 3}",
    b"return {1, nil, 3}",
    b"return true",
    b"return false",
    b"return redis.error_reply('ERR no')",
    b"return redis.call('SET', 'text', 'a')",
    b"return {redis.call('SET', 'text', 12), redis.call('GET', 'text')}",
    b"return tostring(redis.call('SET', 'text', 'a').ok)",
    b"return {redis.call('HSET', 'hash', 'a', 1.5), redis.call('HGET', 'hash', 'a')}",
    b"return redis.call('HSET', 'hash', 'a', 2 ^ 40)",
    b"return redis.call('HGETALL', 'nothing')",
    b"return redis.call('ZSCORE', 'zset', 'a')",
    b"return redis.call('HGET', 'hash', 'a')",
    b"return redis.call('HMGET', 'hash', 'a', 'b')",
    b"return tostring(redis.call('HGET', 'hash', 'a'))",
    b"return redis.call('XREAD', 'STREAMS', 'stream', '0')",
    b"return redis.call('XRANGE', 'stream', '-', '+')",
    b"return redis.call('XINFO', 'GROUPS', 'nothing')",
    b"return redis.call('LPUSH', 'list', KEYS[1], ARGV[1], ARGV[2])",
    b"redis.call('SET', 'text', 'halfway') return redis.call('INCR', 'text')",
    b"redis.call('UNLINK', 'nothing', 'text') return redis.call('SET', 'text', '1')",
    b"redis.call('EXISTS', 'text') return redis.call('SET', 'text', '1')",
    b"#!lua flags=allow-oom\nreturn redis.call('SET', 'text', '1')",
    b"#!lua\nreturn redis.call('GET', 'text')",
    b"return {KEYS[1], ARGV[1], #KEYS, #ARGV, unpack(ARGV)}",
    b"return redis.call('HGET', 'hash', {})",
    b"return redis.call('HGET', 'hash')",
    b"return nosuch",
    b"nosuch = 1",
    b"return nil + 1",
    b"return (",
]
SCRIPTED: Final = command(b"EVAL", st.sampled_from(SCRIPTS), b"1", name, maybe(some(word)))

# Commands that find nothing, and commands that may end their waiting.
SLEEPERS: Final = st.one_of(
    command(b"BLPOP", b"bell", b"room", b"5"),
    command(b"XREAD", b"BLOCK", b"5000", b"STREAMS", b"quiet", b"bells", b"$", b"$"),
)
WAKERS: Final = st.one_of(
    command(b"LPUSH", st.sampled_from([b"bell", b"room", b"list"]), b"1"),
    command(b"RPUSH", b"room", b"2", b"3"),
    command(
        b"EVAL", b"redis.call('LPUSH', 'bell', '1') redis.call('LTRIM', 'bell', '0', '0')", b"0"
    ),
    command(b"XADD", st.sampled_from([b"bells", b"quiet", b"stream"]), high, b"a", b"1"),
)
