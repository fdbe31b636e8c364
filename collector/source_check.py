"""Check that an output was made of the texts of its source, compared as the source is read.

Checksums of texts come with every result (`Result.checksums`) and lie with every part. A run reads
its source, and takes no result whose texts are not those that it has read in that place.
"""

import hashlib
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE
from embedfarm.collector.manifest import CHECKSUM_BYTES, OutputError, Part
from embedfarm.collector.text_digests import DIGEST_BYTES, text_digests
from embedfarm.collector.text_sample import TextSample
from embedfarm.contract.records import Result, Rows, text_checksums

if TYPE_CHECKING:
    from embedfarm.collector.column_spool import ColumnSpool

WAIT_SECONDS: Final = 1.0


class SourceChanged(OutputError):
    """Raised when the source no longer holds the texts that were embedded.

    Attributes:
        part: First part that was made of other texts; None where that is not known.
    """

    def __init__(self, message: str, part: Part | None = None) -> None:
        super().__init__(message)
        self.part = part


class RowsDiffer(Exception):
    """Raised when a result was made of other rows than those that the source has in its place."""


class Mark(msgspec.Struct, frozen=True):
    """A place in a source from which a later run can read on.

    Attributes:
        row: Index of the chunk that comes next.
        location: Number of the file, or directory, in the order in which they are read.
        offset: Bytes, rows or files that come before in that location, by its format.
        line: Lines that come before, or chunks of a directory's file.
        facts: What the source looked like when the rows before it were read.
    """

    row: int
    location: int
    offset: int
    line: int
    facts: str


class Finder(Protocol):
    """What knows which texts have a vector already, as a corpus is read."""

    def begin(self, count: int) -> None:
        """Begin with the corpus, or begin again behind its first `count` rows."""

    def find(self, digests: bytes, row: int) -> NDArray[np.int64]:
        """Return where the vectors of the next rows are, `NOWHERE` for those that are not known.

        Args:
            digests: The `text_digests` of the rows.
            row: Index of the first of them.
        """


class PrefixCheck:
    """Tells whether a source still begins with the texts that an output was made from.

    Feed it the source's rows in order.

    Args:
        parts: The parts of the output that are compared, in order.
        first: Index of the first row that is fed.
    """

    def __init__(self, parts: Iterable[Part], first: int = 0) -> None:
        self.count = first
        self._parts = iter(parts)
        self._begin_part()

    def feed(self, checksums: bytes, ids: Sequence[str] | None = None) -> None:
        """Take the checksums (`text_checksums`) and ids of the next rows, in batches of any size.

        Raises:
            SourceChanged: A part was made from other texts, or has other ids.
        """
        begin, rows = self.count, len(checksums) // CHECKSUM_BYTES
        self.count += rows
        done = 0
        while self._part is not None and done < rows:
            skip = max(0, self._part.start - begin - done)
            first = min(rows, done + skip)
            done = min(rows, self._part.end - begin)
            self._digest.update(checksums[first * CHECKSUM_BYTES : done * CHECKSUM_BYTES])
            self._names.update(_names_of(() if ids is None else ids[first:done]))
            if begin + done == self._part.end:
                self._end_part(self._part)

    def finish(self) -> int:
        """Return the number of rows in the source, when all of it was fed.

        Raises:
            SourceChanged: The source ends before the parts do.
        """
        if self._part is not None:
            raise SourceChanged(
                explain(self._part, f"the source ends at row {self.count}"), self._part
            )
        return self.count

    def _begin_part(self) -> None:
        """Expect the next part, if there is one."""
        self._part = next(self._parts, None)
        self._digest, self._names = hashlib.sha256(), hashlib.sha256()

    def _end_part(self, part: Part) -> None:
        """Compare a part whose rows are all there."""
        if self._digest.hexdigest() != part.texts_sha256:
            raise SourceChanged(explain(part, "the source has other texts now"), part)
        if part.names_sha256 not in ("", self._names.hexdigest()):
            raise SourceChanged(explain(part, "the source has other ids now"), part)
        self._begin_part()


