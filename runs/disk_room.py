"""Waiting for a disk: for room where it is full, and for an output that somebody still holds."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from embedfarm.collector.collect import NO_ROOM
from embedfarm.collector.output_directory import OutputBusy

BUSY_SECONDS: Final = 2.0
BUSY_LOOK_SECONDS: Final = 0.05

T = TypeVar("T")

log = logging.getLogger(__name__)


def with_room(begin: Callable[[], T], out: Path, seconds: float, stop: threading.Event) -> T:
    """Return the answer of `begin`, which is repeated until the disk has room for it.

    Args:
        begin: Function that writes something below `out`, and may be called again.
        out: The output directory, which is named in the log.
        seconds: Time between two attempts, in seconds.
        stop: Event that ends the waiting.

    Raises:
        OSError: The disk refused for another reason, or was full when `stop` was set.
    """
    said = False
    while True:
        try:
            return begin()
        except OSError as error:
            if not is_full(error):
                raise
            if not said:
                log.warning("waits for room below %s: %s", out, error.strerror)
                said = True
            if stop.wait(seconds):
                raise


def is_full(error: BaseException) -> bool:
    """Tell whether an error is that of a disk that has no room."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def when_free(begin: Callable[[], T], stop: threading.Event) -> T:
    """Return the answer of `begin`, which is repeated for a moment while an output is busy.

    A command that was killed leaves its lock to children that it was just making, until each of
    them is a program of its own, or has noticed that its parent is gone.

    Args:
        begin: Function that opens an output.
        stop: Event that ends the waiting.

    Raises:
        OutputBusy: Somebody holds the output for longer, or until `stop` was set.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return begin()
        except OutputBusy:
            if time.monotonic() > until or stop.wait(BUSY_LOOK_SECONDS):
                raise
