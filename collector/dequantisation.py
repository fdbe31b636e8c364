"""Restoring the numbers that quantised vectors stand for."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.sinks.part_rows import Matrix

_STEPS: Final = 255  # of an int8, between the ends of its component's range


def restore(
    matrix: Matrix, dimensions: int, ranges: Sequence[Sequence[float]]
) -> NDArray[np.float32]:
    """Return the numbers that stored vectors stand for, float32, shape (n, dimensions).

    An int8 stands for the middle of its step, a bit for 1 or -1.

    Args:
        matrix: Stored vectors: floats, int8, or uint8 with eight sign bits each.
        dimensions: Components of each vector before it was stored.
        ranges: Least and greatest value of each component; only int8 needs them.
    """
    if matrix.dtype == np.uint8:
        bits = np.unpackbits(matrix, axis=1, count=dimensions)
        return bits.astype(np.float32) * 2 - 1
    if matrix.dtype == np.int8:
        least, greatest = np.asarray(ranges, dtype=np.float32)
        steps = matrix.astype(np.float32) + np.float32(128.5)
        return np.asarray(least + steps * (greatest - least) / _STEPS, dtype=np.float32)
    return matrix.astype(np.float32, copy=False)
