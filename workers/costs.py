"""What device batches of a model take on this device, learned from those that ran.

    seconds = a + b * padded tokens + c * sum of squared lengths

a is a launch, b the matrices that see each token, c attention, which sees each pair of tokens. The
figures are those of least squares of the relative error, in which older batches count less and less
(Ljung, System Identification, 1999, section 11.2).
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MEMORY_BATCHES: Final = 1000  # a batch so many batches ago counts 1 / e
BATCHES_MIN: Final = 50  # fewer say too little
SCALES: Final = np.asarray([1.0, 1e3, 1e5])  # so that the three terms are of one size
RANK_MIN: Final = 1e-9  # batches that are all alike do not tell the terms apart


class Cost(NamedTuple):
    """Seconds by term.

    Attributes:
        launch: Of a batch by itself.
        token: Of a padded token.
        pair: Of a pair of tokens of one text, padding included.
    """

    launch: float
    token: float
    pair: float

    def seconds(self, rows: int, longest: int) -> float:
        """What a batch takes."""
        return self.launch + self.token * rows * longest + self.pair * rows * longest**2


@dataclass
class BatchCosts:
    """Learns the cost of one model's device batches."""

    _moments: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    _count: int = 0

    def observe(self, rows: int, longest: int, seconds: float) -> None:
        """Take in that a batch of so many rows, padded to the longest, took so long."""
        if seconds <= 0:
            return
        tokens = rows * longest
        terms = np.asarray([1.0, tokens, tokens * longest]) / (SCALES * seconds)
        kept = 1 - 1 / MEMORY_BATCHES
        self._moments = kept * self._moments + np.outer(terms, terms)
        self._targets = kept * self._targets + terms
        self._count += 1

    def estimate(self, rows: int, longest: int) -> float:
        """Seconds that a batch will take: by what was learned, before that by the mean rate.

        Returns:
            0 when no batch has run yet.
        """
        cost = self.cost()
        if cost is not None:
            return cost.seconds(rows, longest)
        # The best b alone: of b * tokens / seconds = 1, least squares.
        squares = self._moments[1, 1]
        rate = self._targets[1] / squares / SCALES[1] if squares else 0.0
        return float(rate * rows * longest)

    def cost(self) -> Cost | None:
        """What was learned; None until it makes sense: batches must differ, and cost something."""
        if self._count < BATCHES_MIN:
            return None
        # Without attention where that is all noise.
        for terms in (3, 2):
            moments, targets = self._moments[:terms, :terms], self._targets[:terms]
            found, _, rank, _ = np.linalg.lstsq(moments, targets, rcond=RANK_MIN)
            if rank == terms and (found > 0).all():
                launch, token, *pair = found / SCALES[:terms]
                return Cost(float(launch), float(token), float(pair[0]) if pair else 0.0)
        return None
