"""What a worker has done with models, on its way to the farm's counters."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.model_counts import ModelCounters


@dataclass
class ModelTally:
    """Counts by model that the farm does not have yet; safe between threads.

    What a process that is killed has not handed over is lost.
    """

    counters: ModelCounters
    _counts: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, model: str, **counts: int) -> None:
        """Count something, by the names that `ModelCounts` has."""
        if any(counts.values()):
            with self._lock:
                self._counts.setdefault(model, Counter()).update(counts)

    def hand_over(self) -> None:
        """Add all counts to the farm's; what the server may not have got is kept for the next time.

        Raises:
            redis.ConnectionError: The server is away.
        """
        while (taken := self._take()) is not None:
            model, counts = taken
            try:
                self.counters.add(model, counts)
            except UNAVAILABLE:
                self.count(model, **counts)
                raise

    def _take(self) -> tuple[str, Counter[str]] | None:
        with self._lock:
            return self._counts.popitem() if self._counts else None
