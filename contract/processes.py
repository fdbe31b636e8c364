"""Child processes, kept alive and stopped together.

Three ways out are covered. The supervisor stops: SIGTERM to every group, a drain, SIGKILL. A child
dies: what is left of its group is killed and the child starts again, later each time. The
supervisor itself is killed with -9: the write end of every child's stdin, the parent pipe, closes
with it; a Python child notices by `watch_parent_pipe`, another one by `die_with_parent`.
"""

import _thread
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.private_directories import make_private

LOGGER: Final = logging.getLogger(__name__)
RESTART_SECONDS_MIN: Final = 0.1
RESTART_SECONDS_MAX: Final = 5.0
HEALTHY_SECONDS: Final = 10.0
KILL_SECONDS: Final = 5.0
EXITS_MAX: Final = 1000
LOG_TAIL_BYTES: Final = 4096
NOT_STARTED: Final = 127
RAISED: Final = 1  # status of a Python program that an exception has ended
STARTS_MAX: Final = 3  # that fail in a row before somebody is told
RUN_MODULE: Final = (sys.executable, "-P", "-m")
"""Begins the command of a child; a `queue.py` in the user's directory is no module of Python's."""
RUN_ROLE: Final = (*RUN_MODULE, "embedfarm.contract.quick_imports")
"""Begins the command of a child that is a role: the module follows, and its arguments."""
PARENT_PIPE: Final = "EMBEDFARM_PARENT_PIPE"
RESTARTS: Final = "EMBEDFARM_RESTARTS"
"""How many times the supervisor has started a child before."""

# An interpreter that becomes the program: Popen's preexec_fn can deadlock where threads run. It
# asks for SIGTERM at the supervisor's death (1 is PR_SET_PDEATHSIG), looks whether that has
# happened already, and undoes Python's own SIG_IGN, which the program would inherit.
_TIE: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildError(EmbedfarmError, RuntimeError):
    """Raised when a child ended for good; the message carries the end of its log."""


