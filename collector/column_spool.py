"""Columns of a corpus on their way to the parts of its output, in bounded memory.

Whoever reads the corpus puts them here before it sends the rows, and a part takes those of its
rows. They never go through the server. They are read anew after a crash, and need not survive it.
"""

import shutil
import threading
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedfarm.collector.column_rows import compact, take_rows
from embedfarm.collector.manifest import OutputError

SEGMENT_BYTES: Final = 32 << 20
"""Bytes of columns in memory; what is more, before its part takes it, goes into a file."""


class ColumnsMissing(OutputError):
    """Raised when the columns of rows are asked for that were not read, or not in this reading."""


@dataclass(frozen=True)
class _Segment:
    """Columns of consecutive rows in a file of Arrow's stream format.

    Attributes:
        start: Index of the first row.
        count: Number of rows.
        bytes: About the bytes that they take in memory.
        path: The file.
    """

    start: int
    count: int
    bytes: int
    path: Path

    def read(self) -> pa.Table:
        """Return the rows over the memory map of the file."""
        with pa.memory_map(str(self.path)) as file:
            return pa.ipc.open_stream(file).read_all()


class ColumnSpool:
    """Columns of the rows that were read and are not on the disk with their vectors yet.

    Where many of them wait, they do so in files.

    One thread may put while another one takes.

    Args:
        directory: A directory for the files; whatever is in it goes.
        schema: Schema of the columns.

    Attributes:
        schema: Schema of the columns.
    """

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._directory = directory
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._held_start = self._end = self._wanted = 0

    # The reader's side.

    def begin(self, first: int, wanted: int) -> None:
        """Begin to read, or begin again.

        Args:
            first: Index of the first row that is read.
            wanted: Index of the first row whose columns are wanted.

        Raises:
            OSError: The disk refused; nothing has changed.
        """
        with self._lock:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(parents=True)
            self._segments, self._held, self._held_bytes = [], [], 0
            self._end, self._wanted = first, wanted
            self._held_start = max(first, wanted)

    def compare(self, found: pa.Schema, what: str) -> None:
        """Refuse columns of other names or types.

        Raises:
            OutputError: They are others; the message begins with `what`.
        """
        if not found.equals(self.schema):
            raise OutputError(f"{what} {_line(found)}, and not {_line(self.schema)}")

    def put(self, batch: pa.RecordBatch) -> None:
        """Take the columns of the next rows.

        Raises:
            OutputError: The columns are of other types than they were.
            OSError: The disk refused; the same batch may be put again.
        """
        if set(self.schema.names) <= set(batch.schema.names):
            batch = batch.select(self.schema.names)
        self.compare(batch.schema, "while they were read, the columns to keep became")
        with self._lock:
            skip = min(batch.num_rows, max(0, self._wanted - self._end))
            rest = compact(batch.slice(skip))
            if self._held and self._held_bytes + rest.nbytes > SEGMENT_BYTES:
                self._write()
            self._end += batch.num_rows
            if rest.num_rows:
                self._held.append(rest)
                self._held_bytes += rest.nbytes

    def _write(self) -> None:
        """Put what is in memory into a file."""
        path = self._directory / f"{self._held_start:012d}.arrow"
        count = sum(batch.num_rows for batch in self._held)
        with path.open("wb") as file, pa.ipc.new_stream(file, self.schema) as stream:
            for batch in self._held:
                stream.write_batch(batch)
        self._segments.append(_Segment(self._held_start, count, self._held_bytes, path))
        self._held_start += count
        self._held, self._held_bytes = [], 0

    # The collector's side.

    def size(self, start: int, count: int) -> int:
        """Return about the bytes that the columns of some rows take."""
        with self._lock:
            held = _Segment(
                self._held_start, self._end - self._held_start, self._held_bytes, self._directory
            )
            spans = [*self._overlapping(start, start + count), held]
        return sum(
            each.bytes * rows // each.count
            for each in spans
            if (rows := min(start + count, each.start + each.count) - max(start, each.start)) > 0
        )

    def take(self, start: int, good: NDArray[np.bool_]) -> pa.Table:
        """Return the columns of some of the rows from `start` on, over memory maps.

        Args:
            start: Index of the first row.
            good: Whether each row is wanted, shape (count,).

        Raises:
            ColumnsMissing: They were not read, or were forgotten.
            OSError: They cannot be read.
        """
        end = start + len(good)
        with self._lock:
            spans = self._overlapping(start, end)
            pieces = [_cut(each.read(), each.start, start, end) for each in spans]
            if self._held:
                held = pa.Table.from_batches(self._held, self.schema)
                pieces.append(_cut(held, self._held_start, start, end))
        table = pa.concat_tables([self.schema.empty_table(), *pieces])
        if table.num_rows != len(good):
            raise ColumnsMissing(
                f"{table.num_rows} of {len(good)} rows from {start} on have their columns"
            )
        return table if good.all() else take_rows(table, np.flatnonzero(good))

    def forget(self, upto: int) -> None:
        """Remove what is known of rows below `upto`, which are on the disk."""
        with self._lock:
            while self._segments and self._segments[0].start + self._segments[0].count <= upto:
                self._segments.pop(0).path.unlink(missing_ok=True)
            while self._held and self._held_start + self._held[0].num_rows <= upto:
                batch = self._held.pop(0)
                self._held_start += batch.num_rows
                self._held_bytes -= batch.nbytes

    def _overlapping(self, start: int, end: int) -> list[_Segment]:
        """Return the files that have some of the rows from `start` to `end - 1`."""
        first = bisect_right(self._segments, start, key=lambda each: each.start + each.count)
        last = bisect_right(self._segments, end - 1, key=lambda each: each.start)
        return self._segments[first:last]


def _cut(table: pa.Table, first: int, start: int, end: int) -> pa.Table:
    """Return the rows from `start` to `end - 1` of a table whose first row is `first`."""
    begin = max(0, start - first)
    return table.slice(begin, max(0, min(table.num_rows, end - first) - begin))


def _line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
