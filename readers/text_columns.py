"""Columns to keep of rows that are text, of JSON or CSV: strings, or of a type that is declared.

No type is guessed. What a later row holds could not be of it, and rows come by the million.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from embedfarm.readers.fields import ColumnQueue, Fields, KeptField
from embedfarm.readers.items import BadRow, CorpusError, Item, is_unicode
from embedfarm.readers.source import Cursor

TYPES: Final = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""Types that may be declared, as in "year:int64"."""

ROWS_AHEAD: Final = 512
_BYTES_AHEAD: Final = 1 << 20
_SHOWN: Final = 40
_INT64: Final = range(-(1 << 63), 1 << 63)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_FLOAT: Final = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|[+-]?inf", re.ASCII | re.IGNORECASE
)
_BOOLEANS: Final = {"true": True, "false": False}

Make: TypeAlias = Callable[[Any], Any]
"""Makes a value of a cell; raises `ValueError` with the reason if it is none."""


def parse_kept(keep: Sequence[str]) -> tuple[KeptField, ...]:
    """Return the fields that are named, each once, and of which type each of them is.

    Raises:
        CorpusError: A field is named with two types.
    """
    found: dict[str, KeptField] = {}
    for each in keep:
        name, colon, kind = each.rpartition(":")
        is_declared = bool(colon) and kind in TYPES
        field = KeptField(name, kind, declared=True) if is_declared else KeptField(each)
        before = found.setdefault(field.name, field)
        if before.type != field.type:
            raise CorpusError(
                f"column {field.name!r} cannot be kept as {before.type} and as {field.type} at once"
            )
    return tuple(found.values())


def schema_of(kept: Sequence[KeptField]) -> pa.Schema:
    """Return the schema of the columns."""
    return pa.schema([(each.name, TYPES[each.type]) for each in kept])


class Unfit(NamedTuple):
    """What is wrong with a value that is to be kept.

    Attributes:
        field: Name of its field.
        reason: Why it cannot be kept.
    """

    field: str
    reason: str


class TextColumns:
    """Takes the values to keep of one row after the other, and makes batches of them.

    Args:
        kept: The fields.
        makers: What makes a value of a field's cell, by type.
        queue: Gets the batches; None where nobody wants them, and they are looked at all the same.
    """

    def __init__(
        self, kept: Sequence[KeptField], makers: dict[str, Make], queue: ColumnQueue | None
    ) -> None:
        self.names = [each.name for each in kept]
        self._schema = schema_of(kept)
        self._makers = [makers[each.type] for each in kept]
        self._queue = queue
        self._rows: list[list[Any]] = []

    def add(self, cells: Sequence[Any]) -> Unfit | None:
        """Take the values of the next row, or tell why one of them is not of its field's type."""
        row = []
        for name, make, cell in zip(self.names, self._makers, cells, strict=True):
            try:
                row.append(make(cell))
            except (ValueError, msgspec.DecodeError) as error:
                reason = "not UTF-8" if isinstance(error, UnicodeError) else str(error)
                return Unfit(name, reason)
        self._rows.append(row)
        return None

    def ahead(self, read: Callable[[Cursor], Iterator[Item]], cursor: Cursor) -> Iterator[Item]:
        """Yield the items that a reader yields, some of which it has read ahead.

        The columns of rows are handed on before the rows are, and the cursor goes with the rows.
        """
        here = replace(cursor)
        held: list[tuple[Item, int, int]] = []
        size, begun = 0, here.offset
        for item in read(here):
            held.append((item, here.offset, here.line))
            size += 0 if isinstance(item, BadRow) else len(item[0])
            if len(held) == ROWS_AHEAD or max(size, here.offset - begun) >= _BYTES_AHEAD:
                yield from self._hand_on(held, cursor)
                size, begun = 0, here.offset
        yield from self._hand_on(held, cursor)
        cursor.offset, cursor.line = here.offset, here.line

    def _hand_on(self, held: list[tuple[Item, int, int]], cursor: Cursor) -> Iterator[Item]:
        """Yield the items that were read ahead, behind their columns."""
        if self._rows and self._queue is not None:
            columns = zip(*self._rows, strict=True)
            arrays = map(_array, columns, self._schema.types)
            self._queue.append(pa.RecordBatch.from_arrays([*arrays], schema=self._schema))
        self._rows = []
        for item, offset, line in held:
            cursor.offset, cursor.line = offset, line
            yield item
        held.clear()


def columns_of_csv(fields: Fields) -> TextColumns | None:
    """Return what takes cells of CSV; None where none are kept."""
    return TextColumns(fields.kept, _CSV_MAKERS, fields.columns) if fields.kept else None


def columns_of_json(fields: Fields) -> TextColumns | None:
    """Return what takes pieces of JSON; None where none are kept."""
    return TextColumns(fields.kept, _JSON_MAKERS, fields.columns) if fields.kept else None


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as an array; `pyarrow.array` would import pandas where that is there."""
    there = np.array([value is not None for value in values])
    mask = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    if kind == pa.string():
        encoded = [(value or "").encode() for value in values]
        ends = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(each) for each in encoded], out=ends[1:])
        offsets = pa.py_buffer(ends.astype(np.int32))
        return pa.Array.from_buffers(
            kind, len(values), [mask, offsets, pa.py_buffer(b"".join(encoded))]
        )
    numbers = np.array([value or 0 for value in values], kind.to_pandas_dtype())
    if kind == pa.bool_():
        numbers = np.packbits(numbers, bitorder="little")
    return pa.Array.from_buffers(kind, len(values), [mask, pa.py_buffer(numbers)])


def _csv_string(cell: str) -> str:
    if not is_unicode(cell):
        raise ValueError("not UTF-8")
    return cell


def _csv_integer(cell: str) -> int | None:
    if not cell:
        return None
    if not _INTEGER.fullmatch(cell) or int(cell) not in _INT64:
        raise ValueError(f"{_short(cell)} is no int64")
    return int(cell)


def _csv_float(cell: str) -> float | None:
    if not cell:
        return None
    if not _FLOAT.fullmatch(cell):
        raise ValueError(f"{_short(cell)} is no float64")
    return float(cell)


def _csv_boolean(cell: str) -> bool | None:
    if not cell:
        return None
    if cell.lower() not in _BOOLEANS:
        raise ValueError(f"{_short(cell)} is no bool, which is true or false")
    return _BOOLEANS[cell.lower()]


def _json_maker(kind: Any) -> Make:  # noqa: ANN401 -- a type, or a union of types
    decoder = msgspec.json.Decoder(kind)
    return lambda cell: None if cell is None else decoder.decode(cell)


_decode_string = msgspec.json.Decoder(str).decode


def _json_string(cell: msgspec.Raw | None) -> str | None:
    """Return a string, and the JSON of whatever else stands there."""
    if cell is None:
        return None
    data = bytes(cell)
    if data == b"null":
        return None
    return _decode_string(data) if data.startswith(b'"') else data.decode()


def _short(cell: str) -> str:
    """Return the beginning of a cell, for people."""
    return ascii(cell if len(cell) <= _SHOWN else f"{cell[:_SHOWN]}...")


_CSV_MAKERS: Final[dict[str, Make]] = {
    "string": _csv_string,
    "int64": _csv_integer,
    "float64": _csv_float,
    "bool": _csv_boolean,
}
_JSON_MAKERS: Final[dict[str, Make]] = {
    "string": _json_string,
    "int64": _json_maker(Annotated[int, msgspec.Meta(ge=_INT64[0], le=_INT64[-1])] | None),
    "float64": _json_maker(float | None),
    "bool": _json_maker(bool | None),
}
