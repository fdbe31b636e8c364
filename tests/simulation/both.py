"""A real server and its model, given the same commands and compared after each of them.

Nothing is compared with tolerance: a command that the real server ran between two readings of the
clock is run on the model at each millisecond in between, until answer and state are the same.
"""

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from embedfarm.contract.broker import closing_client, connect
from tests.simulation.server import ModelServer, Wait
from tests.simulation.server.keyspace import Keyspace
from tests.support import LiveServer, force_log, wait_until

# All that a server holds, at one moment: its clock, and for each key type, expiry and content.
DUMP: Final = b"""
local readers = {
  string = function(key) return redis.call('GET', key) end,
  hash = function(key) return redis.call('HGETALL', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
  stream = function(key) return redis.call('XINFO', 'STREAM', key, 'FULL', 'COUNT', 0) end,
}
local time = redis.call('TIME')
local rows = {time[1] .. string.format('%06d', time[2])}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  rows[#rows + 1] = {key, kind, redis.call('PEXPIRETIME', key), readers[kind](key)}
end
return rows
"""
SHOW: Final = [b"EVAL", DUMP, b"0"]
READS_MAX: Final = 60  # of the clock, in a script
UNORDERED: Final = {b"HKEYS", b"HVALS", b"HSCAN", b"HGETALL"}
ENDS: Final = {b"EXEC", b"DISCARD"}

State: TypeAlias = dict[bytes, tuple[object, int | None]]


