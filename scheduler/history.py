"""Throughput history: how fast each worker is, by model and length class.

Two predictors run side by side. The exponential average of tokens per second follows drift, and
takes a fixed overhead for slowness when micro-batches get short. The cost model (`contract.costs`)
tells them apart, and carries over from one length of chunks to another; its level follows drift as
the average does. Of each worker the one counts whose own recent error is less.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from embedfarm.contract.costs import Cost, Costs
from embedfarm.contract.farm_client import length_class
from embedfarm.contract.farm_statistics import HISTORY_SECONDS
from embedfarm.contract.records import Completion, Rate

COSTS_MEMORY: Final = 60  # micro-batches
COSTS_MIN: Final = 8  # micro-batches from which a cost model is believed
ERROR_WEIGHT: Final = 0.2  # of the latest micro-batch in the error of a predictor
SPEED_FACTOR_MAX: Final = 4.0  # a cost model that is further from the average is no model
PRIOR_SECONDS: Final = 0.25  # of working time that a rate from the server counts for

Kind = tuple[str, int]  # model and length class


@dataclass
class Predictors:
    """The cost model of a worker and a model, and how far both predictors were off lately.

    Attributes:
        costs: The cost model.
        level: Exponential average of what took place over what it predicted.
        costs_error: Mean of |took / predicted - 1|, None before the first prediction.
        rate_error: Mean of |took / predicted - 1| of the exponential average, None at first.
    """

    costs: Costs = field(default_factory=lambda: Costs(COSTS_MEMORY, COSTS_MIN))
    level: float = 1.0
    costs_error: float | None = None
    rate_error: float | None = None

    def judge(self, done: Completion, rate: Rate | None, weight: float) -> None:
        """Compare what both would have predicted with what happened; then learn from it.

        Args:
            done: The micro-batch that was completed.
            rate: The exponential average before it.
            weight: Weight of this micro-batch in the level.
        """
        cost = self.costs.cost()
        if rate is not None:
            predicted = done.tokens / rate.tokens_per_second
            self.rate_error = _error(self.rate_error, done.seconds, predicted)
            if cost is not None:
                predicted = cost.seconds(done.tokens, done.pairs)
                self.costs_error = _error(self.costs_error, done.seconds, self.level * predicted)
                self.level = mix(self.level, done.seconds / predicted, weight)
        self.costs.observe(done.tokens, done.pairs, done.seconds)

    def better(self, rate: Rate, pairs_per_token: float) -> Rate:
        """Return the rate by the better predictor, for chunks of such lengths.

        The overhead stays the measured one: least squares cannot tell it from drift well enough to
        size micro-batches by it.
        """
        cost = self._believed()
        if cost is None:
            return rate
        speed = 1 / (cost.token + cost.pair * pairs_per_token) / self.level
        if not 1 / SPEED_FACTOR_MAX < speed / rate.tokens_per_second < SPEED_FACTOR_MAX:
            return rate
        return msgspec.structs.replace(rate, tokens_per_second=speed)

    def predict(self, done: Completion, rate: Rate) -> float:
        """Predict the seconds that a micro-batch takes, by the better predictor."""
        cost = self._believed()
        if cost is None:
            return done.tokens / rate.tokens_per_second
        return self.level * cost.seconds(done.tokens, done.pairs)

    def _believed(self) -> Cost | None:
        """Return the cost model, if it was the better predictor lately."""
        if self.costs_error is None or self.rate_error is None:
            return None
        return self.costs.cost() if self.costs_error < self.rate_error else None


@dataclass
class History:
    """Throughput by worker, model and length class: an exponential average over working time.

    Work done `half_life_seconds` of working time ago counts half, so that many short micro-batches
    weigh as much as one long one, and a first one, slow from warming up, is soon outvoted. So is
    what the server kept from earlier jobs: the device may be shared, throttled or another one now.

    Attributes:
        half_life_seconds: Working time in which the weight of a micro-batch halves.
    """

    half_life_seconds: float
    _rates: dict[Kind, dict[str, Rate]] = field(default_factory=lambda: defaultdict(dict))
    _worked: dict[tuple[Kind, str], float] = field(default_factory=dict)
    _changed: set[tuple[Kind, str]] = field(default_factory=set)
    _predictors: dict[tuple[str, str], Predictors] = field(
        default_factory=lambda: defaultdict(Predictors)
    )
    _pairs_per_token: dict[Kind, float] = field(default_factory=dict)

    def recall(self, stored: Mapping[str, Rate]) -> None:
        """Load the rates that the server kept, by `rate_key`."""
        for key, rate in stored.items():
            worker, _, kind = key.partition("|")
            model, _, length = kind.rpartition("|")
            self._rates[model, int(length)][worker] = rate

    def learn(
        self, completions: Iterable[Completion], means: Mapping[str, float], now: float
    ) -> None:
        """Take completions in; those without tokens or time say nothing.

        Args:
            completions: Completions, any number of them.
            means: Mean tokens of a chunk by job: a micro-batch belongs to its job's length class,
                whatever its own mean happens to be.
            now: Unix time.
        """
        for done in completions:
            if done.tokens <= 0 or done.seconds <= 0:
                continue
            mean = means.get(done.job, done.tokens / max(1, done.chunks))
            kind = done.model, length_class(mean)
            known = self._pairs_per_token.get(kind, done.pairs / done.tokens)
            self._pairs_per_token[kind] = mix(known, done.pairs / done.tokens, ERROR_WEIGHT)
            rate, weight = self._rates[kind].get(done.worker), self._weight(done.seconds)
            self._predictors[done.model, done.worker].judge(done, rate, weight)
            self._rates[kind][done.worker] = self._average(kind, done, now)
            self._changed.add((kind, done.worker))

    def _average(self, kind: Kind, done: Completion, now: float) -> Rate:
        speed = done.tokens / done.seconds
        known = self._rates[kind].get(done.worker)
        if known is None:
            self._worked[kind, done.worker] = done.seconds
            return Rate(
                tokens_per_second=speed,
                overhead_seconds=done.overhead_seconds,
                updated=now,
                samples=1,
            )
        worked = self._worked.get((kind, done.worker), PRIOR_SECONDS) + done.seconds
        self._worked[kind, done.worker] = worked
        weight = self._weight(done.seconds) / self._weight(worked)
        overhead = mix(known.overhead_seconds, done.overhead_seconds, weight)
        return msgspec.structs.replace(
            known,
            tokens_per_second=mix(known.tokens_per_second, speed, weight),
            # What grows with the micro-batch, or is a wait for work, is no fixed overhead.
            overhead_seconds=min(overhead, done.overhead_seconds),
            updated=now,
            samples=known.samples + 1,
        )

    def _weight(self, seconds: float) -> float:
        """Return the share of the latest `seconds` in an average over all time."""
        return -math.expm1(-math.log(2) * seconds / self.half_life_seconds)

    def rates(self, model: str, length: int) -> Mapping[str, Rate]:
        """Return rates by worker for chunks of a length class, by the better predictor of each.

        The exponential average of a class that is not known is that of the nearest one.
        """
        classes = [known for name, known in self._rates if name == model]
        merged: dict[str, Rate] = {}
        for each in sorted(classes, key=lambda each: (-abs(each - length), -each)):
            merged |= self._rates[model, each]
        pairs = self._pairs_per_token.get((model, length), float(2**length))
        return {
            worker: self._predictors[model, worker].better(rate, pairs)
            if (model, worker) in self._predictors
            else rate
            for worker, rate in merged.items()
        }

    def predict(self, done: Completion, chunk_tokens_mean: float) -> float:
        """Predict the seconds of a micro-batch, by what is known before it is learned; else 0."""
        kind = done.model, length_class(chunk_tokens_mean)
        rate = self._rates.get(kind, {}).get(done.worker)
        if rate is None:
            return 0.0
        return self._predictors[done.model, done.worker].predict(done, rate)

    def take_changes(self, now: float) -> tuple[Mapping[str, Rate], list[str]]:
        """Return rates that changed since the last call, and keys of those too old to believe."""
        old = []
        for kind, rates in self._rates.items():
            for worker in [w for w, rate in rates.items() if now - rate.updated > HISTORY_SECONDS]:
                del rates[worker]
                self._worked.pop((kind, worker), None)
                old.append(rate_key(worker, *kind))
        if old:
            self._forget()
        changes = {
            rate_key(worker, *kind): self._rates[kind][worker]
            for kind, worker in sorted(self._changed)
            if worker in self._rates[kind]
        }
        self._changed.clear()
        return changes, old

    def _forget(self) -> None:
        """Drop what belongs to rates that are gone."""
        for kind in [kind for kind, rates in self._rates.items() if not rates]:
            del self._rates[kind]
            self._pairs_per_token.pop(kind, None)
        known = {(model, worker) for (model, _), rates in self._rates.items() for worker in rates}
        for key in self._predictors.keys() - known:
            del self._predictors[key]


def rate_key(worker: str, model: str, length: int) -> str:
    """Return the key under which the rate for a length class is kept."""
    return f"{worker}|{model}|{length}"


def _error(known: float | None, took: float, predicted: float) -> float:
    """Return the recent error of a predictor after one more micro-batch."""
    error = abs(took / predicted - 1) if predicted > 0 else 1.0
    return error if known is None else mix(known, error, ERROR_WEIGHT)


def mix(old: float, new: float, weight: float) -> float:
    """Return the average of two numbers, with `weight` as the share of the new one."""
    return old + weight * (new - old)
