"""Virtual time: tasks that run one at a time, in processes that can be frozen and killed.

One seed decides which of several tasks that could go on does so first, and how long everything
takes. Others go on only where a task waits: what it does in between takes no time. But a process
may die at any step in between that the world outside could see, or that sees the world (`Effect`).
"""

import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from greenlet import getcurrent, greenlet

EPOCH_SECONDS: Final = 1_800_000_000.0


class Killed(BaseException):
    """Raised to unwind the tasks of a killed process; whatever they try raises it again."""


class Deadlock(RuntimeError):
    """Raised when nothing is left that could ever happen."""


class Effect(Enum):
    """Kinds of contact of a task with the world outside its process for which it does not wait."""

    FILE = auto()
    SEND = auto()
    CLOCK = auto()


@dataclass
class Doom:
    """A death that awaits a process.

    Attributes:
        effect: Kind of the effect at which the process dies.
        left: Effects of that kind that are left, the deadly one included.
        die: Kills the process.
    """

    effect: Effect
    left: int
    die: Callable[[], None]


@dataclass(eq=False)
class Process:
    """A process: tasks that live and die together.

    Attributes:
        name: Its name in the log.
        dead: Whether it was killed, or has ended.
        frozen: Whether it is stopped, as by SIGSTOP; time goes on without it.
        clock_seconds: Seconds by which its wall clock is wrong.
        doom: Its death at one of its next effects, if one awaits it.
        device: Its device's state: "sound", "damaged" for one that makes wrong vectors, or "" while
            it has made none.
        tasks: Its tasks that have not ended.
    """

    name: str
    dead: bool = False
    frozen: bool = False
    clock_seconds: float = 0.0
    doom: Doom | None = None
    device: str = ""
    tasks: dict["Task", None] = field(default_factory=dict)
    held_back: list["Task"] = field(default_factory=list)
    at_death: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A thread of a simulated process.

    Attributes:
        ticket: Number that changes whenever it goes on, so that older events for it are ignored.
        woken: Whether a call of `wake` has let it go on, and not the time.
    """

    process: Process
    name: str
    greenlet: greenlet = field(init=False)
    ticket: int = 0
    woken: bool = False
    ended: bool = False
    watchers: list["Task"] = field(default_factory=list)


class World:
    """The world of one run: its virtual time, its tasks and its events.

    Attributes:
        random: Random numbers from which every choice comes.
        now: Virtual seconds since the beginning.
        steps: Number of events that have happened.
        steps_max: Number of events after which the run is given up.
        stirred: Whether something happened that may end the run, and nobody has looked.
        reached: How often each state was reached (`tests.simulation.states`).
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.steps_max = sys.maxsize
        self.stirred = True
        self.reached: dict[str, int] = {}
        self.task: Task | None = None
        self._events: list[tuple[float, float, int, Task | Callable[[], None], int]] = []
        self._count = 0
        self._hub = getcurrent()
        self._processes: dict[Process, None] = {}

    @property
    def process(self) -> Process:
        """The process whose task runs now."""
        if self.task is None:
            raise RuntimeError("no task runs")
        return self.task.process

    # What tasks do.

    def park(self, seconds: float | None) -> bool:
        """Wait until somebody wakes this task, at most so long; return whether somebody did."""
        task = self.task
        if task is None:
            raise RuntimeError("the hub cannot wait")
        if task.process.dead:
            raise Killed
        task.woken = False
        if seconds is not None:
            self._add(self.now + max(0.0, seconds), task, task.ticket)
        self._hub.switch()
        if task.process.dead:
            raise Killed
        return task.woken

    def effect(self, effect: Effect) -> None:
        """Die here if a doom is due; called before and after each effect of a task.

        Raises:
            Killed: The process died now, or is dead already.
        """
        if self.task is None:
            return
        process = self.task.process
        if process.dead:
            raise Killed
        doom = process.doom
        if doom is not None and doom.effect is effect:
            doom.left -= 1
            if doom.left <= 0:
                doom.die()

    def wake(self, task: Task) -> None:
        """Let a parked task go on."""
        if not task.woken and not task.ended:
            task.woken = True
            self._add(self.now, task, task.ticket)

    def resume(self, task: Task) -> None:
        """Let a parked task go on at once; only what happens outside of all tasks may do so."""
        if not task.woken and not task.ended:
            task.woken = True
            self._continue(task, task.ticket)

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """Make a task, which begins a moment later."""
        task = Task(process, name)
        task.greenlet = greenlet(lambda: self._run(task, work), parent=self._hub)
        process.tasks[task] = None
        self._processes[process] = None
        self._add(self.now, task, task.ticket)
        return task

    def join(self, task: Task, seconds: float | None) -> None:
        """Wait until a task has ended, at most so many seconds."""
        if not task.ended and self.task is not None:
            task.watchers.append(self.task)
            self.park(seconds)

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """Call a function at a moment, outside of all processes."""
        self._add(max(self.now, moment), action, 0)

    # What is done to processes.

    def kill(self, process: Process) -> None:
        """End a process at once; nothing that it does on its way out reaches the world."""
        if process.dead:
            return
        process.dead = True
        for task in list(process.tasks):
            if task is not self.task:
                self._unwind(task)
        for action in process.at_death:
            action()
        self._processes.pop(process, None)
        if self.task is not None and self.task.process is process:
            raise Killed

    def freeze(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.frozen = True

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on."""
        process.frozen = False
        for task in process.held_back:
            self._add(self.now, task, task.ticket)
        process.held_back.clear()

    def close(self) -> None:
        """Kill all processes that are left."""
        for process in list(self._processes):
            self.kill(process)

    # The hub.

    def run(self, until: Callable[[], bool], seconds_max: float) -> bool:
        """Let events happen until a condition holds; return False if it did not by `seconds_max`.

        The condition is looked at when the world was `stirred`, as it is by the end of each task.

        Raises:
            Deadlock: There are no more events.
        """
        events = self._events
        while not (self.stirred and self._look(until)):
            if not events:
                raise Deadlock
            moment = events[0][0]
            if moment > seconds_max or self.steps >= self.steps_max:
                self.now = max(self.now, min(moment, seconds_max))
                self.stirred = True
                return False
            _, _, _, what, ticket = heapq.heappop(events)
            self.now = max(self.now, moment)
            self.steps += 1
            if isinstance(what, Task):
                self._continue(what, ticket)
            else:
                what()
        return True

    def _look(self, until: Callable[[], bool]) -> bool:
        self.stirred = False
        return until()

    def _add(self, moment: float, what: Task | Callable[[], None], ticket: int) -> None:
        """Plan an event; of those at the same moment, chance decides which comes first."""
        self._count += 1
        heapq.heappush(self._events, (moment, self.random.random(), self._count, what, ticket))

    def _continue(self, task: Task, ticket: int) -> None:
        if task.ended or task.ticket != ticket:
            return
        if task.process.frozen:
            task.process.held_back.append(task)
            return
        task.ticket += 1
        self.task = task
        task.greenlet.switch()
        self.task = None

    def _run(self, task: Task, work: Callable[[], object]) -> None:
        try:
            if not task.process.dead:
                work()
        except BaseException:
            if not task.process.dead:  # whatever `Killed` has become on its way out
                raise
        finally:
            self._end(task)

    def _end(self, task: Task) -> None:
        task.ended = self.stirred = True
        task.process.tasks.pop(task, None)
        for watcher in task.watchers:
            self.wake(watcher)

    def _unwind(self, task: Task) -> None:
        """End a task where it waits, by raising `Killed` in it."""
        running, self.task = self.task, task
        task.greenlet.parent = getcurrent()
        if task.greenlet:
            task.greenlet.throw(Killed)
        self.task = running
        self._end(task)


_worlds: list[World] = []


def current() -> World:
    """Return the world of the run."""
    return _worlds[-1]


def enter(world: World) -> None:
    """Make a world the one that the simulated library belongs to."""
    _worlds[:] = [world]
