"""Hash bits that tell on which side of random hyperplanes a vector lies (Charikar 2002).

The planes are the same on every machine and in every version: they come from numpy's legacy
generator, whose stream is frozen. Two vectors at an angle of a differ in a share a / pi of the
bits, on average.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

BITS_MIN: Final = 64
BITS_MAX: Final = 8192
SEED_MAX: Final = 2**32 - 1
PLANES_AT_A_TIME: Final = 256


@lru_cache(maxsize=2)
def planes(dimensions: int, bits: int, seed: int = 0) -> NDArray[np.float32]:
    """Return the hyperplanes' normals of standard normal components, shape (dimensions, bits)."""
    return np.concatenate(list(_make_planes(dimensions, bits, seed)), axis=1)


def _make_planes(dimensions: int, bits: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """Yield the hyperplanes' normals, some at a time, shape (dimensions, `PLANES_AT_A_TIME`)."""
    generator = np.random.RandomState(seed)
    for start in range(0, bits, PLANES_AT_A_TIME):
        count = min(PLANES_AT_A_TIME, bits - start)
        yield generator.standard_normal((count, dimensions)).astype(np.float32).T


def hash_vectors(vectors: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Return the hash bits of vectors, a byte's highest bit first, shape (n, bits / 8).

    The planes, those of seed 0, are kept for the next call.

    Args:
        vectors: Vectors of shape (n, dimensions); infinite or NaN ones give meaningless bits.
        bits: Number of bits, a multiple of 8 from `BITS_MIN` to `BITS_MAX`.
    """
    kept = planes(vectors.shape[1], bits)
    starts = range(0, bits, PLANES_AT_A_TIME)
    return _hash(vectors, (kept[:, start : start + PLANES_AT_A_TIME] for start in starts))


def hash_once(vectors: NDArray[np.float32], bits: int, seed: int) -> NDArray[np.uint8]:
    """Return the hash bits of vectors like `hash_vectors`, but by planes of any seed.

    The planes are not kept, and only some of them are in memory at a time.

    Args:
        vectors: Vectors of shape (n, dimensions); infinite or NaN ones give meaningless bits.
        bits: Number of bits, a multiple of 8 from `BITS_MIN` to `BITS_MAX`.
        seed: Seed of the planes, 0 to `SEED_MAX`; bits of different seeds cannot be compared.
    """
    return _hash(vectors, _make_planes(vectors.shape[1], bits, seed))


def _hash(vectors: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]]) -> NDArray[np.uint8]:
    with np.errstate(invalid="ignore", over="ignore"):
        packed = [np.packbits(vectors @ block > 0, axis=1) for block in blocks]
    return np.concatenate(packed, axis=1)


def estimated_cosine(agreement: float) -> float:
    """Estimate the cosine of two vectors from how far their bits agree: 1 all, 0 half, -1 none."""
    return math.cos(math.pi * (1 - agreement) / 2)
