"""Connections to the simulated server: they take time, break, and lose what is on its way.

A connection carries requests and replies in order. When it breaks, what was on its way is lost,
in one direction or both; its client learns of that at once, or only by waiting in vain.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import redis
from redis._parsers import Encoder

from tests.simulation.server import ModelServer, Wait
from tests.simulation.world import EPOCH_SECONDS, Effect, Killed, Process, Task, World, current

if TYPE_CHECKING:
    from redis.retry import Retry

LATENCY_SECONDS: Final = 0.0005
IN_ORDER_SECONDS: Final = 1e-9  # between two that follow one another on a connection

TOLD_SHARE: Final = 0.5  # of those whose connections break

Words = list[bytes]


@dataclass
class Host:
    """The machine that the server runs on.

    Attributes:
        server: The running server, None while it is down.
        log: The log that the server will start again on, while it is down.
        forgotten: Commands that it had executed and lost, in all of its crashes.
        served: Processes for which it has executed something since it last lost something.
        asked: The last command that it executed for each process.
        loading: Whether the server is up, and still reads its log.
        clock_seconds: Seconds by which its clock is wrong.
        break_before: Tells whether a connection breaks when a request has arrived on it.
        break_after: Tells whether a connection breaks when a request was executed.
        latency: Returns the seconds that a message takes from or to a process.
        on_start: Called with a server that has started again.
        on_change: Called with each command that has changed something, and its reply.
        on_answer: Called with each command, and its reply.
    """

    world: World
    server: ModelServer | None = field(default_factory=ModelServer)
    log: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    forgotten: list[tuple[bytes, ...]] = field(default_factory=list)
    served: dict[Process, None] = field(default_factory=dict)
    asked: dict[Process, Words] = field(default_factory=dict)
    loading: bool = False
    clock_seconds: float = 0.0
    connections: int = 0
    starts: int = 0
    sessions: "dict[Session, None]" = field(default_factory=dict)
    blocked: "dict[Session, None]" = field(default_factory=dict)
    break_before: Callable[["Session"], bool] = lambda _session: False
    break_after: Callable[["Session"], bool] = lambda _session: False
    latency: Callable[[Process], float] = lambda _process: LATENCY_SECONDS
    on_start: Callable[[ModelServer], None] = lambda _server: None
    on_change: Callable[[ModelServer, Words, object], None] = lambda _server, _words, _reply: None
    on_answer: Callable[[Words, object], None] = lambda _words, _reply: None

    def now_ms(self) -> int:
        """Return the Unix milliseconds by the machine's clock."""
        return int(1000 * (EPOCH_SECONDS + self.world.now + self.clock_seconds))

    def crash(self, lost_seconds: float, *, told: bool = True) -> None:
        """End the server; its log lacks what it executed in the last seconds.

        Args:
            lost_seconds: How many seconds of its log are lost.
            told: Whether clients learn of it at once; they do not if its whole machine dies.
        """
        if self.server is None:
            return
        upto = self.now_ms() - 1000 * lost_seconds
        log = self.server.log
        if lost_seconds:  # all after the last entry of then: the clock may have been set back since
            kept = max((n for n, (at, _) in enumerate(log, 1) if at <= upto), default=0)
            self.forgotten += [words for _, words in log[kept:]]
            log = log[:kept]
            self.served.clear()
        self.server, self.log = None, log
        for session in list(self.sessions):
            session.cut(told=told)

    def start(self) -> None:
        """Start the server again on its log."""
        if self.server is None:
            self.server = ModelServer.replayed(self.log)
            self.starts += 1
            self.server.run_id = str(self.starts)
            self.loading = False
            self.on_start(self.server)

    def retry_blocked(self, writes: Iterable[tuple[int, tuple[bytes, ...]]]) -> None:
        """Let blocked commands look again at the keys that some commands have written."""
        if not self.blocked:
            return
        words = {word for _, command in writes for word in command}
        for session in list(self.blocked):
            if session.waits is not None and not words.isdisjoint(session.waits.words[1:]):
                session.try_again()


