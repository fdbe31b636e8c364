"""The parts of the standard library that wait or look at a clock, on virtual time.

`production` imports the farm's modules with these in place of the real ones.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, ParamSpec, Self, TypeVar

from tests.simulation.world import EPOCH_SECONDS, Effect, Task, current

P = ParamSpec("P")
T = TypeVar("T")

PACKAGE: Final = "embedfarm"
SIMULATED: Final = (
    "tests.simulation.farm",
    "tests.simulation.faults",
    "tests.simulation.run",
    "tests.simulation.monitor",
    "tests.simulation.judge",
    "tests.simulation.model_steps",
    "tests.simulation.model_watch",
    "tests.simulation.user_steps",
    "tests.simulation.pages",
    "tests.simulation.scene",
    "tests.simulation.shelf",
    "tests.simulation.shrink",
    "tests.simulation.sightings",
    "tests.simulation.source",
    "tests.simulation.storage",
    "tests.simulation.users",
    "tests.simulation.views",
)
NANOSECONDS: Final = 1_000_000_000


# time


def monotonic() -> float:
    """Return the seconds since the run began; they go on while a process is frozen."""
    world = current()
    world.effect(Effect.CLOCK)
    return world.now


def wall_time() -> float:
    """Return the Unix seconds by the process's clock."""
    world = current()
    world.effect(Effect.CLOCK)
    return EPOCH_SECONDS + world.now + world.process.clock_seconds


def sleep(seconds: float) -> None:
    """Let other tasks go on for so many virtual seconds."""
    current().park(seconds)


# threading


class Lock:
    """A lock that one task holds, like `threading.Lock`."""

    reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._held = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 # the library's
        """Take the lock like `threading.Lock`, waiting in virtual time."""
        world = current()
        deadline = math.inf if timeout < 0 else world.now + timeout
        while self._held and not (self.reentrant and self._owner is world.task):
            if not blocking or world.now >= deadline or world.task is None:
                return False
            self._waiters.append(world.task)
            world.park(None if deadline == math.inf else deadline - world.now)
        self._owner = world.task
        self._held += 1
        return True

    def release(self) -> None:
        """Release the lock once, and wake a waiter if it is free then."""
        self._held -= 1
        if not self._held:
            self._owner = None
            if self._waiters:
                current().wake(self._waiters.popleft())

    def release_all(self) -> int:
        """Release the lock however often it is held; return how often that was."""
        held, self._held = self._held, 1
        self.release()
        return held

    def locked(self) -> bool:
        """Tell whether somebody holds the lock."""
        return self._held > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its holder may take again, like `threading.RLock`."""

    reentrant = True


class Condition:
    """A condition on virtual time, like `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: deque[Task] = deque()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified, at most so many seconds; return whether it was."""
        world = current()
        task = world.task
        if task is None:
            raise RuntimeError("the hub cannot wait")
        self._waiters.append(task)
        held = self._lock.release_all()
        woken = world.park(timeout)
        if not woken:
            self._waiters.remove(task)
        for _ in range(held):
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until a predicate holds, at most so many seconds; return its last value."""
        deadline = None if timeout is None else monotonic() + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` waiters."""
        for _ in range(min(n, len(self._waiters))):
            current().wake(self._waiters.popleft())

    def notify_all(self) -> None:
        """Wake all waiters."""
        self.notify(len(self._waiters))


class Event:
    """An event on virtual time, like `threading.Event`."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._flag = False

    def is_set(self) -> bool:
        """Tell whether the event is set."""
        return self._flag

    def set(self) -> None:
        """Set the event, and wake all waiters."""
        self._flag = True
        self._condition.notify_all()

    def clear(self) -> None:
        """Unset the event."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most so many seconds; return whether it is."""
        with self._condition:
            return self._condition.wait_for(lambda: self._flag, timeout)


class Thread:
    """A task of the process that makes it, like `threading.Thread`."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: Sequence[object] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._work = functools.partial(target, *args)
        self.name = name
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        """Start the task."""
        world = current()
        self._task = world.spawn(world.process, self.name, self._work)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the task has ended, at most so many seconds."""
        if self._task is not None:
            current().join(self._task, timeout)

    def is_alive(self) -> bool:
        """Tell whether the task was started and has not ended."""
        return self._task is not None and not self._task.ended


# concurrent.futures


class Future(Generic[T]):
    """The result of work that a task does, like `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._done = Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def settle(self, work: Callable[[], T]) -> None:
        """Do the work, and keep its result or its error."""
        try:
            self._value.append(work())
        except BaseException as error:  # noqa: BLE001 # `result` raises it
            self._error = error
        self._done.set()

    def result(self) -> T:
        """Wait for the work; return its result, or raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]


class ThreadPoolExecutor:
    """A pool of one thread, like `concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        if max_workers != 1:
            raise NotImplementedError("more than one thread")
        self._todo: deque[Callable[[], None]] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._work, name=thread_name_prefix)
        self._thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the thread; return its future."""
        future = Future[T]()
        work = functools.partial(function, *args, **kwargs)
        self._todo.append(lambda: future.settle(work))
        self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 # the library's
        """Let the thread end when the queued calls are done or, if asked for, dropped."""
        if cancel_futures:
            self._todo.clear()
        self._closed = True
        self._changed.notify()
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
            if not self._todo:
                return
            self._todo.popleft()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _module(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _uuid4() -> uuid.UUID:
    return uuid.UUID(int=current().random.getrandbits(128), version=4)


def _simulated() -> dict[str, types.ModuleType]:
    """Return the simulated modules by the names under which they are imported."""
    modules = {
        "time": _module(
            "time",
            monotonic=monotonic,
            perf_counter=monotonic,
            time=wall_time,
            time_ns=lambda: int(wall_time() * NANOSECONDS),
            sleep=sleep,
            gmtime=time.gmtime,
            strftime=time.strftime,
        ),
        "threading": _module(
            "threading", Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=Thread
        ),
        "concurrent.futures": _module(
            "concurrent.futures", Future=Future, ThreadPoolExecutor=ThreadPoolExecutor
        ),
        "uuid": _module("uuid", uuid4=_uuid4),
        # What ends a process that is locked goes by the real clock.
        "faulthandler": _module("faulthandler", dump_traceback_later=lambda *_, **__: None),
        # It changes nothing that can be seen, and takes most of the time of a run.
        "gc": _module("gc", collect=lambda generation=2: generation * 0, disable=lambda: None),
    }
    with _replaced(modules):
        specification = importlib.util.find_spec("queue")
        if specification is None or specification.loader is None:
            raise ImportError("no queue")
        modules["queue"] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(modules["queue"])
    return modules


@contextlib.contextmanager
def _replaced(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    before = {name: sys.modules[name] for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.modules.update(before)


def production(module: str) -> None:
    """Import a module again, and the farm's packages with it, on virtual time."""
    importlib.import_module(module)  # for the libraries that it needs, which stay as they are
    for name in [each for each in sys.modules if _is_ours(each)]:
        del sys.modules[name]
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            delattr(sys.modules[package], child)
    with _replaced(_simulated()):
        importlib.import_module(module)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE or name in SIMULATED
