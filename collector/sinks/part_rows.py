"""The rows of one part, on their way to the disk and back."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Failure, Layout, OutputError, Part

Matrix: TypeAlias = NDArray[Any]  # of floats, int8, or uint8 with eight sign bits each


class PartError(OutputError):
    """Raised when files do not hold what the sink wrote."""


class Vectors(NamedTuple):
    """Rows that have a vector.

    Attributes:
        indices: Chunk of each row: int64, shape (rows,), ascending.
        ids: One id per row, or None.
        matrix: Vectors, shape (rows, dimensions).
    """

    indices: NDArray[np.int64]
    ids: list[str] | None
    matrix: Matrix


class KeptColumns(NamedTuple):
    """Columns of the corpus that a part has beside its vectors.

    Attributes:
        indices: Chunk of each row: int64, shape (rows,), ascending.
        table: The columns, as a `pyarrow.Table`, a row for each chunk that has a vector.
    """

    indices: NDArray[np.int64]
    table: Any


class PartRows(NamedTuple):
    """All chunks of a part.

    Attributes:
        start: Index of the first chunk.
        ids: One id per chunk, or None.
        matrix: Vectors, shape (count, dimensions); the rows of failed chunks mean nothing.
        good: Whether each chunk has a vector, shape (count,).
        columns: Columns of the corpus, as a `pyarrow.Table`, a row for each chunk that has a
            vector; None where none are kept, or nobody has read them.
    """

    start: int
    ids: list[str] | None
    matrix: Matrix
    good: NDArray[np.bool_]
    columns: Any = None

    def vectors(self) -> Vectors:
        """Return the rows without the failed chunks; no copy when no chunk failed."""
        kept = np.flatnonzero(self.good).astype(np.int64)
        whole = len(kept) == len(self.good)
        return Vectors(
            indices=kept + self.start,
            ids=self.ids if whole or self.ids is None else [self.ids[row] for row in kept],
            matrix=self.matrix if whole else self.matrix[kept],
        )


def spread(vectors: Vectors, part: Part, failures: Iterable[Failure]) -> PartRows:
    """Return all chunks of a part, those without a vector as zeros."""
    rows = vectors.indices - part.start
    matrix = np.zeros((part.count, *vectors.matrix.shape[1:]), vectors.matrix.dtype)
    good = np.zeros(part.count, np.bool_)
    matrix[rows], good[rows] = vectors.matrix, True
    if vectors.ids is None:
        return PartRows(part.start, None, matrix, good)
    by_index = {each.index: each.id or "" for each in failures}
    by_index |= dict(zip(vectors.indices.tolist(), vectors.ids, strict=True))
    return PartRows(part.start, [by_index[part.start + n] for n in range(part.count)], matrix, good)


def check_layout(vectors: Vectors, part: Part, layout: Layout) -> Vectors:
    """Pass on `vectors` as they were read.

    Raises:
        PartError: The vectors have another number of rows, dimensions, dtype or ids than promised.
    """
    found = (vectors.matrix.shape, str(vectors.matrix.dtype), vectors.ids is not None)
    promised = ((part.rows, layout.dimensions), layout.dtype, layout.ids)
    if found != promised:
        raise PartError(f"holds {_describe(*found)} instead of {_describe(*promised)}")
    return vectors


def _describe(shape: tuple[int, ...], dtype: str, ids: bool) -> str:  # noqa: FBT001 - unpacked
    """Describe a layout and its size, for people."""
    return f"{' x '.join(map(str, shape))} {dtype} {'with' if ids else 'without'} ids"