@dataclass(eq=False)
class Session:
    """The server's end of a connection."""

    host: Host
    process: Process
    number: int
    requests: deque[Words] = field(default_factory=deque)
    replies: deque[object] = field(default_factory=deque)
    reader: Task | None = None
    arrives_at: float = 0.0
    returns_at: float = 0.0
    broken: bool = False  # nothing passes any more
    left: bool = False  # its client is gone; what it has sent still arrives
    closed: bool = False  # and its client knows
    waits: Wait | None = None

    def send(self, commands: Sequence[Words]) -> None:
        """Put requests on their way."""
        if self.broken:
            return
        world = self.host.world
        self.arrives_at = max(
            self.arrives_at + IN_ORDER_SECONDS, world.now + self.host.latency(self.process)
        )
        world.call_at(self.arrives_at, lambda: self._arrive(list(commands)))

    def _arrive(self, commands: Sequence[Words]) -> None:
        self.requests.extend(commands)
        self.go_on()

    def go_on(self) -> None:
        """Execute the requests that have arrived, in order, until one must wait."""
        while self.requests and self.waits is None and not self.broken:
            if self.host.break_before(self):
                self.cut(told=self.host.world.random.random() < TOLD_SHARE)
                return
            self._execute(self.requests.popleft())

    def try_again(self) -> None:
        """Execute the command that waits again, and answer it if it finds something."""
        if self.waits is None or self.host.server is None:
            return
        reply = self.host.server.execute(self.waits.words, self.host.now_ms(), self.number)
        if not isinstance(reply, Wait):
            self._end_wait(reply)

    def _execute(self, words: Words) -> None:
        server = self.host.server
        if server is None:
            return
        if self.host.loading:
            self._answer(redis.BusyLoadingError("LOADING"))
            return
        self.host.served[self.process] = None
        self.host.asked[self.process] = words
        writes = len(server.log)
        try:
            reply = server.execute(words, self.host.now_ms(), self.number)
        except redis.ResponseError as error:
            reply = error
        self.host.on_answer(words, reply)
        if isinstance(reply, Wait):
            self._wait(reply)
        elif self.host.break_after(self):
            self.cut(told=self.host.world.random.random() < TOLD_SHARE)
        else:
            self._answer(reply)
        if len(server.log) > writes:
            self.host.on_change(server, words, reply)
            self.host.retry_blocked(server.log[writes:])

    def _wait(self, wait: Wait) -> None:
        if self.left:
            return
        self.waits = wait
        self.host.blocked[self] = None

        def give_up() -> None:
            if self.waits is wait:
                self._end_wait(None)

        self.host.world.call_at(self.host.world.now + wait.seconds, give_up)

    def _end_wait(self, reply: object) -> None:
        self.waits = None
        self.host.blocked.pop(self, None)
        self._answer(reply)
        self.go_on()

    def _answer(self, reply: object) -> None:
        world = self.host.world
        self.returns_at = max(
            self.returns_at + IN_ORDER_SECONDS, world.now + self.host.latency(self.process)
        )
        world.call_at(self.returns_at, lambda: self._return(reply))

    def _return(self, reply: object) -> None:
        if not self.broken and not self.left:
            self.replies.append(reply)
            if self.reader is not None:
                self.host.world.resume(self.reader)

    def leave(self) -> None:
        """Note that the client is gone; a command that waits for something ends."""
        self.left = True
        self._end()

    def _end(self) -> None:
        self.waits = None
        self.host.sessions.pop(self, None)
        self.host.blocked.pop(self, None)
        if self.host.server is not None:
            self.host.server.leave(self.number)

    def cut(self, *, told: bool) -> None:
        """Break the connection; its client learns of it now, or not at all."""
        self.broken = True
        self.closed = self.closed or told
        self._end()
        if told and self.reader is not None:
            self.host.world.wake(self.reader)


hosts: list[Host] = []


class SimulatedPool(redis.ConnectionPool):
    """A pool of connections as redis-py's, which counts nothing and tells nobody of what it does.

    What redis-py measures of each request, though nobody looks at it, takes a tenth of a run.
    """

    def __del__(self) -> None:
        """Close nothing: connections end with their process."""

    def get_connection(
        self, command_name: str | None = None, *_keys: object, **_options: object
    ) -> Any:  # noqa: ANN401 # redis-py has two types for it
        """Return a connection that is ready for a request."""
        _ = command_name
        available = self._available_connections
        connection = available.pop() if available else self.make_connection()
        self._in_use_connections.add(connection)
        try:
            connection.connect()
            try:
                unread = connection.can_read()
            except redis.ConnectionError:
                unread = True
            if unread:
                connection.disconnect()
                connection.connect()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: redis.connection.ConnectionInterface) -> None:
        """Take a connection back."""
        if connection in self._in_use_connections:
            self._in_use_connections.remove(connection)
            self._available_connections.append(connection)


