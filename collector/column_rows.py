"""Rows of tables of any columns: taken by their places, and compared bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_BITS = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def take_rows(table: pa.Table, places: NDArray[Any]) -> pa.Table:
    """Return the rows of a table at some places, shape (rows,), in their order; no copy is made.

    Arrow cannot take rows of every type one by one, and can slice all of them.
    """
    runs = [table.slice(first, count) for first, count in _runs(places)]
    return pa.concat_tables([table.schema.empty_table(), *runs])


def same_rows(table: pa.Table, other: pa.Table) -> bool:
    """Tell whether two tables have the same columns, and the same in each of them.

    A number that is none (NaN) is the same as itself, and of dictionaries the values count.
    """
    return bool(
        table.schema.equals(other.schema)
        and table.num_rows == other.num_rows
        and all(map(_same, table.columns, other.columns))
    )


def unify_dictionaries(table: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of a table with one dictionary for each column that has them.

    They come in pieces where one has no room for all values: indices of 8 bits tell 128 of them
    apart, which may be enough for each file of a corpus and not for all.
    """
    try:
        whole = table.unify_dictionaries()
    except pa.ArrowInvalid:
        half = table.num_rows // 2
        if not half:
            raise
        yield from unify_dictionaries(table.slice(0, half))
        yield from unify_dictionaries(table.slice(half))
    else:
        yield whole


def _runs(places: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive places begins, and how long it is."""
    if len(places):
        edges = np.flatnonzero(np.diff(places) != 1) + 1
        for run in np.split(places, edges):
            yield int(run[0]), len(run)


def _same(column: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    return bool(column.equals(other)) or all(
        mine.equals(theirs) for mine, theirs in zip(_leaves(column), _leaves(other), strict=True)
    )


def _leaves(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield columns of numbers and strings; they are the same only if the column is."""
    return map(pa.chunked_array, zip(*map(_parts, column.chunks), strict=True))


def _parts(array: pa.Array) -> Iterator[pa.Array]:
    """Yield what an array is made of: values instead of dictionaries, and the bits of floats."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield from _parts(array.dictionary_decode())
    elif pa.types.is_map(kind):
        yield from _parts(array.view(pa.list_(kind.field(0))))
    elif isinstance(kind, pa.BaseExtensionType):
        yield from _parts(array.storage)
    elif pa.types.is_struct(kind):
        yield array.is_valid()
        for field in array.flatten():
            yield from _parts(field)
    elif pa.types.is_nested(kind) and hasattr(array, "flatten"):  # lists of all kinds
        yield pc.list_value_length(array)
        yield from _parts(array.flatten())
    else:
        yield array.view(_BITS[kind.bit_width]) if pa.types.is_floating(kind) else array
