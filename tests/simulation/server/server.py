"""The model of a server: its data, its scripts, its transactions, and its log."""

import contextlib
from collections.abc import Iterable
from typing import Final

import redis

from tests.simulation.server import collection, groups, keyspace, scripts, streams
from tests.simulation.server.keyspace import Keyspace
from tests.simulation.server.replies import (
    OK,
    Command,
    Reply,
    Status,
    Wait,
    Words,
    failure,
    integer,
)
from tests.simulation.server.streams import Stream

FULL: Final = "OOM command not allowed when used memory > 'maxmemory'."
SCRIPT_FULL: Final = (
    "OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'"
)
QUEUED: Final = Status(b"QUEUED")
DATA: Final = keyspace.COMMANDS | collection.COMMANDS | streams.COMMANDS | groups.COMMANDS


class ModelServer:
    """A server that holds its data in Python and gets the time with each command.

    Attributes:
        full: Whether its memory is full: like the real server, it refuses commands that need more.
        run_id: Id that differs for each start of the server.
        log: Unix ms and words of each command that changed something, in order. A script is one
            command, with its source; a transaction is MULTI, its commands, and EXEC.
    """

    def __init__(self) -> None:
        self.full = False
        self.run_id = "0"
        self.log: list[tuple[int, tuple[bytes, ...]]] = []
        self._keys = Keyspace()
        self._scripts: dict[bytes, scripts.Script] = {}
        self._transactions: dict[int, list[Words] | None] = {}  # None: one that will be refused

    @classmethod
    def replayed(cls, log: Iterable[tuple[int, tuple[bytes, ...]]]) -> "ModelServer":
        """Return a server that has started again on a log.

        A transaction whose end is not in the log never happened; no script is known any more.
        """
        server = cls()
        for now_ms, words in log:
            with contextlib.suppress(redis.ResponseError):  # it failed then, halfway
                server.execute(words, now_ms)
        server._scripts.clear()
        server._transactions.clear()
        return server

    def execute(self, words: Words, now_ms: int, connection: int = 0) -> Reply:
        """Execute a command, and return its reply or a `Wait`.

        Args:
            words: The words of the command.
            now_ms: Unix ms by the server's clock.
            connection: Number of the connection, whose transaction it may belong to.

        Raises:
            redis.ResponseError: The server's error, of the class that redis-py makes of it.
            NotImplementedError: The model does not know the command.
        """
        self._keys.now_ms = now_ms
        name = words[0].upper()
        if name == b"MULTI" or connection in self._transactions:
            return self._transact(name, words, connection)
        changes = self._keys.changes
        try:
            return self._run(name, words)
        finally:
            if self._keys.changes != changes:
                self.log.append((now_ms, self._logged(name, words)))

    def leave(self, connection: int) -> None:
        """Forget a connection, and the transaction that it had begun."""
        self._transactions.pop(connection, None)

    def leases(self, key: bytes) -> dict[bytes, tuple[bytes, int, int]]:
        """Return the leases of a stream by entry: consumer, Unix ms of delivery, deliveries."""
        stream = self._keys.find(key, Stream)
        groups = stream.groups.values() if stream else ()
        return {
            streams.write(entry): (lease.consumer, lease.delivered_ms, lease.deliveries)
            for group in groups
            for entry, lease in group.leases.items()
        }

    def dump(self, now_ms: int) -> dict[bytes, tuple[object, int | None]]:
        """Return all keys with their values, and the Unix ms at which they expire."""
        self._keys.now_ms = now_ms
        return {
            key: (_plain(self._keys.get(key)), self._keys.expiry(key))
            for key in sorted(self._keys.keys())
        }

    def _run(self, name: bytes, words: Words) -> Reply:
        command = DATA.get(name)
        if command is not None:
            _check_length(command, words)
            if self.full and command.grows:
                raise failure(FULL)
            return command.run(self._keys, words)
        if name not in OWN:
            raise NotImplementedError(words)
        _check_length(OWN[name], words)
        return OWN[name].run(self, words)

    def _logged(self, name: bytes, words: Words) -> tuple[bytes, ...]:
        """Return a command as it is written to the log: EVALSHA becomes EVAL."""
        if name == b"EVALSHA":
            return (b"EVAL", self._scripts[words[1].lower()].source, *words[2:])
        return tuple(words)

    # Transactions.

    def _transact(self, name: bytes, words: Words, connection: int) -> Reply:
        if name == b"MULTI":
            if connection in self._transactions:
                raise failure("ERR MULTI calls can not be nested")
            self._transactions[connection] = []
            return OK
        if name == b"EXEC":
            return self._commit(self._transactions.pop(connection))
        if name == b"DISCARD":
            del self._transactions[connection]
            return OK
        return self._queue(name, words, connection)

    def _queue(self, name: bytes, words: Words, connection: int) -> Status:
        command = DATA.get(name) or OWN.get(name)
        if command is None:
            raise NotImplementedError(words)
        try:
            _check_length(command, words)
            if self.full:
                raise failure(FULL)
        except redis.ResponseError:
            self._transactions[connection] = None
            raise
        queue = self._transactions[connection]
        if queue is not None:
            queue.append(words)
        return QUEUED

    def _commit(self, queue: list[Words] | None) -> Reply:
        if queue is None:
            raise failure("EXECABORT Transaction discarded because of previous errors.")
        changes = self._keys.changes
        replies = [self._attempt(words) for words in queue]
        if self._keys.changes != changes:
            names = [words[0].upper() for words in queue]
            logged = map(self._logged, names, queue)
            self.log += [(self._keys.now_ms, words) for words in ((b"MULTI",), *logged, (b"EXEC",))]
        return replies

    def _attempt(self, words: Words) -> Reply:
        """Return a reply within a transaction: errors are values, and nothing waits."""
        try:
            reply = self._run(words[0].upper(), words)
        except redis.ResponseError as error:
            return error
        return None if isinstance(reply, Wait) else reply

    # Scripts.

    def _script(self, words: Words) -> Reply:
        """Run SCRIPT LOAD or SCRIPT EXISTS."""
        verb, *rest = words[1:]
        if verb.upper() == b"LOAD":
            return self._load(rest[0])
        if verb.upper() == b"EXISTS":
            return [int(each.lower() in self._scripts) for each in rest]
        raise NotImplementedError(words)

    def _load(self, source: bytes) -> bytes:
        name = scripts.digest(source)
        self._scripts[name] = scripts.compiled(source)
        return name

    def _evaluate(self, words: Words) -> Reply:
        """Run EVAL, after which the script is known, or EVALSHA."""
        count = integer(words[2])
        if count < 0:
            raise failure("ERR Number of keys can't be negative")
        if count > len(words) - 3:
            raise failure("ERR Number of keys can't be greater than number of args")
        name = self._load(words[1]) if words[0].upper() == b"EVAL" else words[1].lower()
        if name not in self._scripts:
            raise failure("NOSCRIPT No matching script. Please use EVAL.")
        script = self._scripts[name]
        if self.full and script.checks and not script.allows_full:
            raise failure(SCRIPT_FULL)
        call = self._caller(may_grow=script.allows_full or not self.full)
        return scripts.run(script, count, words[3:], call)

    def _caller(self, *, may_grow: bool) -> scripts.Call:
        """Return `redis.call`; once a command may have changed something, no other is refused."""
        keys = self._keys

        def call(words: Words) -> Reply:
            nonlocal may_grow
            command = DATA.get(words[0])
            if command is None:
                raise NotImplementedError(words)
            _check_length(command, words)
            if command.grows and not may_grow:
                raise failure(FULL)
            may_grow = may_grow or command.writes
            reply = command.run(keys, words)
            if type(reply) is Wait:
                raise NotImplementedError(words)
            return reply

        return call


