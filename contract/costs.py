"""Cost model: the seconds that a batch takes, by its tokens and their texts' lengths.

    seconds = a + b * tokens + c * sum of squared lengths

a is the cost of a launch, b that of the matrices, which see each token, c that of attention, which
sees each pair of tokens of a text. A worker learns them from device batches, padding included, the
scheduler from micro-batches, by least squares of the relative error, in which older batches count
less and less (Ljung, System Identification, 1999, section 11.2).
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SCALES: Final = np.asarray([1.0, 1e3, 1e5])  # so that the three terms are of one size
RANK_MIN: Final = 1e-9  # batches that are all alike do not tell the terms apart


class Cost(NamedTuple):
    """Seconds that each term of the cost model contributes.

    Attributes:
        launch: Seconds for a batch by itself.
        token: Seconds for each token.
        pair: Seconds for each pair of tokens of one text.
    """

    launch: float
    token: float
    pair: float

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds that a batch takes."""
        return self.launch + self.token * tokens + self.pair * pairs


@dataclass
class Costs:
    """Estimator that learns how long batches of one kind take.

    Attributes:
        memory_batches: Number of batches after which a batch counts 1 / e.
        batches_min: Number of batches below which no cost is learned.
    """

    memory_batches: int = 1000
    batches_min: int = 50
    _moments: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    _count: int = 0
    _found: Cost | None = None
    _found_at: int = -1

    def observe(self, tokens: float, pairs: float, seconds: float) -> None:
        """Learn from a batch how long so many tokens and pairs took."""
        if seconds <= 0:
            return
        terms = np.asarray([1.0, tokens, pairs]) / (SCALES * seconds)
        kept = 1 - 1 / self.memory_batches
        self._moments = kept * self._moments + np.outer(terms, terms)
        self._targets = kept * self._targets + terms
        self._count += 1

    def estimate(self, tokens: float, pairs: float) -> float:
        """Estimate the time of a batch by the learned cost, before that by the mean rate.

        Returns:
            Seconds, 0 when no batch has run yet.
        """
        cost = self.cost()
        if cost is not None:
            return cost.seconds(tokens, pairs)
        # The best b alone: of b * tokens / seconds = 1, least squares.
        squares = self._moments[1, 1]
        rate = self._targets[1] / squares / SCALES[1] if squares else 0.0
        return float(rate * tokens)

    def cost(self) -> Cost | None:
        """Return the learned cost, None until batches differ enough to tell the terms apart."""
        if self._found_at != self._count:
            self._found, self._found_at = self._find(), self._count
        return self._found

    def _find(self) -> Cost | None:
        if self._count < self.batches_min:
            return None
        # The second round leaves attention out, where its part is all noise.
        for terms in (3, 2):
            moments, targets = self._moments[:terms, :terms], self._targets[:terms]
            found, _, rank, _ = np.linalg.lstsq(moments, targets, rcond=RANK_MIN)
            if rank == terms and (found > 0).all():
                launch, token, *pair = found / SCALES[:terms]
                return Cost(float(launch), float(token), float(pair[0]) if pair else 0.0)
        return None
