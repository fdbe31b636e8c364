"""Parquet: one item per row, only the columns asked for."""

from collections.abc import Iterator
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from embedfarm.producer.readers.fields import Fields
from embedfarm.producer.readers.items import Item
from embedfarm.producer.readers.record_batches import RowReader
from embedfarm.producer.readers.source import Cursor

_BATCH_ROWS: Final = 512
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
    batches = table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=rows.columns)
    yield from rows.items(batches, skip, cursor)


def schema(file: BinaryIO, _name: str) -> pa.Schema:
    """Return the schema of a file, whose rows are not read."""
    return _open(file).schema_arrow


def _open(file: BinaryIO) -> pq.ParquetFile:
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _groups_from(table: pq.ParquetFile, row: int) -> tuple[list[int], int]:
    """Return the row groups from that of `row` on, and the rows before `row` in the first one."""
    groups = range(table.num_row_groups)
    for group in groups:
        rows = table.metadata.row_group(group).num_rows
        if row < rows:
            return list(groups[group:]), row
        row -= rows
    return [], 0
