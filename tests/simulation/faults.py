"""What goes wrong in a run: drawn by its seed, each with a line in its log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Final

from embedfarm import wire
from tests.simulation.farm import Role
from tests.simulation.link import LATENCY_SECONDS, TOLD_SHARE, Host, Session
from tests.simulation.world import Process, World

FAULTS_MIN: Final = 10
FAULTS_MAX: Final = 20
SLOW: Final = 100.0
LOG_SECONDS_LOST_MAX: Final = 2.0  # what `appendfsync everysec` may lose
DRAIN_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 0.1
DOWN_SECONDS_MAX: Final = 1.5
LOADING_SECONDS_MAX: Final = 0.3
BEFORE_SECONDS_MAX: Final = 0.3
ASKING_SHARE: Final = 0.5
ASKING_SECONDS_MAX: Final = 0.5
DYING_SHARE: Final = 0.5
EMBEDDING_SHARE: Final = 0.5
DRAIN: Final = wire.script("drain").encode()
SPLIT: Final = wire.script("split").encode()
UNDONE_SHARES: Final = {wire.script("push").encode(): 0.02, wire.script("end").encode(): 0.05}

Fault = Callable[[], float | None]
"""Makes something go wrong; seconds until it is over, None if nothing can go wrong so now."""


@dataclass
class Faults:
    """Makes things go wrong.

    Attributes:
        roles: Their victims; the first is the command that embeds.
        ends_at: When the last of it is over.
        counts: How often each kind was done.
    """

    world: World
    host: Host
    roles: Sequence[Role]
    lease_seconds: float
    trace: Callable[[str], None]
    ends_at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    _away: dict[Process, float] = field(default_factory=dict)
    _slow: dict[Process, float] = field(default_factory=dict)
    _break_share: float = 0.0
    _at_answer: dict[Process, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host.latency = self._latency
        self.host.break_before = self._breaks
        self.host.break_after = self._answered

    def plan(self, horizon: float) -> None:
        """Draw all faults of a run."""
        kinds: list[Fault] = [
            self.kill, self.terminate, self.freeze, self.crash, self.cut, self.lose, self.part,
            self.slow, self.jump, self.jump_server, self.fill, self.black_out, self.stop_frozen,
            self.sleep_through, self.sleep_through,
        ]  # fmt: skip
        for _ in range(self.world.random.randint(FAULTS_MIN, FAULTS_MAX)):
            moment = self.world.random.uniform(0.0, horizon)
            kind = self.world.random.choice(kinds)
            self.world.call_at(moment, partial(self._do, kind))
            self.ends_at = max(self.ends_at, moment)

    def _do(self, kind: Fault) -> None:
        """Make one thing go wrong, as soon as there is something that can."""
        seconds = kind()
        if seconds is None:
            self.ends_at = max(self.ends_at, self.world.now + AGAIN_SECONDS)
            self._later(AGAIN_SECONDS, partial(self._do, kind))
            return
        self._count(kind.__name__, seconds)

    def _count(self, name: str, seconds: float) -> None:
        """Something went wrong, and is over after so many seconds."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self.ends_at = max(self.ends_at, self.world.now + seconds)

    def _later(self, seconds: float, action: Callable[[], None]) -> float:
        self.world.call_at(self.world.now + seconds, action)
        return seconds

    def _victim(self, among: Sequence[Role] = ()) -> tuple[Role, Process] | None:
        roles = among or self.roles
        running = [(role, role.process) for role in roles if role.process is not None]
        return self.world.random.choice(running) if running else None

    # Processes.

    def kill(self) -> float | None:
        """SIGKILL."""
        if not (victim := self._victim()):
            return None
        role, process = victim
        self.trace(f"kill {process.name}")
        role.kill(process)
        return 0.0

    def terminate(self) -> float | None:
        """SIGTERM."""
        if not (victim := self._victim()):
            return None
        role, process = victim
        self.trace(f"terminate {process.name}")
        role.stop.set()
        # Whoever does not drain in time is killed.
        self._later(DRAIN_SECONDS, lambda: role.kill(process))
        return 0.0

    def freeze(self) -> float | None:
        """SIGSTOP, and SIGCONT some time later."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        seconds = self.world.random.choice([0.2, 1.0, 2.0]) * self.lease_seconds
        self.trace(f"freeze {process.name} for {seconds:.2f} s")
        self.world.freeze(process)
        return self._later(seconds, lambda: self.world.thaw(process))

    def stop_frozen(self) -> float | None:
        """SIGSTOP, and SIGTERM before SIGCONT: it ends over leases that it may have lost."""
        if not (victim := self._victim()):
            return None
        role, process = victim
        seconds = self.world.random.uniform(0.5, 2.0) * self.lease_seconds
        self.trace(f"freeze {process.name} for {seconds:.2f} s, and terminate it")
        self.world.freeze(process)
        role.stop.set()
        self._later(DRAIN_SECONDS, lambda: role.kill(process))
        return self._later(seconds, lambda: self.world.thaw(process))

    def jump(self) -> float | None:
        """A wall clock that is set."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        process.clock_seconds += self.world.random.choice([-3600.0, -5.0, 5.0, 3600.0])
        self.trace(f"clock of {process.name} is {process.clock_seconds:+.0f} s off")
        return 0.0

    # The server.

    def crash(self) -> float | None:
        """Kill -9 of the server, which may lose the end of its log; it starts again."""
        if self.host.server is None:
            return None
        return self._crash(self.world.random.choice([0.0, self._some_loss()]))

    def _some_loss(self) -> float:
        """Seconds of its log that the server loses."""
        return self.world.random.uniform(0.0, LOG_SECONDS_LOST_MAX)

    def undo_split(self, log: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Told of a log that has just grown, have the server forget a split that it ends with.

        Once in a run, when some of its pieces are on disk: the whole block is embedded again, and
        its result begins before what is wanted next. That seldom comes about by chance.
        """
        now_ms, words = log[-1]
        if "undo" in self.counts or DRAIN not in words:
            return
        upto, since_ms = int(words[6]), now_ms - 1000 * LOG_SECONDS_LOST_MAX
        recent = takewhile(lambda each: each[0] > since_ms, reversed(log))
        splits = (words for _, words in recent if SPLIT in words)
        # A split ends with chunks, tokens and first chunk of each piece.
        if any(int(words[12]) < upto < int(words[-3]) + int(words[-1]) for words in splits):
            self._later(0.0, partial(self._do, self.undo))

    def undo(self) -> float | None:
        """Kill -9 of the server, which loses all that it may."""
        return None if self.host.server is None else self._crash(LOG_SECONDS_LOST_MAX)

    def _crash(self, lost: float, *, told: bool = True) -> float:
        """The server goes, without the last seconds of its log."""
        down = self.world.random.uniform(0.05, DOWN_SECONDS_MAX)
        self.trace(f"server down for {down:.2f} s, loses {lost:.2f} s")
        self.host.crash(lost, told=told)
        return self._later(down, self._restart)

    def black_out(self) -> float | None:
        """The end of the server's machine, and of some of the processes: nobody else is told."""
        if self.host.server is None:
            return None
        seconds = self._crash(self.world.random.choice([0.0, self._some_loss()]), told=False)
        for role in self.roles:
            if role.process is not None and self.world.random.random() < DYING_SHARE:
                self.trace(f"{role.process.name} dies with it")
                role.kill(role.process)
        return seconds

    def sleep_through(self) -> float | None:
        """A process is stopped while the server crashes and comes back; it finds out later.

        Now, or with the next answer on its way: then what it does first goes by what it has read.
        It is the command that embeds more often than others: it knows best what was lost.
        """
        among = self.roles[:1] if self.world.random.random() < EMBEDDING_SHARE else ()
        if self.host.server is None or not (victim := self._victim(among)):
            return None
        _, process = victim
        before = self.world.random.uniform(0.0, BEFORE_SECONDS_MAX)
        if self.world.random.random() >= ASKING_SHARE:
            return self._sleep_through(process, before)
        self._at_answer[process] = partial(self._sleep_through, process, before)
        self._later(ASKING_SECONDS_MAX, partial(self._forget_answer, process))
        return ASKING_SECONDS_MAX + before + DOWN_SECONDS_MAX + LOADING_SECONDS_MAX

    def _forget_answer(self, process: Process) -> None:
        self._at_answer.pop(process, None)

    def undo_last(self, log: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Told of a log that has just grown, have the command sleep through the loss of that.

        Sometimes, when that is a block or the end of a job, and the answer is on its way. It seldom
        comes about by chance.
        """
        (_, words), process = log[-1], self.roles[0].process
        share = next((share for script, share in UNDONE_SHARES.items() if script in words), 0.0)
        if process is None or self.world.random.random() >= share:
            return
        before = self.world.random.uniform(0.0, BEFORE_SECONDS_MAX)
        self._count("undo_last", self._sleep_through(process, before))

    def _sleep_through(self, process: Process, before: float) -> float:
        self.trace(f"{process.name} is frozen; the server goes {before:.2f} s later")
        self.world.freeze(process)

        def crash() -> None:
            seconds = 0.0
            if self.host.server is not None:
                seconds = self._crash(self._some_loss())
            self._later(seconds + LOADING_SECONDS_MAX, lambda: self.world.thaw(process))

        self._later(before, crash)
        return before + DOWN_SECONDS_MAX + LOADING_SECONDS_MAX

    def _restart(self) -> None:
        self.host.start()
        self.host.loading = True
        self._later(self.world.random.uniform(0.0, LOADING_SECONDS_MAX), self._loaded)

    def _loaded(self) -> None:
        self.trace("server is back")
        self.host.loading = False

    def jump_server(self) -> float:
        """A server's clock that is set; not far back, since leases would not end till then."""
        self.host.clock_seconds += self.world.random.choice([-2.0, 1.0, 30.0])
        self.trace(f"clock of the server is {self.host.clock_seconds:+.0f} s off")
        return 0.0

    def fill(self) -> float | None:
        """The server's memory is full for some time."""
        if self.host.server is None:
            return None
        server, seconds = self.host.server, self.world.random.uniform(0.1, 1.0)
        self.trace(f"server is full for {seconds:.2f} s")
        server.full = True

        def empty() -> None:
            server.full = False

        return self._later(seconds, empty)

    # The network.

    def cut(self) -> float | None:
        """All connections of a process break; it is told of some."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        self.trace(f"connections of {process.name} break")
        for session in [each for each in self.host.sessions if each.process is process]:
            session.cut(told=self.world.random.random() < TOLD_SHARE)
        return 0.0

    def lose(self) -> float:
        """Connections break before or after requests are executed, for some time."""
        seconds = self.world.random.uniform(0.05, 1.0)
        self._break_share = self.world.random.choice([0.01, 0.05, 0.2])
        self.trace(f"{self._break_share:.0%} of requests lost for {seconds:.2f} s")

        def mend() -> None:
            self._break_share = 0.0

        return self._later(seconds, mend)

    def part(self) -> float | None:
        """Nothing passes between a process and the server for some time."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        seconds = self.world.random.uniform(0.1, 2.0) * self.lease_seconds
        self.trace(f"{process.name} is cut off for {seconds:.2f} s")
        self._away[process] = self.world.now + seconds
        return seconds

    def slow(self) -> float | None:
        """The network of a process is slow for some time."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        seconds = self.world.random.uniform(0.1, 3.0)
        self.trace(f"network of {process.name} is slow for {seconds:.2f} s")
        self._slow[process] = self.world.now + seconds
        return seconds

    def _latency(self, process: Process) -> float:
        """Seconds that something takes one way."""
        seconds = self.world.random.expovariate(1 / LATENCY_SECONDS)
        if self._slow.get(process, 0.0) > self.world.now:
            seconds *= SLOW
        # TCP sends again what did not pass.
        return seconds + max(0.0, self._away.get(process, 0.0) - self.world.now)

    def _answered(self, session: Session) -> bool:
        if happens := self._at_answer.pop(session.process, None):
            happens()
        return self._breaks(session)

    def _breaks(self, session: Session) -> bool:  # noqa: ARG002 # all alike
        return self.world.random.random() < self._break_share
