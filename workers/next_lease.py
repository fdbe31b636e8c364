"""The time at which a worker leases its next micro-batch, so that it is ready just in time."""

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from embedfarm.workers.leases import MicroBatch

LEAD_SECONDS: Final = 0.15  # before a micro-batch ends, the next one is wanted; or sooner,
LEADS: Final = 2.0  # if it takes long to make one ready: this times what the last one took
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


def time_to_lease(batch: MicroBatch, left: float, speed: float) -> float:
    """Return when the next micro-batch must be leased to be ready just in time.

    The later it is leased, the better its size is known, the less a slow worker keeps from others,
    and the sooner an urgent job is begun.

    Args:
        batch: The micro-batch that the device has.
        left: The share of it that is still to do.
        speed: The worker's tokens per second; 0, for which it is leased at once, if unknown.
    """
    tokens = left * (1 - batch.cached_share) * sum(lease.entry.tokens for lease in batch.leases)
    lead = max(LEAD_SECONDS, LEADS * (batch.fetched - batch.fetch_began))
    return time.monotonic() + tokens / speed - lead if speed else 0.0