class BothServers:
    """A real server and its model, which are sent the same commands and must agree.

    Args:
        live: The real server; all data on it is deleted.
    """

    def __init__(self, live: LiveServer) -> None:
        self._live = live
        self.model = ModelServer()
        self._ticked = False
        self._open()
        self.fill(full=False)
        keys = cast("list[bytes]", self._client.keys())
        self._ask([b"SCRIPT", b"FLUSH"], *([b"UNLINK", key] for key in keys))

    def close(self) -> None:
        """Close the connection to the real server."""
        self._client.close()

    def client(self) -> redis.Redis:
        """Return a redis-py client whose commands go to both servers."""
        pool = ConnectionPool(connection_class=Conversation, max_connections=8)
        pool.connection_kwargs |= {"both": self, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis.from_pool(pool)

    def execute(self, words: Sequence[bytes]) -> Any:  # noqa: ANN401 # whatever they answer
        """Run a command on both servers and return their answer, or the error as a value.

        Raises:
            AssertionError: The answers or the stored data differ.
        """
        if words[0] == b"MULTI" or (self.model._transactions and words[0] not in ENDS):
            refused = None in self.model._transactions.values()  # only old ones refuse the rest too
            (answer,) = self._ask(words)
            found = attempt(self.model, words, _now_ms())
            assert refused or comparable(words, found) == comparable(words, answer), words
            return answer
        first_ms = _now_ms()
        if not self.model._transactions:
            (seconds, microseconds), answer, state = self._ask([b"TIME"], words, SHOW)
            first_ms = int(seconds) * 1000 + int(microseconds) // 1000
        else:
            answer, state = self._ask(words, SHOW)
        self._follow(words, answer, first_ms, *read_state(state))
        return answer

    def fill(self, *, full: bool) -> None:
        """Make the memory of both servers full, or give it room again."""
        self._ask([b"CONFIG", b"SET", b"maxmemory", b"1" if full else b"0"])
        self.model.full = full

    def restart(self) -> None:
        """Kill both servers, and start them again on their logs.

        Do nothing once a script saw the clock move on: the model's log has one time per command.
        """
        if self._ticked:
            return
        full = self.model.full
        self.fill(full=False)
        force_log(self._client)
        self._client.close()
        self._live.kill()
        self._live.start()
        self._open()
        self.model = ModelServer.replayed(self.model.log)
        self.fill(full=full)
        self.compare()

    def wake(self, sleeper: Sequence[bytes], waker: Sequence[bytes]) -> None:
        """Let a second client wait with one command, send another one, and compare the servers."""
        now_ms = _now_ms()
        wait = fork(self.model).execute(sleeper, now_ms)
        if not isinstance(wait, Wait):
            self.execute(sleeper)
            return
        with closing_client(self._live.url) as client:
            connection: Any = client.connection_pool.get_connection()
            connection.send_packed_command(connection.pack_commands([sleeper]))
            wait_until(lambda: self._blocked() == 1)
            (seconds, microseconds), answer = self._ask([b"TIME"], waker)
            now_ms = int(seconds) * 1000 + int(microseconds) // 1000
            found = attempt(self.model, waker, now_ms)
            assert comparable(waker, found) == comparable(waker, answer)
            found = self.model.execute(wait.words, now_ms)
            assert isinstance(found, Wait) == (self._blocked() == 1)
            if not isinstance(found, Wait):
                assert connection.read_response() == found
        wait_until(lambda: self._blocked() == 0)
        self.compare()

    def _blocked(self) -> int:
        (facts,) = self._ask([b"INFO", b"clients"])
        return int(facts.split(b"blocked_clients:")[1].split()[0])

    def compare(self) -> None:
        """Assert that both servers hold the same data."""
        now_ms, state = read_state(*self._ask(SHOW))
        found = self.model.dump(now_ms)
        unlike = {key for key in found.keys() | state.keys() if found.get(key) != state.get(key)}
        assert not unlike, (now_ms, {key: (found.get(key), state.get(key)) for key in unlike})

    def _open(self) -> None:
        self._client = connect(self._live.url)
        self._connection: Any = self._client.connection_pool.get_connection()

    def _ask(self, *commands: Sequence[bytes]) -> list[Any]:
        """Send commands together to the real server and return its answers."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        return [self._read() for _ in commands]

    def _read(self) -> Any:  # noqa: ANN401 # whatever it answers
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def _follow(
        self, words: Sequence[bytes], answer: object, first_ms: int, last_ms: int, state: State
    ) -> None:
        """Run a command on the model, at the moment at which the real server ran it.

        The clock may even have moved on while a script ran: Redis 7.0 does not hold it still.
        """
        wanted = comparable(words, answer), state
        before = self.model
        moments = range(first_ms, last_ms + 1)
        clocks = itertools.chain(
            ((moment, moment, 0) for moment in moments),
            (
                (one, other, read)
                for one, other in itertools.combinations(moments, 2)
                for read in range(1, READS_MAX)
            ),
        )
        for early, late, reads in clocks:
            self.model = fork(before) if first_ms < last_ms else before
            with ticking(self.model, late, reads):
                answered = comparable(words, attempt(self.model, words, early))
            found = answered, self.model.dump(last_ms)
            if found == wanted:
                self._ticked = self._ticked or bool(reads)
                return
        assert found == wanted, (words, first_ms, last_ms)


class Ticking(Keyspace):
    """A keyspace with the data of another, whose clock moves on after some number of reads."""

    def __init__(self, keys: Keyspace, late_ms: int, reads: int) -> None:
        self.__dict__.update(keys.__dict__)
        self._late_ms = late_ms
        self._reads = reads

    @property
    def now_ms(self) -> int:
        """Unix milliseconds: the early time for so many reads, then the late one."""
        self._reads -= 1
        return self._late_ms if self._reads < 0 else self._early_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self._early_ms = now_ms


@contextlib.contextmanager
def ticking(model: ModelServer, late_ms: int, reads: int) -> Iterator[None]:
    """Let the model's clock move on to `late_ms` after so many reads of it; 0 keeps it still."""
    still = model._keys
    if reads:
        model._keys = Ticking(still, late_ms, reads)
    yield
    still.changes = model._keys.changes
    model._keys = still


class Conversation:
    """A stand-in for redis-py's connection that sends each command to both servers."""

    def __init__(self, both: BothServers, retry: Retry, **_: object) -> None:
        self.both, self.retry = both, retry
        self.host, self.port, self.db, self.pid = "both", 0, 0, os.getpid()
        self._encode = redis.Redis().get_encoder().encode
        self.is_connected = True
        self._answers: list[Any] = []

    def repr_pieces(self) -> list[tuple[str, Any]]:
        """Return the parts of its `repr`: the host."""
        return [("host", self.host)]

    def should_reconnect(self) -> bool:
        """Tell redis-py never to reconnect."""
        return False

    def get_protocol(self) -> int:
        """Return 3, for RESP3."""
        return 3

    def connect(self) -> None:
        """Do nothing: both servers are always connected."""

    def re_auth(self) -> None:
        """Do nothing: there is no password."""

    def disconnect(self, *_: object, **__: object) -> None:
        """Forget the answers that nobody has read."""
        self._answers.clear()

    def pack_command(self, *words: Any) -> list[list[bytes]]:  # noqa: ANN401 # as redis-py has it
        """Return the words of a command as bytes, in a list of one command."""
        name, *rest = words
        return [[*name.encode().split(b" "), *map(self._encode, rest)]]

    def pack_commands(self, commands: Sequence[Sequence[Any]]) -> list[list[bytes]]:
        """Return the words of several commands as bytes."""
        return [packed for words in commands for packed in self.pack_command(*words)]

    def send_command(self, *words: Any, **_: object) -> None:  # noqa: ANN401 # as redis-py has it
        """Send one command, which is answered at once."""
        self.send_packed_command(self.pack_command(*words))

    def send_packed_command(self, commands: list[list[bytes]], **_: object) -> None:
        """Send commands, which are answered at once."""
        self._answers += map(self.both.execute, commands)

    def can_read(self, timeout: float = 0) -> bool:  # noqa: ARG002 # as redis-py has it
        """Tell whether an answer is there to be read."""
        return bool(self._answers)

    def read_response(self, *_: object, **__: object) -> Any:  # noqa: ANN401 # as redis-py has it
        """Return the next answer, or raise it if it is an error."""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def attempt(model: ModelServer, words: Sequence[bytes], now_ms: int) -> object:
    """Return the model's answer, or the error as a value; None for a command that would wait."""
    try:
        answer = model.execute(words, now_ms)
    except redis.ResponseError as error:
        return error
    return None if isinstance(answer, Wait) else answer


def fork(model: ModelServer) -> ModelServer:
    """Return a copy of a model, which shares no data with it."""
    twin = ModelServer()
    twin.full = model.full
    twin.log = model.log.copy()
    twin._keys = copy.deepcopy(model._keys)
    twin._scripts = model._scripts.copy()
    twin._transactions = copy.deepcopy(model._transactions)
    return twin


def comparable(words: Sequence[bytes], answer: object) -> object:
    """Return an answer without what servers may choose: messages of errors, the order of hashes."""
    if isinstance(answer, Exception):
        code = getattr(answer, "status_code", None) or str(answer).split(" ", 1)[0]
        return type(answer), code
    if words[0] in UNORDERED and isinstance(answer, list):
        return sorted(map(repr, answer))
    if words[0] == b"TIME" and isinstance(answer, list):
        return answer[0], int(answer[1]) // 1000
    if words[0] == b"EXEC" and isinstance(answer, list):
        return [comparable([b""], each) for each in answer]
    if isinstance(answer, list) and any(isinstance(row, dict) for row in answer):
        return [{k: v for k, v in row.items() if k not in LAG} for row in answer]
    return answer


LAG: Final = {b"entries-read", b"lag", b"consumers"}


def pairs(flat: Sequence[Any]) -> dict[Any, Any]:
    """Return a flat list of names and values as a dictionary."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def entry(word: bytes) -> tuple[int, int]:
    """Return an entry ID as its two numbers."""
    first, _, second = word.partition(b"-")
    return int(first), int(second)


def stream(flat: Sequence[Any]) -> object:
    """Return the answer of XINFO STREAM FULL in the form of the model's dump."""
    facts = pairs(flat)
    groups = {
        group[b"name"]: (
            entry(group[b"last-delivered-id"]),
            {entry(each): tuple(lease) for each, *lease in group[b"pending"]},
        )
        for group in map(pairs, facts[b"groups"])
    }
    entries = {entry(each): fields for each, fields in facts[b"entries"]}
    return entries, entry(facts[b"last-generated-id"]), groups


SHOWN: Final = {
    b"string": lambda value: value,
    b"hash": pairs,
    b"list": lambda value: value,
    b"zset": lambda flat: {member: float(score) for member, score in pairs(flat).items()},
    b"stream": stream,
}


def read_state(answer: Sequence[Any]) -> tuple[int, State]:
    """Return a real server's clock in ms and all its data, in the form of the model's dump."""
    clock, *rows = answer
    now_ms = int(clock) // 1000
    return now_ms, {
        key: (SHOWN[kind](value), None if expiry == -1 else expiry)
        for key, kind, expiry, value in sorted(rows)
        if expiry == -1 or now_ms <= expiry
    }