def _check_length(command: Command, words: Words) -> None:
    if command.length != len(words) and not 0 < -command.length <= len(words):
        name = words[0].decode(errors="replace").lower()
        raise failure(f"ERR wrong number of arguments for '{name}' command")


def _greet(_: ModelServer, words: Words) -> Reply:
    """Answer HELLO, for RESP3 only."""
    if list(words[1:2]) != [b"3"]:
        raise NotImplementedError(words)
    return {
        b"server": b"redis",
        b"version": b"7.0.15",
        b"proto": 3,
        b"id": 1,
        b"mode": b"standalone",
        b"role": b"master",
        b"modules": [],
    }


def _describe_client(_: ModelServer, words: Words) -> Reply:
    """Answer CLIENT SETNAME; refuse CLIENT SETINFO, which the oldest server does not know."""
    if words[1].upper() == b"SETNAME":
        return OK
    raise failure(f"ERR Unknown subcommand '{words[1].decode()}'. Try CLIENT HELP.")


def _agree(_: ModelServer, _words: Words) -> Reply:
    """Answer SELECT and AUTH with OK, for a server with one database and without a password."""
    return OK


def _inform(server: ModelServer, words: Words) -> Reply:
    """Answer INFO server and INFO memory with the fields that the farm asks for."""
    match [word.lower() for word in words[1:]]:
        case [b"server"]:
            return f"# Server\r\nrun_id:{server.run_id}\r\n".encode()
        case [b"memory"]:
            return b"# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
    raise NotImplementedError(words)


def _ping(_: ModelServer, words: Words) -> Reply:
    """Answer PING with PONG, or with its argument."""
    return words[1] if len(words) > 1 else Status(b"PONG")


def _refuse_end(_: ModelServer, words: Words) -> Reply:
    """Refuse EXEC or DISCARD outside of a transaction."""
    raise failure(f"ERR {words[0].decode().upper()} without MULTI")


OWN: Final = {
    b"HELLO": Command(_greet, -1),
    b"CLIENT": Command(_describe_client, -2),
    b"SELECT": Command(_agree, 2),
    b"AUTH": Command(_agree, 3),
    b"INFO": Command(_inform, -1),
    b"PING": Command(_ping, -1),
    b"EXEC": Command(_refuse_end, 1),
    b"DISCARD": Command(_refuse_end, 1),
    b"SCRIPT": Command(ModelServer._script, -3),
    b"EVAL": Command(ModelServer._evaluate, -3),
    b"EVALSHA": Command(ModelServer._evaluate, -3),
}


def _plain(value: object) -> object:
    """Return a value in a form that can be compared and shown."""
    if not isinstance(value, Stream):
        return value
    groups = {
        name: (group.last, {each: tuple(group.leases[each]) for each in group.ordered()})
        for name, group in value.groups.items()
    }
    return {each: value.fields[each] for each in value.ids}, value.last, groups
