"""Parquet: one item per row, only the columns asked for."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from producer.readers.items import BadRow, CorpusError, Item

_BATCH_ROWS: Final = 512
_BUFFER_BYTES: Final = 1 << 20


def read(file: BinaryIO, name: str, text_field: str, id_field: str | None) -> Iterator[Item]:
    """One item per row; an integer as id becomes its digits.

    Row groups are read through a buffer, never whole.

    Raises:
        CorpusError: A column is missing or of a type that holds no text.
    """
    table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    fields = [field for field in (text_field, id_field) if field is not None]
    for field in fields:
        _check_column(table.schema_arrow, field, name, integers=field == id_field)
    numbers = count(1)
    for batch in table.iter_batches(_BATCH_ROWS, columns=fields):
        rows = zip(*(_cells(batch.column(field)) for field in fields), strict=True)
        yield from (
            _item(row, fields, name, number) for row, number in zip(rows, numbers, strict=False)
        )


def _check_column(schema: pa.Schema, field: str, name: str, *, integers: bool) -> None:
    """Refuse a column that is not there once, or holds no strings nor, if allowed, integers."""
    index = schema.get_field_index(field)
    if index < 0:
        raise CorpusError(f"{name}: no single column {field!r}; it has {', '.join(schema.names)}")
    kind = schema.field(index).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = values in (pa.string(), pa.large_string(), pa.string_view())
    if not is_text and not (integers and pa.types.is_integer(values)):
        raise CorpusError(f"{name}: column {field!r} is of type {kind}, which holds no text")


def _cells(column: pa.Array) -> list[bytes | None]:
    """Cells as they lie in the file, which no one has checked to be UTF-8."""
    cells: list[bytes | None] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return cells


def _item(row: Sequence[bytes | None], fields: list[str], name: str, number: int) -> Item:
    """The row's cells, provided they are there and are UTF-8."""
    values = []
    for field, cell in zip(fields, row, strict=True):
        if cell is None:
            return BadRow(name, number, field, "null")
        try:
            values.append(cell.decode())
        except UnicodeDecodeError:
            return BadRow(name, number, field, "not UTF-8")
    return values[0], values[1] if len(values) > 1 else ""
