"""Rows of tables of any columns: taken by their places, made compact, compared bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_BITS = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def take_rows(table: pa.Table, places: NDArray[Any]) -> pa.Table:
    """Return the rows of a table at some places, shape (rows,), in their order; no copy is made.

    Arrow cannot take rows of every type one by one, and can slice all of them.
    """
    runs = [table.slice(first, count) for first, count in _runs(places)]
    return pa.concat_tables([table.schema.empty_table(), *runs])


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same rows in columns that hold the values of these rows alone.

    Arrow counts and writes a slice of strings without those of other rows, but a slice of views or
    of a dictionary with all values of the batch that it is from. Only such columns are copied.
    """
    return pa.record_batch(list(map(_compact, batch.columns)), schema=batch.schema)


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


def _compact(array: pa.Array) -> pa.Array:
    """Return an array of the same values that holds no others."""
    kind = array.type
    if not _shares(kind):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _compact(array.storage))
    if pa.types.is_dictionary(kind):
        return _compact_dictionary(array)
    if kind in _PLAIN:
        return _compact_views(array)
    if _is_list_view(kind):
        return _compact_list_views(array)
    whole = pa.concat_arrays([array])  # which begins at its first row, and so do the arrays in it
    is_struct, places = pa.types.is_struct(kind), range(kind.num_fields)
    inner = [whole.field(place) if is_struct else whole.values for place in places]
    buffers = whole.buffers()[: kind.num_buffers]
    return pa.Array.from_buffers(kind, len(whole), buffers, children=list(map(_compact, inner)))


def _compact_dictionary(array: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return rows whose dictionary has the values that they use, in their order, and no null.

    Where the order has a meaning, values that are not used stay: it would be lost when the
    dictionaries of several batches become one.
    """
    kind, dictionary = array.type, array.dictionary
    if not kind.ordered:
        used = array.indices.unique().sort()
    elif dictionary.null_count:
        used = pc.indices_nonzero(dictionary.is_valid())
    else:
        return array
    values = dictionary.take(used)
    indices = pc.index_in(array.indices, used.filter(values.is_valid())).cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(indices, values.drop_null(), ordered=kind.ordered)


def _compact_views(array: pa.Array) -> pa.Array:
    """Return views of values that lie one behind the other; those of over 2 GiB as they are."""
    try:
        return array.cast(_PLAIN[array.type]).cast(array.type)
    except pa.ArrowCapacityError:
        return array


def _compact_list_views(array: pa.Array) -> pa.Array:
    """Return views of lists, which may lie anywhere and overlap, one behind the other."""
    sizes = pc.fill_null(pc.list_value_length(array), 0)
    starts = pc.subtract(pc.cumulative_sum(sizes), sizes)
    values, mask = _compact(array.flatten()), array.is_null()
    return type(array).from_arrays(starts, sizes, values, type=array.type, mask=mask)


def _shares(kind: pa.DataType) -> bool:
    """Tell whether slices of an array of some type may hold values of other rows."""
    if isinstance(kind, pa.BaseExtensionType):
        return _shares(kind.storage_type)
    if pa.types.is_dictionary(kind):  # Arrow takes and unites no values of other types
        return not pa.types.is_nested(kind.value_type) and kind.value_type not in _PLAIN
    if kind in _PLAIN or _is_list_view(kind):
        return True
    if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):  # Parquet has neither
        return False
    return any(_shares(kind.field(place).type) for place in range(kind.num_fields))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


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
