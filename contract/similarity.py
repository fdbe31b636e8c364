"""Cosines of vectors, to tell how alike two embeddings of the same texts are."""

import numpy as np
from numpy.typing import NDArray


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows; NaN where a row is zero or not finite."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((left * right).sum(axis=1) / norms)
