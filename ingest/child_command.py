"""One `embedfarm` command as a child of an RQ job, stopped with it."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, Final

from embedfarm.contract.processes import PARENT_PIPE, RUN_MODULE, set_by_signal
from embedfarm.contract.settings import Settings

LOOK_SECONDS: Final = 1.0
PARENT_SECONDS: Final = 0.5
GOING_DOWN_SECONDS: Final = 2.0
"""Who stops a host stops all its processes, and this one may be told after the command was."""
TAIL_BYTES: Final = 4096
INTERRUPTED: Final = 130  # status of a command that was stopped, and can go on

_STOP: Final = threading.Event()


class StopRequested(RuntimeError):
    """Raised when this process was asked to stop; the same command goes on from here later."""


class CommandFailed(RuntimeError):
    """Raised when a command ended badly; the message is the command's own."""


class CommandDied(RuntimeError):
    """Raised when a command was ended from outside; run again, it goes on from there."""


def stop_when_asked(parent: int) -> None:
    """Have commands interrupted from now on by SIGTERM, and by the death of the parent process."""
    signal.signal(signal.SIGTERM, lambda *_: set_by_signal(_STOP))
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent and not _STOP.wait(PARENT_SECONDS):
        pass
    _STOP.set()


def check_stop() -> None:
    """Raise if this process was asked to stop.

    Raises:
        StopRequested: After SIGTERM or the parent's death, once `stop_when_asked` was called.
    """
    if _STOP.is_set():
        raise StopRequested


def run_command(
    words: Sequence[str],
    settings: Settings,
    look: Callable[[], object] = lambda: None,
    statuses: Collection[int] = (0,),
) -> Any:  # noqa: ANN401 -- anything that JSON can say
    """Run `embedfarm` with these words to its end, and return what it printed as JSON.

    Args:
        words: Verb and arguments.
        settings: Settings, which the command gets as well.
        look: Called about once a second while the command runs.
        statuses: Exit statuses of a good end.

    Raises:
        StopRequested: This process was asked to stop; the command has ended, and can go on later.
        CommandDied: The command was killed or stopped, and not by this process.
        CommandFailed: The command ended with another status, or printed nothing.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as log:
        with subprocess.Popen(
            [*RUN_MODULE, "embedfarm", *words],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=log,
            env=os.environ | settings.environment() | {PARENT_PIPE: "stdin"},
        ) as child:
            try:
                status = _wait(child, look)
            finally:
                _stop(child, settings.drain_seconds)
        _check_end(words[0], status)
        said.seek(0)
        report = said.read()
        if status not in statuses or not report:
            raise CommandFailed(_last_line(log) or f"embedfarm {words[0]}: status {status}")
        return json.loads(report)


def _wait(child: subprocess.Popen[bytes], look: Callable[[], object]) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_SECONDS)
        check_stop()
        look()


def _check_end(verb: str, status: int) -> None:
    """Check that a command ended by itself, for better or worse.

    Raises:
        CommandDied: Somebody else ended the command.
        StopRequested: The command did not end by itself, nor may this process go on.
    """
    if status >= 0 and status != INTERRUPTED:
        return
    _STOP.wait(GOING_DOWN_SECONDS)
    check_stop()
    how = "stopped" if status == INTERRUPTED else f"ended by {name_signal(-status)}"
    raise CommandDied(f"embedfarm {verb} was {how}")


def name_signal(number: int) -> str:
    """Name a signal for people; SIGKILL with the hint that the memory may be full."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name}, as by a system that is out of memory" if number == signal.SIGKILL else name


def _stop(child: subprocess.Popen[bytes], seconds: float) -> None:
    """End a command that still runs, gently for some time."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _last_line(log: IO[bytes]) -> str:
    """Return the last line of a command's log, which is the sentence that it ends with."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - TAIL_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("embedfarm: ") if lines else ""
