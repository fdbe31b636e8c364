"""Faults of a run: drawn by its seed, each with a line in its log."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple

from embedfarm.contract import wire
from tests.simulation.disk import Disk
from tests.simulation.farm import Role
from tests.simulation.link import LATENCY_SECONDS, TOLD_SHARE, Host, Session
from tests.simulation.states import State
from tests.simulation.world import Doom, Effect, Process, World

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

EFFECTS: Final = (Effect.FILE, Effect.SEND, Effect.CLOCK)
EFFECTS_MAX: Final = 40  # at one of which a process dies
SYNCS_MAX: Final = 5
DARK_SHARE: Final = 0.5
DARK_SECONDS_MAX: Final = 3.0

DIED: Final = {
    Effect.FILE: State("died at a file", "a process is killed before or after it changes a file"),
    Effect.SEND: State("died at a request", "a process is killed before or after it sends one"),
    Effect.CLOCK: State("died at a clock", "a process is killed when it has read a clock"),
}

DARK: Final = State("power lost at a file", "it is lost before or after a file is changed")

Fault = Callable[[], float | None]
"""Makes something go wrong; seconds until it is over, None if nothing can go wrong so now."""


class Operation(NamedTuple):
    """A step that is to be done at some time of a run.

    Attributes:
        number: Its index among all operations of the run.
        moment: Virtual seconds at which it is tried first.
        kind: Does it; returns None if it cannot be done now.
        until: Virtual seconds at which it is given up, if it could not be done.
        random: Makes the choices of this operation only, so that they do not depend on others.
    """

    number: int
    moment: float
    kind: Fault
    until: float
    random: random.Random

    @property
    def name(self) -> str:
        """Name of the method that does it."""
        return getattr(self.kind, "__name__", "")


@dataclass
class Faults:
    """Draws the faults of a run, and makes them happen.

    Attributes:
        disk: Disk of the machine on which the commands that embed run.
        roles: Programs that faults may hit; the first is a command that embeds.
        dropped: Numbers of the operations that are left out.
        ends_at: Virtual seconds at which the last fault is over.
        operations: All operations of the run, in the order in which they were drawn.
        random: The random numbers of the operation that is being done.
        counts: How often each kind was done.
    """

    world: World
    host: Host
    disk: Disk
    roles: Sequence[Role]
    lease_seconds: float
    trace: Callable[[str], None]
    dropped: frozenset[int] = frozenset()
    ends_at: float = 0.0
    operations: list[Operation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _away: dict[Process, float] = field(default_factory=dict)
    _slow: dict[Process, float] = field(default_factory=dict)
    _break_share: float = 0.0
    _at_answer: dict[Process, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = self.world.random
        self.host.latency = self._latency
        self.host.break_before = self._breaks
        self.host.break_after = self._answered

    def plan(self, horizon: float) -> None:
        """Draw all faults of a run."""
        kinds: list[Fault] = [
            self.kill, self.terminate, self.freeze, self.crash, self.cut, self.lose, self.part,
            self.slow, self.jump, self.jump_server, self.fill, self.black_out, self.stop_frozen,
            self.sleep_through, self.sleep_through, self.die, self.die, self.lose_power,
            self.lose_power, self.fail_sync, self.fill_disk,
        ]  # fmt: skip
        for _ in range(self.world.random.randint(FAULTS_MIN, FAULTS_MAX)):
            self.add(self.world.random.uniform(0.0, horizon), self.world.random.choice(kinds))

    def add(self, moment: float, kind: Fault, patience: float = math.inf) -> None:
        """Plan an operation for a moment; if it cannot be done, retry for `patience` seconds."""
        own = random.Random(self.world.random.getrandbits(64))
        operation = Operation(len(self.operations), moment, kind, moment + patience, own)
        self.operations.append(operation)
        if operation.number not in self.dropped:
            self.world.call_at(moment, partial(self._do, operation))
            self.ends_at = max(self.ends_at, moment)

    def _do(self, operation: Operation) -> None:
        """Do an operation, or try again a little later if it cannot be done now."""
        self.random = operation.random
        seconds = operation.kind()
        self.random = self.world.random
        if seconds is not None:
            self.count(operation.name, seconds)
        elif self.world.now < operation.until:
            self.ends_at = max(self.ends_at, self.world.now + AGAIN_SECONDS)
            self._later(AGAIN_SECONDS, partial(self._do, operation))

    def count(self, name: str, seconds: float) -> None:
        """Count a fault that is over after so many seconds."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self.ends_at = max(self.ends_at, self.world.now + seconds)

    def _later(self, seconds: float, action: Callable[[], None]) -> float:
        self.world.call_at(self.world.now + seconds, action)
        return seconds

    def _victim(self, among: Sequence[Role] = ()) -> tuple[Role, Process] | None:
        roles = among or self.roles
        running = [(role, role.process) for role in roles if role.process is not None]
        return self.random.choice(running) if running else None

    # Processes.

    def kill(self) -> float | None:
        """Kill a process, as by SIGKILL."""
        if not (victim := self._victim()):
            return None
        role, process = victim
        self.trace(f"kill {process.name}")
        role.kill(process)
        return 0.0

    def terminate(self) -> float | None:
        """Terminate a process, as by SIGTERM."""
        if not (victim := self._victim()):
            return None
        self.terminate_role(*victim)
        return 0.0

    def terminate_role(self, role: Role, process: Process) -> None:
        """Terminate a process, as by SIGTERM; kill it if it does not drain in time."""
        self.trace(f"terminate {process.name}")
        role.stop.set()
        self._later(DRAIN_SECONDS, lambda: role.kill(process))

    def freeze(self) -> float | None:
        """Stop a process, as by SIGSTOP, for a part of a lease or some leases."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        return self.freeze_for(process, self.random.choice([0.2, 1.0, 2.0]) * self.lease_seconds)

    def freeze_for(self, process: Process, seconds: float) -> float:
        """Stop a process, as by SIGSTOP, and let it go on `seconds` later."""
        self.trace(f"freeze {process.name} for {seconds:.2f} s")
        self.world.freeze(process)
        return self._later(seconds, lambda: self.world.thaw(process))

    def stop_frozen(self) -> float | None:
        """Terminate a process while it is stopped: it drains leases that it may have lost."""
        if not (victim := self._victim()):
            return None
        role, process = victim
        seconds = self.random.uniform(0.5, 2.0) * self.lease_seconds
        self.trace(f"freeze {process.name} for {seconds:.2f} s, and terminate it")
        self.world.freeze(process)
        role.stop.set()
        self._later(DRAIN_SECONDS, lambda: role.kill(process))
        return self._later(seconds, lambda: self.world.thaw(process))

    def damage(self) -> float | None:
        """Let the device of a worker make wrong vectors from now on."""
        among = [role for role in self.roles if role.process and role.process.device == "sound"]
        if not among or not (victim := self._victim(among)):
            return None
        _, process = victim
        self.trace(f"device of {process.name} begins to compute wrongly")
        process.device = "damaged"
        return 0.0

    def jump(self) -> float | None:
        """Set the wall clock of a process wrong."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        process.clock_seconds += self.random.choice([-3600.0, -5.0, 5.0, 3600.0])
        self.trace(f"clock of {process.name} is {process.clock_seconds:+.0f} s off")
        return 0.0

    def die(self) -> float | None:
        """Kill a process at one of its next effects: a file, a request, or a look at a clock."""
        among = self.roles[:1] if self.random.random() < EMBEDDING_SHARE else ()
        if not (victim := self._victim(among)):
            return None
        role, process = victim
        effect = self.random.choice(EFFECTS if role in self._commands else EFFECTS[1:])

        def die() -> None:
            self.trace(f"{process.name} dies at an effect: {effect.name.lower()}")
            self.ends_at = max(self.ends_at, self.world.now)
            DIED[effect].reach()
            role.kill(process)

        process.doom = Doom(effect, self.random.randint(1, EFFECTS_MAX), die)
        return 0.0

    # The disk.

    @property
    def _commands(self) -> list[Role]:
        """Roles of the commands that embed, whose machine has the disk."""
        return [role for role in self.roles if role.name.startswith("embed")]

    def lose_power(self) -> float | None:
        """Take the power of the commands' machine at one of the next file effects of a command."""
        if not (victim := self._victim(self._commands)):
            return None
        role, process = victim

        def die() -> None:
            DARK.reach()
            self.ends_at = max(self.ends_at, self.world.now)
            self.go_dark(process)
            role.kill(process)

        process.doom = Doom(Effect.FILE, self.random.randint(1, EFFECTS_MAX), die)
        return 0.0

    def go_dark(self, spared: Process) -> None:
        """Let the commands' machine lose its power and come back, with all but one command killed.

        The spared command must do nothing more with its files, or have none open now.
        """
        self.trace(f"power of {spared.name} is lost")
        self.disk.lose_power()
        for role in self._commands:
            if role.process is not None and role.process is not spared:
                role.kill(role.process)

    def fail_sync(self) -> float:
        """Make one of the next syncs fail."""
        self.disk.syncs_left = self.random.randint(0, SYNCS_MAX)
        return 0.0

    def end_by_failed_sync(self) -> None:
        """Sometimes take the power from the next command after one that ended by a failed sync.

        The next command may rely on what it sees and the disk does not have, which seldom comes out
        by chance.
        """
        self.ends_at = max(self.ends_at, self.world.now)
        if self.world.random.random() < DARK_SHARE:
            seconds = self.world.random.uniform(0.0, DARK_SECONDS_MAX)
            self.ends_at = max(self.ends_at, self.world.now + seconds)
            own = Operation(-1, self.world.now, self.lose_power, math.inf, self.world.random)
            self._later(seconds, partial(self._do, own))

    def fill_disk(self) -> float:
        """Make the disk full for some time."""
        seconds = self.random.uniform(0.1, 1.0)
        self.trace(f"disk is full for {seconds:.2f} s")
        self.disk.full = True

        def empty() -> None:
            self.disk.full = False

        return self._later(seconds, empty)

    # The server.

    def crash(self) -> float | None:
        """Kill the server, which may lose the end of its log; it starts again."""
        if self.host.server is None:
            return None
        return self._crash(self.random.choice([0.0, self._some_loss()]))

    def _some_loss(self) -> float:
        """Draw how many seconds of its log the server loses."""
        return self.random.uniform(0.0, LOG_SECONDS_LOST_MAX)

    def undo_split(self, log: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Make the server forget a recent split when the log ends with a drain of a part of it.

        This happens at most once in a run: the whole block is embedded again, and its result begins
        before what is wanted next. That seldom comes about by chance.
        """
        now_ms, words = log[-1]
        if "undo" in self.counts or DRAIN not in words:
            return
        upto, since_ms = int(words[6]), now_ms - 1000 * LOG_SECONDS_LOST_MAX
        recent = takewhile(lambda each: each[0] > since_ms, reversed(log))
        splits = (words for _, words in recent if SPLIT in words)
        # A split ends with chunks, tokens and first chunk of each piece.
        if any(int(words[13]) < upto < int(words[-3]) + int(words[-1]) for words in splits):
            self._later(0.0, partial(self.undo_now, "undo"))

    def undo_now(self, name: str) -> None:
        """Kill the server, which loses as much of its log as it may, and count that as `name`."""
        if self.host.server is not None:
            self.count(name, self._crash(LOG_SECONDS_LOST_MAX))

    def _crash(self, lost: float, *, told: bool = True) -> float:
        """Kill the server without the last seconds of its log, and start it again later."""
        down = self.world.random.uniform(0.05, DOWN_SECONDS_MAX)
        self.trace(f"server down for {down:.2f} s, loses {lost:.2f} s")
        self.host.crash(lost, told=told)
        return self._later(down, self._restart)

    def black_out(self) -> float | None:
        """Kill the server's machine and some processes, without telling the other clients."""
        if self.host.server is None:
            return None
        seconds = self._crash(self.random.choice([0.0, self._some_loss()]), told=False)
        for role in self.roles:
            if role.process is not None and self.random.random() < DYING_SHARE:
                self.trace(f"{role.process.name} dies with it")
                role.kill(role.process)
        return seconds

    def sleep_through(self) -> float | None:
        """Stop a process while the server crashes and comes back; it finds out later.

        The process stops now, or with its next answer on its way: then what it does first relies on
        an outdated answer. Often it is the command that embeds: it knows best what was lost.
        """
        among = self.roles[:1] if self.random.random() < EMBEDDING_SHARE else ()
        if self.host.server is None or not (victim := self._victim(among)):
            return None
        _, process = victim
        before = self.random.uniform(0.0, BEFORE_SECONDS_MAX)
        if self.random.random() >= ASKING_SHARE:
            return self._sleep_through(process, before)
        self._at_answer[process] = partial(self._sleep_through, process, before)
        self._later(ASKING_SECONDS_MAX, partial(self._forget_answer, process))
        return ASKING_SECONDS_MAX + before + DOWN_SECONDS_MAX + LOADING_SECONDS_MAX

    def _forget_answer(self, process: Process) -> None:
        self._at_answer.pop(process, None)

    def undo_last(self, log: Sequence[tuple[int, Sequence[bytes]]]) -> None:
        """Sometimes stop the command while the server loses a push or an end that it has just done.

        The answer is on its way then. It seldom comes about by chance.
        """
        (_, words), process = log[-1], self.roles[0].process
        share = next((share for script, share in UNDONE_SHARES.items() if script in words), 0.0)
        if process is None or self.world.random.random() >= share:
            return
        before = self.world.random.uniform(0.0, BEFORE_SECONDS_MAX)
        self.count("undo_last", self._sleep_through(process, before))

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
        """Set the server's clock; not far back, since leases would not end till then."""
        self.host.clock_seconds += self.random.choice([-2.0, 1.0, 30.0])
        self.trace(f"clock of the server is {self.host.clock_seconds:+.0f} s off")
        return 0.0

    def fill(self) -> float | None:
        """Make the server's memory full for some time."""
        if self.host.server is None:
            return None
        server, seconds = self.host.server, self.random.uniform(0.1, 1.0)
        self.trace(f"server is full for {seconds:.2f} s")
        server.full = True

        def empty() -> None:
            server.full = False

        return self._later(seconds, empty)

    # The network.

    def cut(self) -> float | None:
        """Break all connections of a process, which is told of some of them."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        self.trace(f"connections of {process.name} break")
        for session in [each for each in self.host.sessions if each.process is process]:
            session.cut(told=self.random.random() < TOLD_SHARE)
        return 0.0

    def lose(self) -> float:
        """Break some connections before or after requests are executed, for some time."""
        seconds = self.random.uniform(0.05, 1.0)
        self._break_share = self.random.choice([0.01, 0.05, 0.2])
        self.trace(f"{self._break_share:.0%} of requests lost for {seconds:.2f} s")

        def mend() -> None:
            self._break_share = 0.0

        return self._later(seconds, mend)

    def part(self) -> float | None:
        """Let nothing pass between a process and the server for some time."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        seconds = self.random.uniform(0.1, 2.0) * self.lease_seconds
        self.trace(f"{process.name} is cut off for {seconds:.2f} s")
        self._away[process] = self.world.now + seconds
        return seconds

    def slow(self) -> float | None:
        """Slow the network of a process down for some time."""
        if not (victim := self._victim()):
            return None
        _, process = victim
        seconds = self.random.uniform(0.1, 3.0)
        self.trace(f"network of {process.name} is slow for {seconds:.2f} s")
        self._slow[process] = self.world.now + seconds
        return seconds

    def _latency(self, process: Process) -> float:
        """Return the seconds that a message takes one way."""
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
