"""What all vector stores have in common: the protocol, and the records that it is about."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.dequantisation import restore
from embedfarm.collector.manifest import OutputError
from embedfarm.collector.sinks.part_rows import Matrix

Element: TypeAlias = Literal["float32", "float16", "bit"]
BYTE_BITS: Final = 8


class StoreError(OutputError):
    """Raised when a store cannot take an output; the message is for people."""


class RowShape(msgspec.Struct, frozen=True):
    """What all rows of a collection have in common.

    Attributes:
        dimensions: Components of a vector; bits are counted one by one.
        element: Type of a component.
        ids: Whether rows are known by the ids of the corpus, or else by job and index.
    """

    dimensions: int
    element: Element
    ids: bool

    def __str__(self) -> str:
        return f"{self.dimensions} {self.element}"

    @property
    def bit_bytes(self) -> int:
        """Bytes of a vector of bits."""
        return -(-self.dimensions // BYTE_BITS)


class StoreRows(NamedTuple):
    """Rows for a store.

    Attributes:
        names: Name of each row, no two the same.
        indices: Index of each row in the corpus: int64, shape (rows,).
        matrix: Vectors: of shape (rows, dimensions), or bits with eight in a uint8.
    """

    names: Sequence[str]
    indices: NDArray[np.int64]
    matrix: Matrix


class Found(NamedTuple):
    """A collection that is there.

    Attributes:
        dimensions: Components of its vectors.
        element: Type of a component, or what the store calls another one.
        mark: What was last written by `write_mark`, or "".
        ids: Whether rows have no index beside their name; None where the store cannot tell.
        packed: Whether components are the bits of whole bytes, of which some may stand for none.
    """

    dimensions: int
    element: str
    mark: str = ""
    ids: bool | None = None
    packed: bool = False


class Store(Protocol):
    """One collection of vectors in a store. All calls that ask it come from one thread.

    Each call may be repeated, whether or not the one before it had an effect. What `upsert`,
    `delete`, `create` and `write_mark` did lasts, as far as the store promises that, when they
    return.

    Attributes:
        elements: Types of components that the store has.
        rows_max: Most rows of one `upsert`, and names of one `delete`.
        bytes_max: Most bytes of vectors in one `upsert`.
    """

    elements: Sequence[Element]
    rows_max: int
    bytes_max: int

    def find(self) -> Found | None:
        """Return the collection, or None if there is none."""

    def create(self, shape: RowShape, mark: str) -> None:
        """Make the collection with a mark, if there is none."""

    def write_mark(self, mark: str) -> None:
        """Put a text into the metadata of the collection, in the place of the one before."""

    def upsert(self, rows: StoreRows, shape: RowShape) -> None:
        """Write rows, in the place of those that have their names."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete the rows of these names that there are."""

    def count(self) -> int:
        """Return the number of rows."""

    def pages(self) -> Iterator[Sequence[str]]:
        """Yield what `key` returns for the names of all rows, in batches; rows stay as they are."""

    def key(self, name: str) -> str:
        """Return what the store knows a row by, as text."""

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete the rows that the store knows by these keys."""

    def finish(self) -> None:
        """Put what was written in the order that searches want, where that is not done anyway."""

    def may_pass(self, error: Exception) -> bool:
        """Tell whether the call that raised an error may succeed later, as it is."""

    def close(self) -> None:
        """Let go of the store."""


def shape_of(dimensions: int, dtype: str, settings: Mapping[str, object], *, ids: bool) -> RowShape:
    """Return the shape of an output's rows before a store has chosen its types.

    Args:
        dimensions: `Layout.dimensions` of the output.
        dtype: `Layout.dtype` of the output.
        settings: What its request said of the vectors.
        ids: `Layout.ids` of the output.
    """
    if dtype == "uint8":
        bits = settings.get("lsh_bits") or settings.get("dimensions")
        return RowShape(int(str(bits or BYTE_BITS * dimensions)), "bit", ids)
    return RowShape(dimensions, "float16" if dtype == "float16" else "float32", ids)


def choose_element(element: Element, has: Sequence[Element]) -> Element:
    """Return the type in which a store that has some types keeps components of one."""
    return element if element in has else "float32"


def convert(
    matrix: Matrix, shape: RowShape, ranges: Sequence[Sequence[float]]
) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint8]:
    """Return an output's vectors as a collection of some shape has them.

    An int8 goes in as the number that it stands for, and bits where the store has none as 1 and -1.

    Args:
        matrix: Vectors of the output.
        shape: Shape of the collection.
        ranges: Ranges of the components; only int8 needs them.
    """
    if shape.element == "bit":
        return matrix
    wanted = np.dtype(shape.element)
    if matrix.dtype == wanted:
        return matrix
    return restore(matrix, shape.dimensions, ranges).astype(wanted, copy=False)