class SourceCheck:
    """Compares results with the source, while one thread reads that and another one collects.

    It holds the checksums, digests and ids of the rows that were read and not yet collected: as
    many as the job's window has, and those of one batch.

    Attributes:
        count: Number of rows in the source, once all of it was read; else None.
        abandoned: Whether its reading has ended before that.
        reading: Number of the reading that goes on. What was accepted in an earlier one and is not
            on disk has to be accepted anew: the source may have changed in between.
        held: Lock: while somebody holds it, no other reading begins.
        known: Tells which vectors need not be made; None where all are.
        columns: Has the columns of the rows that are read; None where none are kept.
        sample: Chooses some texts that are kept; None where none are.
    """

    def __init__(self, sample: TextSample | None = None) -> None:
        self.sample = sample
        self.known: Finder | None = None
        self.columns: ColumnSpool | None = None
        self.count: int | None = None
        self.abandoned = False
        self.reading = 0
        self.held = threading.RLock()
        self._changed = threading.Condition()
        self._prefix = PrefixCheck([])
        self._first = 0  # index of the first row whose checksum is kept
        self._checksums = bytearray()
        self._digests = bytearray()
        self._places = np.zeros(0, np.int64)
        self._ids: list[str] = []
        self._with_ids = False
        self._marks: deque[Mark] = deque()

    # The reader's side.

    def begin(self, parts: Sequence[Part], first: int = 0) -> None:
        """Begin to read, or begin again.

        Args:
            parts: Parts of the output on disk; they are looked at here, when no part is written.
            first: Index of the first row that is read. Parts that begin before it are not compared:
                an earlier run has done that, and the source has not changed since. What it has kept
                of the sample has been recalled.

        Raises:
            OSError: The disk refused what `known` wrote; nothing has changed.
        """
        with self.held, self._changed:
            if self.known is not None:
                self.known.begin(first)  # first, since the disk may be full
            if self.columns is not None:
                self.columns.begin(first, parts[-1].end if parts else first)
            if self.sample is not None and not first:
                self.sample.begin()
            self.reading += 1
            self._prefix = PrefixCheck([part for part in parts if part.start >= first], first)
            self._first = parts[-1].end if parts else first
            self._checksums, self._digests = bytearray(), bytearray()
            self._places = np.zeros(0, np.int64)
            self._ids, self.count = [], None
            self._marks.clear()

    def feed(self, rows: Rows, mark: Mark | None = None) -> Rows:
        """Take the next rows, and the place behind them if the source can be read on from there.

        Returns:
            The rows, marked where the vector is known.

        Raises:
            SourceChanged: A part that is on disk was made from other rows.
            OSError: The disk refused what `known` wrote; the same rows may be fed again.
        """
        checksums = text_checksums(rows.texts)
        # Rows that are on disk; nobody else changes it.
        done = min(len(rows.texts), max(0, self._first - self._prefix.count))
        digests, places = text_digests(rows.texts), self._places[:0]
        if self.known is not None:
            places = self.known.find(digests, self._prefix.count)
            rows = rows._replace(known=(places != NOWHERE).tobytes())
        with self._changed:
            if self.sample is not None:
                self.sample.add(digests, rows.texts, self._prefix.count)
            self._prefix.feed(checksums, rows.ids)
            self._checksums += checksums[done * CHECKSUM_BYTES :]
            self._digests += digests[done * DIGEST_BYTES :]
            self._places = np.concatenate([self._places, places[done:]])
            self._with_ids = rows.ids is not None
            self._ids += () if rows.ids is None else rows.ids[done:]
            if mark is not None:
                self._marks.append(mark)
            self._changed.notify_all()
        return rows

    def check_end(self) -> int:
        """Return the number of rows in the source, when all of it was read.

        Raises:
            SourceChanged: The source ends before what is on disk does.
        """
        with self._changed:
            return self._prefix.finish()

    def end(self) -> None:
        """Say that all of the source was read, and that it was not changed meanwhile.

        Raises:
            SourceChanged: The source ends before what is on disk does.
        """
        with self._changed:
            self.count = self._prefix.finish()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Say that no more of the source is read: results of rows behind it are not accepted."""
        with self._changed:
            self.abandoned = True
            self._changed.notify_all()

    # The collector's side.

    def accept(self, result: Result) -> Result | None:
        """Return a result that was made of its rows of the source.

        A chunk that failed may have the checksum of whatever was found in its place; the answer has
        those of the source.

        Returns:
            The result; None if its rows are not read yet, after a moment's wait, or if the source
            is abandoned and lacks them.

        Raises:
            RowsDiffer: The source has other rows there, or ends before.
        """
        end = result.start + result.count
        with self._changed:
            self._changed.wait_for(
                lambda: self._prefix.count >= end or self.count is not None or self.abandoned,
                WAIT_SECONDS,
            )
            if self._prefix.count < end and self.count is None:
                return None
            first = result.start - self._first
            if first < 0 or self._prefix.count < end:
                raise RowsDiffer
            rows = slice(first, first + result.count)
            ids = self._ids[rows] if self._with_ids else None
            checksums = bytes(
                self._checksums[rows.start * CHECKSUM_BYTES : rows.stop * CHECKSUM_BYTES]
            )
            places = self._places[rows]
        return _agree(result, checksums, ids, places)

    def digests(self, result: Result) -> bytes:
        """Return the digests (`text_digests`) of the texts of a result that was accepted."""
        first = result.start - self._first
        with self._changed:
            return bytes(
                self._digests[first * DIGEST_BYTES : (first + result.count) * DIGEST_BYTES]
            )

    def keep_sampled(self, result: Result, digests: bytes) -> None:
        """Keep the vectors that a result has of texts of the sample.

        Args:
            result: A result that was accepted, and lacks no vector.
            digests: The `text_digests` of its texts.
        """
        if self.sample is not None:
            with self._changed:
                self.sample.keep_vectors(result, digests)

    def places(self, result: Result) -> NDArray[np.int64]:
        """Return where the vectors of the texts of a result are, as `known` says."""
        first = result.start - self._first
        with self._changed:
            return self._places[first : first + result.count]

    def forget(self, upto: int) -> None:
        """Drop what is known of rows below `upto`, which are on disk."""
        with self._changed:
            gone = min(upto - self._first, len(self._checksums) // CHECKSUM_BYTES)
            if gone > 0:
                self._first += gone
                del self._checksums[: gone * CHECKSUM_BYTES]
                del self._digests[: gone * DIGEST_BYTES]
                self._places = self._places[gone:]
                del self._ids[:gone]

    def mark_before(self, row: int) -> Mark | None:
        """Return the last place at `row` or before it from which the source can be read on.

        What has been read of the sample is on the disk then.

        Raises:
            OSError: The disk refused; nothing has changed.
        """
        with self._changed:
            place = bisect_right(self._marks, row, key=lambda mark: mark.row)
            for _ in range(place - 1):
                self._marks.popleft()
            mark = self._marks[0] if place else None
            if mark is None or self.sample is None:
                return mark
            kept = self.sample.so_far(mark.facts)
        self.sample.keep(kept)
        return mark


def _agree(
    result: Result, checksums: bytes, ids: list[str] | None, places: NDArray[np.int64]
) -> Result:
    """Return the result with the source's checksums, if all that did not fail was made of it.

    A vector that it lacks has to be known: an earlier run may have known others. It gets the ids of
    the source if it has none, as that of a block has which only refers to its texts.

    Raises:
        RowsDiffer: It was made of other rows, or lacks a vector that is not known.
    """
    known = np.frombuffer(result.known or bytes(result.count), np.bool_)
    if (
        len(checksums) != result.count * CHECKSUM_BYTES
        or result.ids not in (None, ids)
        or (known.any() and not (len(places) and (places[known] != NOWHERE).all()))
    ):
        raise RowsDiffer
    ours = np.frombuffer(checksums, "<u4")
    differs = np.zeros(result.count, np.bool_)
    differs[~known] = np.frombuffer(result.checksums, "<u4") != ours[~known]
    differs[[error.index - result.start for error in result.errors]] = False
    if differs.any():
        raise RowsDiffer
    return msgspec.structs.replace(result, checksums=checksums, ids=ids)


def names_sha256(ids: Iterable[str] | None) -> str:
    """Return the digest of ids in order, "" where there are none."""
    return "" if ids is None else hashlib.sha256(_names_of(ids)).hexdigest()


def _names_of(ids: Iterable[str]) -> bytes:
    return "".join(f"{each}\0" for each in ids).encode()


def explain(part: Part, problem: str) -> str:
    """Say what is wrong with a part, and what can be done about it."""
    return (
        f"rows {part.start} to {part.end - 1} ({part.file}) were embedded, and {problem}: restore "
        f"the source, embed again from row {part.start} on with --embed-changed, or choose another "
        "--out"
    )
