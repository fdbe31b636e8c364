"""Vectors in the type in which they are stored."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.hyperplanes import hash_vectors
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError

DTYPES: Final = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "ubinary": "|u1", "lsh": "|u1"}
_STEPS: Final = 255  # between the least and the greatest int8
_BITS: Final = 8  # in a byte of a vector of bits


def stored_width(spec: JobSpec, dimensions: int) -> int:
    """Return a stored vector's components: bytes of eight bits each for "ubinary" and "lsh"."""
    widths = {"ubinary": -(-dimensions // _BITS), "lsh": spec.lsh_bits // _BITS}
    return widths.get(spec.vector_dtype, dimensions)


def check_ranges(spec: JobSpec, dimensions: int) -> None:
    """Check that a job of "int8" has the range of every component, and no other job has any.

    Raises:
        ModelError: The ranges have not the size that the job needs.
    """
    wanted = dimensions if spec.vector_dtype == "int8" else 0
    if len(spec.ranges) != 2 * wanted * np.dtype("<f4").itemsize:
        raise ModelError(f"{len(spec.ranges)} bytes of ranges are not those of {wanted} components")


def quantise(vectors: NDArray[np.float32], spec: JobSpec) -> NDArray[Any]:
    """Quantise vectors as `spec` wants them stored, shape (n, `stored_width`).

    "int8" and "ubinary" are those of `sentence_transformers.util.quantize_embeddings`: 255 equal
    steps between the ends of each component's range; one bit per component that is above 0, the
    first component in the highest bit. "lsh" are those of `embedfarm.contract.hyperplanes`.

    Args:
        vectors: Vectors of the model, shape (n, dimensions).
        spec: Specification of the job, with `ranges` for "int8".
    """
    if spec.vector_dtype == "int8":
        return _to_int8(vectors, np.frombuffer(spec.ranges, dtype="<f4").reshape(2, -1))
    if spec.vector_dtype == "ubinary":
        return np.packbits(vectors > 0, axis=1)
    if spec.vector_dtype == "lsh":
        return hash_vectors(vectors, spec.lsh_bits)
    with np.errstate(over="ignore"):  # what is too large for float16 becomes infinite, and is seen
        return vectors.astype(DTYPES[spec.vector_dtype], copy=False)


def _to_int8(vectors: NDArray[np.float32], ranges: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the number of the step that each component is on, from -128."""
    least, greatest = ranges
    width = (greatest - least) / _STEPS
    with np.errstate(invalid="ignore", over="ignore"):  # such as of a row that has failed
        steps = np.floor((vectors - least) / np.where(width == 0, np.float32(1), width))
        return np.asarray(np.clip(steps, 0, _STEPS) - 128, dtype=np.int8)


def unusable(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tell which rows have no direction: not finite, or zero."""
    least, greatest = vectors.min(axis=1), vectors.max(axis=1)  # both NaN where any is
    return np.asarray(
        ~np.isfinite(least) | ~np.isfinite(greatest) | ((least == 0) & (greatest == 0))
    )
