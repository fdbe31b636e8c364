"""Child processes, kept alive and stopped together.

Three ways out are covered. The supervisor stops: SIGTERM to every group, a drain, SIGKILL. A child
dies: what is left of its group is killed and the child starts again, later each time. The
supervisor itself is killed with -9: the write end of every child's stdin, the lifeline, closes with
it; a Python child notices through `watch_lifeline`, another one through `die_with_parent`.
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

LOGGER: Final = logging.getLogger(__name__)
RESTART_SECONDS_MIN: Final = 0.1
RESTART_SECONDS_MAX: Final = 5.0
HEALTHY_SECONDS: Final = 10.0
KILL_SECONDS: Final = 5.0
EXITS_MAX: Final = 1000
LOG_TAIL_BYTES: Final = 4096
NOT_STARTED: Final = 127
LIFELINE: Final = "EMBEDFARM_LIFELINE"

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


class ChildError(RuntimeError):
    """A child that ended for good; the message carries the end of its log."""


@dataclass(frozen=True)
class Child:
    """A process to keep alive.

    Attributes:
        name: Unique; names the log.
        command: Program and arguments.
        environment: Added to the supervisor's own.
        stop_signal: Asks the whole group to drain.
        die_with_parent: For programs that do not watch the lifeline: Linux sends SIGTERM when the
            supervisor dies. Elsewhere it has no effect.
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
        time: Unix time.
        restarted: Whether it starts again; False also for an exit that `stop` asked for.
    """

    name: str
    status: int
    time: float
    restarted: bool


class Supervisor:
    """Keeps children alive from `start` to `stop`, which a `with` block calls.

    Each child runs in a session and process group of its own, with its output appended to
    `<log_directory>/<name>.log`. All children stop at once: nest two supervisors where one child
    needs another one while it drains, such as a worker its server.

    Args:
        children: What to run.
        log_directory: Created when missing.
        drain_seconds: How long all children together may take to stop.
        fatal_statuses: Exit statuses after which a restart is in vain. Nor is a child restarted
            that ends by itself with status 0.
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

    def start(self) -> None:
        """Starts all children, without waiting until they are ready.

        Raises:
            FileNotFoundError: A program does not exist; nothing was started.
        """
        for child in self._children:
            if shutil.which(child.command[0]) is None:
                raise FileNotFoundError(f"{child.name}: no program {child.command[0]!r}")
        self._log_directory.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            # It starts the child and outlives it: Linux ties die_with_parent to the thread.
            thread = threading.Thread(target=self._keep, args=(child,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stops all children; a second call does nothing.

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
        """Runs the child until it ends for good; the body of its thread."""
        pause = 0.0
        while not self._stopping.wait(pause):
            started = time.monotonic()
            status = self._run(child)
            if not self._report(child, status):
                return
            pause = next_pause(pause, time.monotonic() - started)

    def _run(self, child: Child) -> int:
        """One run of the child, from start to exit."""
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
        """Starts the child, and lets it know of a stop that came first."""
        with self._lock, self._log(child).open("ab") as log:
            process = subprocess.Popen(
                _tied(child.command) if child.die_with_parent else child.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.environment, LIFELINE: "stdin"},
                start_new_session=True,
            )
            self._running[child.name] = child, process
            if self._stopping.is_set():
                _signal_group(process, child.stop_signal)
            return process

    def _report(self, child: Child, status: int) -> bool:
        """Records an exit; returns whether the child is to start again."""
        stopping = self._stopping.is_set()
        final = status in self._final_statuses
        if final and not stopping:
            self.failed = self.failed or self._failure(child, status)
        ended = Exit(child.name, status, time.time(), restarted=not (final or stopping))
        self.exits.append(ended)
        self._on_exit(ended)
        return ended.restarted

    def _failure(self, child: Child, status: int) -> ChildError:
        """The error for a child that ended for good."""
        path = self._log(child)
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        return ChildError(f"{child.name} ended with status {status}; the end of {path}:\n{tail}")

    def _log(self, child: Child) -> Path:
        """Where the child's output goes."""
        return self._log_directory / f"{child.name}.log"

    def _join(self, seconds: float) -> None:
        """Waits for all children to end, `seconds` in total."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def next_pause(pause: float, lived_seconds: float) -> float:
    """Seconds until the next start: doubled each time, back to the least after a healthy run."""
    if lived_seconds >= HEALTHY_SECONDS:
        return RESTART_SECONDS_MIN
    return min(max(2 * pause, RESTART_SECONDS_MIN), RESTART_SECONDS_MAX)


def stop_when_asked() -> threading.Event:
    """An event that SIGTERM, SIGINT or the end of the supervisor sets, for a process of its own."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: set_by_signal(stop))
    watch_lifeline(stop.set)
    return stop


def set_by_signal(event: threading.Event) -> None:
    """Set an event from a signal handler, a moment later and in a thread of its own.

    The thread that was interrupted may be looking at the event, and so have the lock of it: a
    handler that waited for that lock would wait for ever. (So it might for those that
    `threading.Thread` takes.)
    """
    _thread.start_new_thread(event.set, ())


def watch_lifeline(stop: Callable[[], object]) -> None:
    """Calls `stop` from a thread as soon as the supervisor of this process is gone.

    In a process that no supervisor started, whose stdin is somebody else's, it does nothing.
    """
    # Removed, so that this process's own children do not take their stdin for the lifeline.
    if os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_wait_end, args=(stop,), name="lifeline", daemon=True).start()


def _wait_end(stop: Callable[[], object]) -> None:
    """Calls `stop` at the end of stdin."""
    # Not sys.stdin.buffer: its lock, held by a daemon thread, aborts the interpreter at its exit.
    while os.read(0, 1):
        pass
    stop()


def _tied(command: list[str]) -> list[str]:
    """The command, with SIGTERM for the death of this process where the system offers that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals a child and all that it started, those that outlived it included."""
    # PermissionError is how macOS puts it that only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
