"""Parquet: one item per row, only the columns asked for."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.producer.readers.items import BadRow, CorpusError, Item
from embedfarm.producer.readers.source import Cursor

_BATCH_ROWS: Final = 512
_BUFFER_BYTES: Final = 1 << 20


def read(
    file: BinaryIO, name: str, text_field: str, id_field: str | None, cursor: Cursor
) -> Iterator[Item]:
    """Yield an item per row; an integer as id becomes its digits.

    Row groups are read through a buffer, never whole.

    Raises:
        CorpusError: A column is missing or of a type that holds no text.
    """
    table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    fields = [field for field in (text_field, id_field) if field is not None]
    paths = [_path(table.schema_arrow, field) for field in fields]
    for field, path in zip(fields, paths, strict=True):
        kind = _type_of(table.schema_arrow, path)
        if kind is None:
            there = ", ".join(table.schema_arrow.names)
            raise CorpusError(f"{name}: no single column {field!r}; it has {there}")
        if not _holds_text(kind, integers=field == id_field):
            raise CorpusError(f"{name}: column {field!r} is of type {kind}, which holds no text")
    groups, skip = _groups_from(table, cursor.offset)
    columns = [".".join(path) for path in paths]
    for batch in table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
        rows = zip(*(_cells(batch, path) for path in paths), strict=True)
        for row in islice(rows, skip, None):
            cursor.offset += 1
            yield _item(row, fields, name, cursor.offset)
        skip = max(0, skip - batch.num_rows)


def _groups_from(table: pq.ParquetFile, row: int) -> tuple[list[int], int]:
    """Return the row groups from that of `row` on, and the rows before `row` in the first one."""
    groups = range(table.num_row_groups)
    for group in groups:
        rows = table.metadata.row_group(group).num_rows
        if row < rows:
            return list(groups[group:]), row
        row -= rows
    return [], 0


def _path(schema: pa.Schema, field: str) -> list[str]:
    """Return where a column lies: at the top under its whole name, or inside structs."""
    return [field] if field in schema.names else field.split(".")


def _type_of(schema: pa.Schema, path: Sequence[str]) -> pa.DataType | None:
    """Return the type of a column, None if it is not there just once."""
    kind: pa.DataType = pa.struct(schema)
    for name in path:
        index = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if index < 0:
            return None
        kind = kind.field(index).type
    return kind


def _holds_text(kind: pa.DataType, *, integers: bool) -> bool:
    """Tell whether a column of that type holds strings, or integers where these are allowed."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = values in (pa.string(), pa.large_string(), pa.string_view())
    return is_text or (integers and pa.types.is_integer(values))


def _cells(batch: pa.RecordBatch, path: Sequence[str]) -> list[bytes | None]:
    """Return the cells as they lie in the file, which no one has checked to be UTF-8."""
    import pyarrow.compute as pc  # noqa: PLC0415 # it takes long to import, and few need it

    column = batch.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    cells: list[bytes | None] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return cells


def _item(row: Sequence[bytes | None], fields: list[str], name: str, number: int) -> Item:
    """Return the row's cells, or a bad row if one of them is null or not UTF-8."""
    values = []
    for field, cell in zip(fields, row, strict=True):
        if cell is None:
            return BadRow(name, number, field, "null")
        try:
            values.append(cell.decode())
        except UnicodeDecodeError:
            return BadRow(name, number, field, "not UTF-8")
    return values[0], values[1] if len(values) > 1 else ""
