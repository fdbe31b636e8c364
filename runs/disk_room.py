"""Waiting for room on a disk that is full."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from embedfarm.collector.collect import NO_ROOM

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
