"""Check that the columns beside vectors on the disk are those that the source has."""

from collections import deque
from collections.abc import Callable, Iterable

import pyarrow as pa

from embedfarm.collector.column_rows import same_rows, take_rows
from embedfarm.collector.manifest import Part
from embedfarm.collector.sinks.part_rows import KeptColumns
from embedfarm.collector.source_check import SourceChanged, explain


class ColumnCheck:
    """Tells whether a source still has the columns that were written beside its vectors.

    Feed it the source's columns in order. Memory holds those of one part.

    Args:
        read: Reads the columns of a part.
        parts: The parts that are compared, in order.
        first: Index of the first row that is fed.
    """

    def __init__(
        self, read: Callable[[Part], KeptColumns | None], parts: Iterable[Part], first: int = 0
    ) -> None:
        self._read = read
        self._parts = deque(each for each in parts if each.start >= first)
        self._held: list[pa.RecordBatch] = []
        self._first = self._end = first

    def feed_all(self, batches: deque[pa.RecordBatch]) -> None:
        """Take the columns of the next rows out of a queue, until it is empty.

        Raises:
            SourceChanged: A part has other ones.
            PartError, OSError: A part cannot be read.
        """
        while batches:
            self.feed(batches.popleft())

    def feed(self, batch: pa.RecordBatch) -> None:
        """Take the columns of the next rows.

        Raises:
            SourceChanged: A part has other ones.
            PartError, OSError: A part cannot be read.
        """
        if not self._parts:
            return
        self._held.append(batch)
        self._end += batch.num_rows
        while self._parts and self._end >= self._parts[0].end:
            self._compare(self._parts.popleft())

    def _compare(self, part: Part) -> None:
        """Compare the columns of a part whose rows are all there."""
        table = pa.Table.from_batches(self._held)
        there = self._read(part)
        if there is not None:
            rows = take_rows(table, there.indices - self._first)
            if not same_rows(rows.select(there.table.column_names), there.table):
                raise SourceChanged(explain(part, "the source has other columns now"), part)
        self._held = table.slice(part.end - self._first).to_batches()
        self._first = part.end
