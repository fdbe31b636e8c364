"""Rows of tables of any columns: taken by their places, and compared bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
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


def _runs(places: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive places begins, and how long it is."""
    if len(places):
        edges = np.flatnonzero(np.diff(places) != 1) + 1
        for run in np.split(places, edges):
            yield int(run[0]), len(run)


def _same(column: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    if column.equals(other):
        return True
    return bool(_values(column).equals(_values(other)))


def _values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without dictionaries, and with the bits of its floats as integers."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    chunks = [chunk.cast(kind).view(_in_bits(kind)) for chunk in column.chunks]
    return pa.chunked_array(chunks, _in_bits(kind))


def _in_bits(kind: pa.DataType) -> pa.DataType:
    """Return a type with an integer of the same size for each float in it."""
    types = pa.types
    if types.is_floating(kind):
        return _BITS[kind.bit_width]
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    if not types.is_nested(kind) or types.is_union(kind) or views:
        return kind
    inner = [kind.field(place) for place in range(kind.num_fields)]
    fields = [field.with_type(_in_bits(field.type)) for field in inner]
    if types.is_struct(kind):
        return pa.struct(fields)
    if types.is_map(kind):
        return pa.map_(*fields[0].type)
    if types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return pa.large_list(fields[0]) if types.is_large_list(kind) else pa.list_(fields[0])