def measure_nothing() -> None:
    """Let redis-py's clients of this process measure nothing."""
    for name in vars(redis.client):
        if name.startswith("record_"):
            setattr(redis.client, name, lambda *_arguments, **_named: None)


class SimulatedConnection:
    """A stand-in for redis-py's connection, to the simulated server."""

    def __init__(self, *, retry: "Retry", socket_timeout: float, **_options: object) -> None:
        self.retry = retry
        self.timeout = socket_timeout
        self.host, self.port, self.db, self.pid = "simulated", 0, 0, os.getpid()
        self.encoder = Encoder("utf-8", "strict", decode_responses=False)
        self._session: Session | None = None

    def repr_pieces(self) -> list[tuple[str, object]]:
        """Return the parts of its `repr`: the host, which never changes."""
        return [("host", self.host)]

    def should_reconnect(self) -> bool:
        """Tell redis-py never to reconnect."""
        return False

    def re_auth(self) -> None:
        """Do nothing: there is no password."""

    def get_protocol(self) -> int:
        """Return 3, for RESP3."""
        return 3

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, as far as this side knows."""
        return self._session is not None

    def connect(self) -> None:
        """Open a session if there is none; raise ConnectionError while the server is down."""
        if self._session is not None:
            return
        world, host = current(), hosts[-1]
        world.park(2 * host.latency(world.process))
        if host.server is None:
            raise redis.ConnectionError("connection refused")
        host.connections += 1
        session = Session(host, world.process, host.connections)
        host.sessions[session] = None
        world.process.at_death.append(session.leave)
        self._session = session

    def disconnect(self, *_args: object, **_options: object) -> None:
        """Leave the session, if there is one."""
        if self._session is not None:
            self._session.leave()
            self._session = None

    def pack_command(self, first: str, *rest: object) -> list[Words]:
        """Return the words of a command as bytes, in a list of one command."""
        encode: Callable[[object], bytes] = self.encoder.encode  # slow: most words are text
        words = [
            word if type(word) is bytes else word.encode() if type(word) is str else encode(word)
            for word in rest
        ]
        return [[*first.encode().split(b" "), *words]]

    def pack_commands(self, commands: Iterable[tuple[str]]) -> list[Words]:
        """Return the words of several commands as bytes."""
        return [packed for words in commands for packed in self.pack_command(*words)]

    def send_command(self, *words: str, **_options: object) -> None:
        """Send one command."""
        self.send_packed_command(self.pack_command(*words))

    def send_packed_command(self, command: list[Words], check_health: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 # the library's
        """Send packed commands; raise ConnectionError if the connection is known to be broken."""
        self.connect()
        if self._session is None or self._session.closed:
            self.disconnect()
            raise redis.ConnectionError("connection reset")
        self._send(self._session, command)

    @staticmethod
    def _send(session: Session, commands: Sequence[Words]) -> None:
        """Send commands; a process that dies over it may have sent some of them."""
        for sent in range(len(commands)):
            try:
                session.host.world.effect(Effect.SEND)
            except Killed:
                session.send(commands[:sent])
                raise
        session.send(commands)
        session.host.world.effect(Effect.SEND)

    def can_read(self, timeout: float = 0) -> bool:  # noqa: ARG002 # the library's
        """Tell whether an answer is there; raise ConnectionError if the connection broke."""
        if self._session is None:
            return False
        if self._session.closed:
            raise redis.ConnectionError("connection closed by server")
        return bool(self._session.replies)

    def read_response(self, *_args: object, **_options: object) -> object:
        """Return the next answer, or raise it if it is an error; wait for the socket's timeout."""
        session = self._session
        if session is None:
            raise redis.ConnectionError("not connected")
        world = current()
        session.reader = world.task
        deadline = world.now + self.timeout
        while not session.replies:
            if session.closed:
                self.disconnect()
                raise redis.ConnectionError("connection reset")
            world.park(deadline - world.now)
            if not session.replies and world.now >= deadline:
                self.disconnect()
                raise redis.TimeoutError("timeout reading from socket")
        session.reader = None
        reply = session.replies.popleft()
        if isinstance(reply, Exception):
            if isinstance(reply, redis.ConnectionError):
                self.disconnect()
            raise reply
        return reply
