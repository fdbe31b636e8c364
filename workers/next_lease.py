"""The time at which a worker leases its next micro-batch, so that it is ready just in time."""

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Final

IN_HAND: Final = math.inf  # the time while one is leased and not begun


@dataclass
class NextLease:
    """Time, by the monotonic clock, to lease the next micro-batch; safe between threads."""

    _at: float = 0.0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, at: float) -> None:
        """Set the time."""
        with self._changed:
            self._at = at
            self._changed.notify()

    def want(self, at: float) -> None:
        """Correct the time, unless the next micro-batch is in hand."""
        with self._changed:
            if self._at < IN_HAND:
                self._at = at
                self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the time; tell whether it has come."""
        with self._changed:
            left = self._at - time.monotonic()
            if left > 0:
                self._changed.wait(min(left, seconds))
            return self._at <= time.monotonic()
