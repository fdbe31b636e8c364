"""Tests of stored types against sentence-transformers, which people compare with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from sentence_transformers.util import quantize_embeddings

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.workers.quantisation import DTYPES, check_ranges, quantise, stored_width

COMPONENTS = st.integers(-256, 256).map(lambda number: number / 128)
VECTORS = numpy_strategies.arrays(
    np.float32, st.tuples(st.integers(1, 20), st.integers(1, 40)), elements=COMPONENTS
)


def spec_of(vector_dtype: str, ranges: bytes = b"") -> JobSpec:
    """A job that stores vectors as `vector_dtype`."""
    return JobSpec(model="null:8", vector_dtype=vector_dtype, ranges=ranges)


@given(VECTORS, st.data())
def test_int8_is_that_of_sentence_transformers(vectors: np.ndarray, data: st.DataObject) -> None:
    """Each int8 component equals sentence-transformers', inside its range and beyond it."""
    shape = (2, vectors.shape[1])
    ranges = data.draw(numpy_strategies.arrays(np.float32, shape, elements=COMPONENTS))
    ranges.sort(axis=0)
    spec = spec_of("int8", ranges.astype("<f4").tobytes())
    check_ranges(spec, vectors.shape[1])
    expected = quantize_embeddings(vectors, precision="int8", ranges=ranges)
    found = quantise(vectors, spec)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, expected)


@given(VECTORS)
def test_sign_bits_are_those_of_sentence_transformers(vectors: np.ndarray) -> None:
    """Sign bits equal sentence-transformers', the last byte filled up with zeros."""
    spec = spec_of("ubinary")
    found = quantise(vectors, spec)
    assert found.shape == (len(vectors), stored_width(spec, vectors.shape[1]))
    np.testing.assert_array_equal(found, quantize_embeddings(vectors, precision="ubinary"))


@pytest.mark.parametrize("vector_dtype", DTYPES)
def test_dtype_is_the_one_that_is_announced(vector_dtype: str) -> None:
    """The dtype and width announced for a vector type are those that `quantise` makes."""
    spec = spec_of(vector_dtype, np.zeros((2, 9), "<f4").tobytes())
    stored = quantise(np.ones((3, 9), np.float32), spec)
    assert (stored.dtype.str, stored.shape[1]) == (DTYPES[vector_dtype], stored_width(spec, 9))


@pytest.mark.parametrize(
    ("vector_dtype", "components"), [("int8", 0), ("int8", 7), ("int8", 9), ("float32", 8)]
)
def test_ranges_must_be_those_of_the_model(vector_dtype: str, components: int) -> None:
    """A job whose ranges are missing or do not fit the model is refused."""
    ranges = np.zeros((2, components), "<f4").tobytes()
    with pytest.raises(ModelError, match="ranges"):
        check_ranges(spec_of(vector_dtype, ranges), 8)
