"""Reading of an output from the disk, also while another process is writing it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from embedfarm.collector.journal import JournalLine
from embedfarm.collector.manifest import (
    ERRORS_FILE,
    STATE_DIRECTORY,
    Failure,
    Layout,
    OutputError,
    Part,
    check_bytes,
    find_listing,
    read_manifest,
)
from embedfarm.collector.output_directory import JOURNAL_FILE, State, read_request, read_state
from embedfarm.collector.result_span import failures_of, gather, layout_of
from embedfarm.collector.sinks import ListingSink, PartRows, Sink, open_sink
from embedfarm.contract.durable_files import last_line, ordered_lines
from embedfarm.contract.records import Result

T = TypeVar("T")


class _Head(msgspec.Struct):
    """Beginning of a journal's line: the part alone, which is quick to read."""

    part: Part


_heads: Final = msgspec.json.Decoder(_Head)
_entries: Final = msgspec.json.Decoder(JournalLine)
_failures: Final = msgspec.json.Decoder(Failure)


class NotBegun(OutputError):
    """Raised when there is no output yet, or not any more."""


class Chunks(NamedTuple):
    """Consecutive chunks, each with its vector or the reason why it has none.

    Attributes:
        batch: Vectors and ids of the chunks.
        layout: Layout of the rows of `batch`.
        failures: Chunks that failed, in order.
    """

    batch: PartRows
    layout: Layout
    failures: Sequence[Failure]

    @property
    def end(self) -> int:
        """Index after the last chunk."""
        return self.batch.start + len(self.batch.good)

    def within(self, start: int, limit: int) -> "Chunks":
        """Return up to `limit` of the chunks from `start` on, in memory of their own."""
        batch, first = self.batch, start - self.batch.start
        last = min(first + limit, len(batch.good))
        return Chunks(
            PartRows(
                start,
                None if batch.ids is None else batch.ids[first:last],
                batch.matrix[first:last].copy(),
                batch.good[first:last],
            ),
            self.layout,
            [each for each in self.failures if start <= each.index < batch.start + last],
        )


def chunks_of(results: Sequence[Result]) -> Chunks:
    """Return the chunks of consecutive results of one layout."""
    failures = [failure for result in results for failure in failures_of(result)]
    return Chunks(gather(results), layout_of(results[0]), failures)


class _PartFacts(NamedTuple):
    """A part and what failed in it."""

    part: Part
    layout: Layout
    failures: Sequence[Failure]


