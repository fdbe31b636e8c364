"""Files of a corpus that are copied with the vectors of their rows, whatever their format."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedfarm.collector.sinks.arrow_columns import numbers
from embedfarm.readers.source import Location


class RowVectors(NamedTuple):
    """Vectors of consecutive chunks or rows.

    Attributes:
        matrix: The vectors, shape (n, dimensions).
        good: Which of these have one, shape (n,); of the others the numbers are 0.
    """

    matrix: NDArray[Any]
    good: NDArray[np.bool_]

    def column(self, kind: pa.DataType) -> pa.Array:
        """Return the vectors as a column over the same memory, with nulls where there are none."""
        values = numbers(self.matrix.reshape(-1))
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=pa.array(~self.good))


Embed: TypeAlias = Callable[[pa.RecordBatch], RowVectors]
"""Gives the vectors of the next rows of a file."""


class Original(Protocol):
    """A file of a corpus, which can be copied.

    What is wrong with it is a `CorpusError`.
    """

    @property
    def location(self) -> Location:
        """The place where the file lies."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file, and what it says of itself."""

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, few at a time, with these columns at least."""

    def write(self, file: BinaryIO, field: pa.Field, embed: Embed, scratch: Path) -> None:
        """Write a copy with one more column into an empty file, which is left open.

        Args:
            file: The copy.
            field: The column, a list of fixed size.
            embed: Gives the vectors of all rows, in order.
            scratch: Path of a file for what is too large for memory, until the next call.

        Raises:
            OSError: The disk refuses.
        """
