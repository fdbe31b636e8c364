"""Virtual time: tasks that run one at a time, in processes that can be frozen and killed.

One seed decides which of several tasks that could go on does so first, and how long everything
takes. No task is interrupted but where it waits: what it does in between takes no time.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from greenlet import getcurrent, greenlet

EPOCH_SECONDS: Final = 1_800_000_000.0


class Killed(BaseException):
    """Unwinds the tasks of a process that was killed; whatever they try raises it again."""


class Deadlock(RuntimeError):
    """Nothing is left that could ever happen."""


@dataclass(eq=False)
class Process:
    """Some tasks that live and die together.

    Attributes:
        name: What the log calls it.
        dead: It was killed, or has ended.
        frozen: It is stopped, as by SIGSTOP; time goes on without it.
        clock_seconds: By how much its wall clock is wrong.
        speed: How many times slower than others it is.
        tasks: Those that have not ended.
    """

    name: str
    dead: bool = False
    frozen: bool = False
    clock_seconds: float = 0.0
    tasks: dict["Task", None] = field(default_factory=dict)
    held_back: list["Task"] = field(default_factory=list)
    at_death: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A thread of a simulated process.

    Attributes:
        ticket: Changes whenever it goes on, so that an older reason to go on counts no more.
        woken: Whether somebody woke it, and not the time.
    """

    process: Process
    name: str
    greenlet: greenlet = field(init=False)
    ticket: int = 0
    woken: bool = False
    ended: bool = False
    watchers: list["Task"] = field(default_factory=list)


class World:
    """All that happens in one run.

    Attributes:
        random: Every choice comes from it.
        now: Seconds since the beginning.
        steps: Things that have happened.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.task: Task | None = None
        self._events: list[tuple[float, float, int, Task | Callable[[], None], int]] = []
        self._count = 0
        self._hub = getcurrent()
        self._processes: dict[Process, None] = {}

    @property
    def process(self) -> Process:
        """The one whose task runs now."""
        if self.task is None:
            raise RuntimeError("no task runs")
        return self.task.process

    # What tasks do.

    def park(self, seconds: float | None) -> bool:
        """Let others go on until somebody wakes this task, or so long; whether somebody did."""
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

    def wake(self, task: Task) -> None:
        """Let a parked task go on."""
        if not task.woken and not task.ended:
            task.woken = True
            self._add(self.now, task, task.ticket)

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """A new task, which begins a moment later."""
        task = Task(process, name)
        task.greenlet = greenlet(lambda: self._run(task, work), parent=self._hub)
        process.tasks[task] = None
        self._processes[process] = None
        self._add(self.now, task, task.ticket)
        return task

    def join(self, task: Task, seconds: float | None) -> None:
        """Wait until a task has ended, or so long."""
        if not task.ended and self.task is not None:
            task.watchers.append(self.task)
            self.park(seconds)

    def call_at(self, moment: float, action: Callable[[], None]) -> None:
        """Have something done at a moment, by no process."""
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
        """Kill all that is left."""
        for process in list(self._processes):
            self.kill(process)

    # The hub.

    def run(self, until: Callable[[], bool], seconds_max: float) -> bool:
        """Let things happen until a condition holds; False if it did not in so much time.

        Raises:
            Deadlock: Nothing can happen any more.
        """
        while not until():
            if not self._events:
                raise Deadlock
            if self._events[0][0] > seconds_max:
                self.now = seconds_max
                return False
            moment, _, _, what, ticket = heapq.heappop(self._events)
            self.now = max(self.now, moment)
            self.steps += 1
            if isinstance(what, Task):
                self._continue(what, ticket)
            else:
                what()
        return True

    def _add(self, moment: float, what: Task | Callable[[], None], ticket: int) -> None:
        """Plan something; of what is due at the same time, chance decides what comes first."""
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
        except Killed:
            pass
        finally:
            self._end(task)

    def _end(self, task: Task) -> None:
        task.ended = True
        task.process.tasks.pop(task, None)
        for watcher in task.watchers:
            self.wake(watcher)

    def _unwind(self, task: Task) -> None:
        """End a task where it waits."""
        running, self.task = self.task, task
        task.greenlet.parent = getcurrent()
        if task.greenlet:
            task.greenlet.throw(Killed)
        self.task = running
        self._end(task)


_worlds: list[World] = []


def current() -> World:
    """The world of the run."""
    return _worlds[-1]


def enter(world: World) -> None:
    """Make a world the one that the simulated library belongs to."""
    _worlds[:] = [world]
