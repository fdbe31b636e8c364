"""What the farm remembers about how fast each worker is, by model and length class."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from embedfarm.farm import HISTORY_SECONDS, length_class
from embedfarm.records import Completion, Rate


@dataclass
class History:
    """Throughput by worker, model and length class: an exponential average over working time.

    A completion that took s seconds replaces the share 1 - 2^(-s / half_life) of the average, so
    that many short micro-batches weigh as much as one long one. Seeded from the rates that the
    server kept, it survives jobs and restarts.
    """

    half_life_seconds: float
    rates: dict[str, Rate] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def learn(
        self, completions: Iterable[Completion], means: Mapping[str, float], now: float
    ) -> None:
        """Take completions in.

        Args:
            completions: Any number.
            means: Mean tokens of a chunk by job: a micro-batch belongs to its job's length class,
                whatever its own mean happens to be.
            now: Unix time.
        """
        for done in completions:
            mean = means.get(done.job, done.tokens / max(1, done.chunks))
            key = rate_key(done.worker, done.model, mean)
            self.rates[key] = self._average(self.rates.get(key), done, now)
            self.changed.add(key)

    def _average(self, known: Rate | None, done: Completion, now: float) -> Rate:
        speed = done.tokens / done.seconds
        if known is None:
            return Rate(
                tokens_per_second=speed,
                overhead_seconds=done.overhead_seconds,
                updated=now,
                samples=1,
            )
        weight = 1 - 0.5 ** (done.seconds / self.half_life_seconds)
        return Rate(
            tokens_per_second=known.tokens_per_second + weight * (speed - known.tokens_per_second),
            overhead_seconds=known.overhead_seconds
            + weight * (done.overhead_seconds - known.overhead_seconds),
            updated=now,
            samples=known.samples + 1,
        )

    def rate(self, worker: str, model: str, chunk_tokens_mean: float) -> Rate | None:
        """The rate for chunks of this length, else of the nearest length class; None if unknown."""
        wanted = length_class(chunk_tokens_mean)
        known = {
            int(key.rpartition("|")[2]): rate
            for key, rate in self.rates.items()
            if key.startswith(f"{worker}|{model}|")
        }
        if not known:
            return None
        return known[min(known, key=lambda each: (abs(each - wanted), each))]

    def take_changes(self, now: float) -> tuple[Mapping[str, Rate], list[str]]:
        """Rates to store since the last call, and the keys of those too old to believe."""
        old = [k for k, rate in self.rates.items() if now - rate.updated > HISTORY_SECONDS]
        for key in old:
            del self.rates[key]
        changes = {key: self.rates[key] for key in self.changed if key in self.rates}
        self.changed.clear()
        return changes, old


def rate_key(worker: str, model: str, chunk_tokens_mean: float) -> str:
    """Where a rate is kept."""
    return f"{worker}|{model}|{length_class(chunk_tokens_mean)}"
