"""Bits that tell on which side of random hyperplanes a vector lies (Charikar 2002).

The planes are the same on every machine and in every version: they come from numpy's legacy
generator, whose stream is frozen. Two vectors at an angle of a differ in a share a / pi of the
bits, on average.
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

BITS_MIN: Final = 64
BITS_MAX: Final = 8192
SEED_MAX: Final = 2**32 - 1


@lru_cache(maxsize=2)
def planes(dimensions: int, bits: int, seed: int = 0) -> NDArray[np.float32]:
    """Normals of the hyperplanes, standard normal components, shape (dimensions, bits)."""
    generator = np.random.RandomState(seed)
    return generator.standard_normal((bits, dimensions)).astype(np.float32).T


def hash_vectors(vectors: NDArray[np.float32], bits: int, seed: int = 0) -> NDArray[np.uint8]:
    """Eight bits a byte, the first plane's in the highest bit, shape (n, bits / 8).

    Args:
        vectors: Shape (n, dimensions). What is not finite gives bits without meaning.
        bits: A multiple of 8 from `BITS_MIN` to `BITS_MAX`.
        seed: Of the planes, 0 to `SEED_MAX`; bits of different seeds cannot be compared.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.packbits(vectors @ planes(vectors.shape[1], bits, seed) > 0, axis=1)


def estimated_cosine(agreement: float) -> float:
    """Cosine of two vectors from how far their bits agree: 1 all, 0 half, -1 none."""
    return math.cos(math.pi * (1 - agreement) / 2)
