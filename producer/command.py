"""One `embedfarm` command as a child of an RQ job, stopped with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, Final

from embedfarm.processes import set_by_signal
from embedfarm.settings import Settings

LOOK_SECONDS: Final = 1.0
PARENT_SECONDS: Final = 0.5
TAIL_BYTES: Final = 4096

_STOP: Final = threading.Event()


class Interrupted(RuntimeError):
    """This process was asked to stop; the same command goes on from here later."""


class CommandFailed(RuntimeError):
    """A command that ended badly; the message is its own."""


def stop_when_asked(parent: int) -> None:
    """From now on commands are interrupted by SIGTERM, and by the death of the parent process."""
    signal.signal(signal.SIGTERM, lambda *_: set_by_signal(_STOP))
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent and not _STOP.wait(PARENT_SECONDS):
        pass
    _STOP.set()


def check_stop() -> None:
    """Go on, or not.

    Raises:
        Interrupted: See `stop_when_asked`.
    """
    if _STOP.is_set():
        raise Interrupted


def run_command(
    words: Sequence[str],
    settings: Settings,
    look: Callable[[], object] = lambda: None,
    statuses: Collection[int] = (0,),
) -> Any:  # noqa: ANN401 -- anything that JSON can say
    """Run `embedfarm` with these words to its end, and give what it printed as JSON.

    Args:
        words: Verb and arguments.
        settings: The child's, too.
        look: Called about once a second while the command runs.
        statuses: Those of a good end.

    Raises:
        Interrupted: See `stop_when_asked`; the command has ended, and can go on later.
        CommandFailed: It ended with another status.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "embedfarm", *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=log,
            env=os.environ | settings.environment(),
        )
        try:
            status = _wait(child, look)
        finally:
            _stop(child, settings.drain_seconds)
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
    """The sentence that a command ends with."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - TAIL_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("embedfarm: ") if lines else ""
