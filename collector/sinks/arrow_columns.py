"""Arrow arrays made of their buffers, since `pyarrow.array` imports pandas where that is there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def numbers(values: NDArray[Any]) -> pa.Array:
    """Return numbers, shape (n,), as an array over the same memory if they are contiguous."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def own_columns(*, ids: bool) -> list[str]:
    """Return the columns of an output that are not those of its corpus, in their order."""
    return ["index", *(["id"] if ids else []), "embedding"]


def strings(texts: Sequence[str]) -> pa.Array:
    """Return texts as an array of strings, of at most 2 GiB.

    Raises:
        OverflowError: The texts are longer.
    """
    encoded = [text.encode() for text in texts]
    ends = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(each) for each in encoded], out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{ends[-1]} bytes of strings are too many for one array")
    offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.StringArray.from_buffers(len(encoded), offsets, pa.py_buffer(b"".join(encoded)))
