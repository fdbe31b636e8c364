"""How much arithmetic a model is, beside what its device can do: a worker's share of the peak."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Arithmetic:
    """Operations of a model, and the device's peak; a multiplication and an addition count two.

    Attributes:
        per_token: Operations for each token, whatever the length of its text.
        per_token_squared: Operations for each pair of tokens of a text: attention.
        peak_per_second: Operations per second in multiplying large matrices; 0 when unknown.
    """

    per_token: float = 0.0
    per_token_squared: float = 0.0
    peak_per_second: float = 0.0

    def flops(self, lengths: NDArray[np.integer]) -> float:
        """Return the operations for texts of these lengths without padding.

        For a plain encoder it is 2 L (4 d^2 + 2 d f) for a token and 4 L d for a pair (Kaplan et
        al. 2020, table 1, without the causal half).
        """
        sizes = lengths.astype(np.float64)
        return float(self.per_token * sizes.sum() + self.per_token_squared * (sizes**2).sum())
