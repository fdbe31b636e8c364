"""Tests of bits of random hyperplanes."""

import hashlib

import numpy as np
import pytest

from embedfarm.contract.hyperplanes import estimated_cosine, hash_vectors, planes


def test_planes_are_the_same_everywhere() -> None:
    """The planes never change, so that bits of other machines and years can be compared."""
    digest = hashlib.sha256(planes(16, 64).astype("<f4").T.tobytes()).hexdigest()
    assert digest == "78c0fffc14bc72aeea78eeb97f7e992696618d1476261217a839518a36d50b91"


@pytest.mark.parametrize("bits", [64, 2048, 8192])
def test_bits_are_sides_of_planes(bits: int) -> None:
    """A bit is 1 where the product with the plane's normal is positive, highest bit first."""
    vectors = np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)
    found = hash_vectors(vectors, bits)
    assert found.shape == (5, bits // 8)
    sides = np.unpackbits(found, axis=1)
    products = vectors.astype(np.float64) @ planes(24, bits)
    clear = np.abs(products) > 1e-4
    np.testing.assert_array_equal(sides[clear], (products > 0)[clear])


@pytest.mark.parametrize("cosine", [-1.0, -0.3, 0.0, 0.5, 0.9, 1.0])
def test_agreement_tells_the_cosine(cosine: float) -> None:
    """The share of equal bits estimates the angle, to within four standard errors."""
    one = np.eye(1, 32, dtype=np.float32)
    other = cosine * one + np.sqrt(1 - cosine**2) * np.eye(1, 32, 1, dtype=np.float32)
    bits = [np.unpackbits(hash_vectors(each, 8192)) for each in (one, other.astype(np.float32))]
    agreement = 2 * float(np.mean(bits[0] == bits[1])) - 1
    assert estimated_cosine(agreement) == pytest.approx(cosine, abs=4 * np.pi / 2 / np.sqrt(8192))
