"""What the farm remembers about how fast each worker is, by model and length class."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from embedfarm.farm import HISTORY_SECONDS, length_class
from embedfarm.records import Completion, Rate

LENGTH_CLASSES: Final = 32


@dataclass
class History:
    """Throughput by worker, model and length class: an exponential average over working time.

    Work done `half_life_seconds` of working time ago counts half, so that many short micro-batches
    weigh as much as one long one, and a first one, slow from warming up, is soon outvoted. Seeded
    from the rates that the server kept, which count as long experience, it survives jobs and
    restarts.

    Attributes:
        half_life_seconds: Working time in which the weight of a micro-batch halves.
        rates: What is known, by `rate_key`.
        changed: Keys of rates that were not stored yet.
    """

    half_life_seconds: float
    rates: dict[str, Rate] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    _worked: dict[str, float] = field(default_factory=dict)  # seconds in rates not from the server

    def learn(
        self, completions: Iterable[Completion], means: Mapping[str, float], now: float
    ) -> None:
        """Take completions in; those without tokens or time say nothing.

        Args:
            completions: Any number.
            means: Mean tokens of a chunk by job: a micro-batch belongs to its job's length class,
                whatever its own mean happens to be.
            now: Unix time.
        """
        for done in completions:
            if done.tokens <= 0 or done.seconds <= 0:
                continue
            mean = means.get(done.job, done.tokens / max(1, done.chunks))
            key = rate_key(done.worker, done.model, length_class(mean))
            self.rates[key] = self._average(key, done, now)
            self.changed.add(key)

    def _average(self, key: str, done: Completion, now: float) -> Rate:
        speed = done.tokens / done.seconds
        known = self.rates.get(key)
        if known is None:
            self._worked[key] = done.seconds
            return Rate(
                tokens_per_second=speed,
                overhead_seconds=done.overhead_seconds,
                updated=now,
                samples=1,
            )
        worked = self._worked.get(key, math.inf) + done.seconds
        self._worked[key] = worked
        weight = self._weight(done.seconds) / self._weight(worked)
        overhead = mix(known.overhead_seconds, done.overhead_seconds, weight)
        return Rate(
            tokens_per_second=mix(known.tokens_per_second, speed, weight),
            # What grows with the micro-batch, or is a wait for work, is no fixed overhead.
            overhead_seconds=min(overhead, done.overhead_seconds),
            updated=now,
            samples=known.samples + 1,
        )

    def _weight(self, seconds: float) -> float:
        """Share of the latest `seconds` in an average over all time."""
        return -math.expm1(-math.log(2) * seconds / self.half_life_seconds)

    def rate(self, worker: str, model: str, chunk_tokens_mean: float) -> Rate | None:
        """The rate for chunks of this length, else of the nearest length class; None if unknown."""
        wanted = length_class(chunk_tokens_mean)
        nearest = sorted(range(LENGTH_CLASSES), key=lambda each: (abs(each - wanted), each))
        keys = (rate_key(worker, model, each) for each in nearest)
        return next((self.rates[key] for key in keys if key in self.rates), None)

    def take_changes(self, now: float) -> tuple[Mapping[str, Rate], list[str]]:
        """Rates to store since the last call, and the keys of those too old to believe."""
        old = [k for k, rate in self.rates.items() if now - rate.updated > HISTORY_SECONDS]
        for key in old:
            del self.rates[key]
            self._worked.pop(key, None)
        changes = {key: self.rates[key] for key in self.changed if key in self.rates}
        self.changed.clear()
        return changes, old


def rate_key(worker: str, model: str, length: int) -> str:
    """Where the rate for a length class is kept."""
    return f"{worker}|{model}|{length}"


def mix(old: float, new: float, weight: float) -> float:
    """Average of two numbers, the new one with this share."""
    return old + weight * (new - old)
