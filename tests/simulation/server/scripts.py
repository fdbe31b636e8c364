"""Lua scripts, run as they are by a Lua of the version that the server has.

One Lua serves the whole process, and each script is compiled once, because a simulation starts a
hundred thousand servers.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import redis
from lupa import lua51

from tests.simulation.server.replies import Reply, Status, Words, failure

Call: TypeAlias = Callable[[Words], Reply]

# What a script sees. A number becomes a word as in Redis 7.0, which makes "-0" of the negative of
# 0, and then finds that to be no integer.
PRELUDE: Final = b"""
local call, try = ...
local function word(value)
  if type(value) == 'number' then return string.format('%.17g', value) end
  if type(value) == 'string' then return value end
  error('Lua redis lib command arguments must be strings or integers', 3)
end
local function sender(call)
  return function(...)
    for i = 1, select('#', ...) do
      if type((select(i, ...))) ~= 'string' then
        local words = {...}
        for j = 1, select('#', ...) do words[j] = word(words[j]) end
        return call(unpack(words))
      end
    end
    return call(...)
  end
end
-- The first of some records that follow one another: only what is not negative is known here.
local function unpack_limit(data, count)
  local at, values = 1, {}
  for i = 1, count do
    local first = string.byte(data, at)
    if first and first < 128 then
      values[i] = first
    elseif first and 204 <= first and first <= 207 then
      values[i] = 0
      for _ = 1, 2 ^ (first - 204) do
        at = at + 1
        values[i] = 256 * values[i] + string.byte(data, at)
      end
    else
      error('Bad data format in input.')
    end
    at = at + 1
  end
  return at - 1, unpack(values)
end
local seen = {
  ipairs = ipairs, math = math, pairs = pairs, select = select, string = string, table = table,
  tonumber = tonumber, tostring = tostring, type = type, unpack = unpack, pcall = pcall,
  cmsgpack = {unpack_limit = unpack_limit},
  redis = {
    call = sender(call), pcall = sender(try),
    error_reply = function(text) return {err = text} end,
  },
}
local function refuse(_, name)
  error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
end
setmetatable(seen, {__index = refuse, __newindex = refuse})
return function(source)
  local made, problem = loadstring('local KEYS, ARGV = ... ' .. source, '@user_script')
  if not made then error(problem) end
  setfenv(made, seen)
  return function(keys, ...)
    local words = {...}
    return made({unpack(words, 1, keys)}, {unpack(words, keys + 1)})
  end
end
"""

_lua: Final = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=False)
_table: Final = _lua.table
_current: list[Call] = []


class Script(NamedTuple):
    """A compiled script.

    Attributes:
        source: Its source, as it was sent.
        run: Takes the number of KEYS, and then the words of KEYS and ARGV.
        allows_full: Whether it may run though the server's memory is full.
        checks: Whether its first line declares flags, which are checked before it starts.
    """

    source: bytes
    run: Callable[..., Any]
    allows_full: bool
    checks: bool


@cache
def digest(source: bytes) -> bytes:
    """Return the SHA-1 of a script, by which EVALSHA names it."""
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


@cache
def compiled(source: bytes) -> Script:
    """Return a compiled script, ready to run on any server."""
    head, _, body = source.partition(b"\n") if source.startswith(b"#!") else (b"", b"", source)
    try:
        run = _compile(b"\n" * bool(head) + body)
    except lua51.LuaError as error:
        raise failure(f"ERR Error compiling script (new function): {error}") from None
    return Script(source, run, b"allow-oom" in head, bool(head))


def run(script: Script, keys: int, words: Words, call: Call) -> Reply:
    """Run a script, its first `keys` words as KEYS and `call` as `redis.call`; return its reply."""
    _current.append(call)
    try:
        return _from_lua(script.run(keys, *words))
    except lua51.LuaError as error:
        raise failure(f"ERR {error}") from None
    finally:
        _current.pop()


def _call(*words: bytes) -> object:
    reply = _current[-1](words)
    return reply if type(reply) is bytes or type(reply) is int else _to_lua(reply)


def _to_lua(reply: Reply) -> object:
    """Return a reply as a script sees it, in RESP2."""
    return _CONVERSIONS[type(reply)](reply)


def _map_to_lua(reply: dict[bytes, Any]) -> object:
    """Return a map as a flat list; a map of streams as a list of pairs."""
    if any(type(value) is list for value in reply.values()):
        return _to_lua([list(pair) for pair in reply.items()])
    return _to_lua([word for pair in reply.items() for word in pair])


_CONVERSIONS: Final[dict[type, Callable[[Any], object]]] = {
    bytes: lambda reply: reply,
    int: lambda reply: reply,
    float: lambda reply: b"%.17g" % reply,
    type(None): lambda _: False,
    Status: lambda reply: _lua.table_from({b"ok": bytes(reply)}),
    list: lambda reply: _table(*map(_to_lua, reply)),
    dict: _map_to_lua,
}


def _from_lua(answer: Any) -> Reply:  # noqa: ANN401 # what a Lua table is
    """Return a script's answer as its caller's reply: numbers lose their fractions."""
    if isinstance(answer, bytes):
        return answer
    if answer is None or answer is False:
        return None
    if isinstance(answer, int | float):
        return int(answer)
    if answer[b"err"] is not None:
        raise failure(answer[b"err"].decode(errors="replace"))
    if answer[b"ok"] is not None:
        return Status(answer[b"ok"])
    items: list[Reply] = []
    while (item := answer[len(items) + 1]) is not None:
        items.append(_from_lua(item))
    return items


def _try(*words: bytes) -> object:
    try:
        return _call(*words)
    except redis.ResponseError as error:
        return _lua.table_from({b"err": error.__notes__[0].encode()})


_compile: Final = _lua.execute(PRELUDE, _call, _try)
