"""Parquet: one item per row, only the columns asked for."""

from collections.abc import Iterator
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import Item
from embedfarm.readers.record_batches import RowReader
from embedfarm.readers.source import Cursor

_BATCH_ROWS: Final = 512
_BATCH_ROWS_MAX: Final = 4096
_BATCH_BYTES: Final = 2 << 20
_BUFFER_BYTES: Final = 1 << 20


def read(file: BinaryIO, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per row; an integer as id becomes its digits.

    Row groups are read through a buffer, never whole.

    Raises:
        CorpusError: A column is missing or of a type that holds no text.
    """
    table = _open(file)
    rows = RowReader(table.schema_arrow, name, fields)
    groups, skip = _groups_from(table, cursor.offset)
    batch_rows = _BATCH_ROWS if fields.columns is None else _wide_rows(table.metadata)
    batches = table.iter_batches(batch_rows, row_groups=groups, columns=rows.columns)
    yield from rows.items(batches, skip, cursor)


def schema(file: BinaryIO, _name: str) -> pa.Schema:
    """Return the schema of a file, whose rows are not read."""
    return _open(file).schema_arrow


def _open(file: BinaryIO) -> pq.ParquetFile:
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _wide_rows(metadata: pq.FileMetaData) -> int:
    """Return the rows of a batch with many columns: more of them at a time cost less."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    row_bytes: int = sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows)
    return max(_BATCH_ROWS, min(_BATCH_ROWS_MAX, _BATCH_BYTES // max(1, row_bytes)))


def _groups_from(table: pq.ParquetFile, row: int) -> tuple[list[int], int]:
    """Return the row groups from that of `row` on, and the rows before `row` in the first one."""
    groups = range(table.num_row_groups)
    for group in groups:
        rows = table.metadata.row_group(group).num_rows
        if row < rows:
            return list(groups[group:]), row
        row -= rows
    return [], 0