class OutputReader:
    """Reads the chunks of an output that are on the disk, finished or not; it takes no lock.

    What it sees is the output as it was when it was opened. Memory holds one part. The bytes of
    each part of a finished output are compared with their checksum before they are read.

    Attributes:
        lists: Whether each piece is read from where its vectors are stored.
        available: Index after the last chunk that is on the disk.
        count: Number of chunks of a finished output, else None.
        job: Identifier of the job of a finished output, else "".

    Raises:
        NotBegun: There is no output.
        OutputError, OSError: The output is damaged, or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._checked = directory, -1  # beginning of the part that was compared
        self._record = record = _open(directory)
        self._sink: Sink = open_sink(record.format, directory)
        self.lists = isinstance(self._sink, ListingSink)
        self.available = record.available
        self.count, self.job = record.count, record.job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._record.close()

    def read(self, start: int, limit: int) -> Chunks | None:
        """Return up to `limit` chunks of one part from `start` on; None if `start` is not there.

        Raises:
            OutputError, OSError: The part is damaged, or was replaced meanwhile.
        """
        if start >= self.available:
            return None
        if not isinstance(self._sink, ListingSink):
            return self.read_part(start).within(start, limit)
        part, layout, failures = self._part_of(start)
        batch = self._sink.read_some(part, layout, start, limit)
        return Chunks(batch, layout, failures).within(start, limit)

    def read_part(self, index: int) -> Chunks:
        """Return all chunks of the part that has chunk `index`, which is available.

        Raises:
            OutputError, OSError: The part is damaged, or was replaced meanwhile.
        """
        part, layout, failures = self._part_of(index)
        return Chunks(self._sink.read_all(part, layout, failures), layout, failures)

    def expect(self, part: Part) -> None:
        """Refuse an output that does not have this part any more.

        Raises:
            OutputError: Another part is in its place, or none.
        """
        there = part.start < self.available and self._record.part_of(part.start).part == part
        if not there:
            raise OutputError(f"{self._directory / part.file} was replaced meanwhile")

    def _part_of(self, index: int) -> _PartFacts:
        """Return what is known of the part that has chunk `index`, which is as it was written."""
        facts = self._record.part_of(index)
        if self.count is not None and self._checked != facts.part.start:
            check_bytes(self._directory, facts.part)
            self._checked = facts.part.start
        return facts

    def failures(self, start: int, limit: int) -> list[Failure]:
        """List up to `limit` failed chunks from `start` on; what was before them is not read."""
        return list(islice(self._record.failures_from(start), limit))


class _Finished:
    """Finished output: a manifest and its list of errors."""

    def __init__(self, directory: Path) -> None:
        manifest = read_manifest(directory)
        self.available = self.count = manifest.count
        self.job, self.format = manifest.job, manifest.format
        self._layout, self._parts, self._failed = manifest.layout, manifest.parts, manifest.failed
        self._errors = find_listing(directory, ERRORS_FILE)

    def part_of(self, index: int) -> _PartFacts:
        """Return the part that has chunk `index`, its layout and what failed in it."""
        part = self._parts[bisect_right(self._parts, index, key=lambda each: each.end)]
        failures = list(islice(self.failures_from(part.start), part.errors))
        return _PartFacts(part, self._layout, failures)

    def failures_from(self, index: int) -> Iterator[Failure]:
        """Yield the failed chunks from chunk `index` on, in order."""
        if self._failed:
            with self._errors.open("rb") as file:
                lines = ordered_lines(file, lambda line: _decode(_failures, line).index, index)
                yield from (_decode(_failures, line) for line in lines)

    def close(self) -> None:
        """Do nothing: no file is open."""


class _Unfinished:
    """Unfinished output: a journal, whose last line may be half written."""

    count: None = None
    job = ""

    def __init__(self, directory: Path) -> None:
        # The journal, once open, outlives the end of the job.
        self._journal = (directory / STATE_DIRECTORY / JOURNAL_FILE).open("rb")
        try:
            self.format = str(read_request(directory).get("format"))
            line = last_line(self._journal)
            self.available = _decode(_heads, line).part.end if line else 0
        except BaseException:
            self._journal.close()
            raise

    def part_of(self, index: int) -> _PartFacts:
        """Return the part that has chunk `index`, its layout and what failed in it."""
        entry = next(self._entries(index))
        return _PartFacts(entry.part, entry.layout, entry.failures)

    def failures_from(self, index: int) -> Iterator[Failure]:
        """Yield the failed chunks from chunk `index` on, in order."""
        for entry in self._entries(index):
            yield from (each for each in entry.failures if each.index >= index)

    def _entries(self, index: int) -> Iterator[JournalLine]:
        """Return the entries of the journal from the part with chunk `index` on."""
        lines = ordered_lines(self._journal, lambda line: _decode(_heads, line).part.end, index + 1)
        return (_decode(_entries, line) for line in lines)

    def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()


def _open(directory: Path) -> _Finished | _Unfinished:
    for last in (False, True):  # it may be finished between two looks
        match read_state(directory):
            case State.FINISHED:
                return _Finished(directory)
            case State.UNFINISHED:
                try:
                    return _Unfinished(directory)
                except FileNotFoundError:
                    continue
                except OutputError:
                    if last:
                        raise
            case State.NEW:
                break
    raise NotBegun(f"there is no output in {directory}")


def read_parts(directory: Path) -> list[Part]:
    """Return the parts of an unfinished output that are on the disk.

    Raises:
        OutputError, OSError: The journal is damaged, or cannot be read.
    """
    with (directory / STATE_DIRECTORY / JOURNAL_FILE).open("rb") as file:
        return [_decode(_heads, line).part for line in file if line.endswith(b"\n")]


def _decode(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OutputError(f"a line is damaged: {error}") from error