@dataclass(frozen=True)
class Child:
    """A process to keep alive.

    Attributes:
        name: Unique name, also that of the log.
        command: Program and arguments.
        environment: Variables added to the supervisor's own.
        stop_signal: Signal that asks the whole group to drain.
        die_with_parent: Whether Linux sends SIGTERM when the supervisor dies, for programs that do
            not watch the parent pipe. Elsewhere it has no effect.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    stop_signal: signal.Signals = signal.SIGTERM
    die_with_parent: bool = False


@dataclass(frozen=True)
class Exit:
    """The end of one run of a child.

    Attributes:
        name: The child's name.
        status: Exit status; negative for a signal, `NOT_STARTED` when the system refused it.
        time: Unix time of the exit.
        restarted: Whether it starts again; False also for an exit that `stop` asked for.
        count: How many times the child has ended, this one included.
    """

    name: str
    status: int
    time: float
    restarted: bool
    count: int


class Supervisor:
    """Supervisor that keeps children alive from `start` to `stop`, which a `with` block calls.

    Each child runs in a session and process group of its own, with its output appended to
    `<log_directory>/<name>.log`. All children stop at once: nest two supervisors where one child
    needs another one while it drains, such as a worker its server.

    Args:
        children: Processes to keep alive.
        log_directory: Directory of the logs, created when missing.
        drain_seconds: How long all children together may take to stop.
        fatal_statuses: Exit statuses after which a restart is in vain. A child that ends by itself
            with status 0 is not restarted either.
        on_exit: Called after each exit, in the child's thread; it neither raises nor calls `stop`.

    Attributes:
        exits: The last exits, oldest first.
        failed: The first child that ended for good although nobody asked it to.
    """

    def __init__(
        self,
        children: Sequence[Child],
        log_directory: Path,
        drain_seconds: float,
        fatal_statuses: Collection[int] = (2,),
        on_exit: Callable[[Exit], object] = lambda _: None,
    ) -> None:
        self.exits: deque[Exit] = deque(maxlen=EXITS_MAX)
        self.failed: ChildError | None = None
        self._log_directory = log_directory
        self._drain_seconds = drain_seconds
        self._final_statuses = {0, *fatal_statuses}
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._running: dict[str, tuple[Child, subprocess.Popen[bytes]]] = {}
        self._children = children
        self._threads: list[threading.Thread] = []
        self._failed_starts: dict[str, int] = {}  # in a row, by the child's name
        self._ends: dict[str, int] = {}  # of all runs so far, by the child's name

    def start(self) -> None:
        """Start all children, without waiting until they are ready.

        Raises:
            FileNotFoundError: A program does not exist; nothing was started.
        """
        for child in self._children:
            program = child.command[0]
            # `which` asks what the user may, who may have capabilities beside that.
            if shutil.which(program) is None and not Path(program).is_file():
                raise FileNotFoundError(f"{child.name}: no program {program!r}")
        make_private(self._log_directory)
        for child in self._children:
            # It starts the child and outlives it: Linux ties die_with_parent to the thread.
            thread = threading.Thread(target=self._keep, args=(child,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop all children; a second call does nothing.

        A process that survives even SIGKILL for `KILL_SECONDS`, stuck in a driver, is left behind.
        """
        with self._lock:
            self._stopping.set()
            for child, process in self._running.values():
                _signal_group(process, child.stop_signal)
        self._join(self._drain_seconds)
        with self._lock:
            for _, process in self._running.values():
                _signal_group(process, signal.SIGKILL)
        self._join(KILL_SECONDS)

    def unstartable(self, beginning: str = "") -> ChildError | None:
        """Return an error if none of the children gets beyond its start, else None.

        They are started again nevertheless, in case that what they lack comes.

        Args:
            beginning: Beginning of the names of the children that are meant.
        """
        meant = [child for child in self._children if child.name.startswith(beginning)]
        if not meant or any(self._failed_starts.get(each.name, 0) < STARTS_MAX for each in meant):
            return None
        return self._failure(meant[0], RAISED)

    @property
    def names(self) -> list[str]:
        """Names of all children, in alphabetical order."""
        return sorted(child.name for child in self._children)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now, by name."""
        with self._lock:
            return {name: process.pid for name, (_, process) in self._running.items()}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _keep(self, child: Child) -> None:
        """Run the child until it ends for good, as the body of its thread."""
        pause = 0.0
        while not self._stopping.wait(pause):
            started = time.monotonic()
            status = self._run(child)
            lived = time.monotonic() - started
            failed = status == RAISED and lived < HEALTHY_SECONDS
            before = self._failed_starts.get(child.name, 0)
            self._failed_starts[child.name] = before + 1 if failed else 0
            if not self._report(child, status):
                return
            pause = next_pause(pause, lived)

    def _run(self, child: Child) -> int:
        """Run the child once, from start to exit, and return its exit status."""
        try:
            process = self._spawn(child)
        except OSError as error:  # out of memory, processes or files: may pass, so it is retried
            LOGGER.warning("%s does not start: %s", child.name, error)
            return NOT_STARTED
        with process:
            status = process.wait()
        with self._lock:
            del self._running[child.name]
            _signal_group(process, signal.SIGKILL)
        return status

    def _spawn(self, child: Child) -> subprocess.Popen[bytes]:
        """Start the child, and signal it at once if a stop came first."""
        with self._lock, self._log(child).open("ab") as log:
            process = subprocess.Popen(
                _tied(child.command) if child.die_with_parent else child.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **child.environment,
                    PARENT_PIPE: "stdin",
                    RESTARTS: str(self._ends.get(child.name, 0)),
                },
                start_new_session=True,
            )
            self._running[child.name] = child, process
            if self._stopping.is_set():
                _signal_group(process, child.stop_signal)
            return process

    def _report(self, child: Child, status: int) -> bool:
        """Record an exit; return whether the child is to start again."""
        stopping = self._stopping.is_set()
        final = status in self._final_statuses
        if final and not stopping:
            self.failed = self.failed or self._failure(child, status)
        count = self._ends[child.name] = self._ends.get(child.name, 0) + 1
        is_restarted = not (final or stopping)
        ended = Exit(child.name, status, time.time(), restarted=is_restarted, count=count)
        self.exits.append(ended)
        self._on_exit(ended)
        return ended.restarted

    def _failure(self, child: Child, status: int) -> ChildError:
        """Return the error for a child that ended for good, with the end of its log."""
        path = self._log(child)
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        return ChildError(f"{child.name} ended with status {status}; the end of {path}:\n{tail}")

    def _log(self, child: Child) -> Path:
        """Return the path of the child's log."""
        return self._log_directory / f"{child.name}.log"

    def _join(self, seconds: float) -> None:
        """Wait for all children to end, `seconds` in total."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def next_pause(pause: float, lived_seconds: float) -> float:
    """Return the seconds until the next start: doubled each time, least after a healthy run."""
    if lived_seconds >= HEALTHY_SECONDS:
        return RESTART_SECONDS_MIN
    return min(max(2 * pause, RESTART_SECONDS_MIN), RESTART_SECONDS_MAX)


def stop_when_asked() -> threading.Event:
    """Return an event that SIGTERM, SIGINT or the end of this process's supervisor sets."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: set_by_signal(stop))
    watch_parent_pipe(stop.set)
    return stop


def set_by_signal(event: threading.Event) -> None:
    """Set an event from a signal handler, a moment later and in a thread of its own.

    The interrupted thread may be looking at the event, and so hold its lock: a handler that waited
    for that lock would wait for ever. The same might happen with the locks that `threading.Thread`
    takes, so the new thread is a bare one.
    """
    _thread.start_new_thread(event.set, ())


def restarts() -> int:
    """Return how many times this process's supervisor had to start it again; 0 without one."""
    count = os.environ.get(RESTARTS, "")
    return int(count) if count.isdecimal() else 0


def watch_parent_pipe(stop: Callable[[], object]) -> None:
    """Call `stop` from a thread as soon as the supervisor of this process is gone.

    In a process that no supervisor started, whose stdin is somebody else's, it does nothing.
    """
    # Removed, so that this process's own children do not take their stdin for the parent pipe.
    if os.environ.pop(PARENT_PIPE, ""):
        threading.Thread(target=_wait_end, args=(stop,), name="parent-pipe", daemon=True).start()


def _wait_end(stop: Callable[[], object]) -> None:
    """Call `stop` at the end of stdin."""
    # Not sys.stdin.buffer: its lock, held by a daemon thread, aborts the interpreter at its exit.
    while os.read(0, 1):
        pass
    stop()


def _tied(command: list[str]) -> list[str]:
    """Return the command, changed on Linux so that it gets SIGTERM when this process dies."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a child and all processes that it started, also if they outlived it."""
    # PermissionError is how macOS puts it that only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
