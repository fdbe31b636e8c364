"""An output directory: results in, in order; parts, error list and manifest out.

A part is durable before its journal line is, and its line before `add` returns it: only then may
its results be deleted elsewhere. So a crash anywhere repeats at most one part, byte for byte.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import msgspec

from embedfarm.collector.column_spool import ColumnSpool
from embedfarm.collector.id_digests import IdDigests
from embedfarm.collector.journal import Journal, JournalLine
from embedfarm.collector.linked_parts import LinkedParts
from embedfarm.collector.manifest import (
    ERRORS_FILE,
    STATE_DIRECTORY,
    About,
    Layout,
    Manifest,
    OutputError,
    Part,
    TilingError,
    WorkerFigures,
    Written,
    tile,
    write_manifest,
)
from embedfarm.collector.output_directory import (
    JOURNAL_FILE,
    REQUEST_FILE,
    claim,
    locked,
    refuse_url,
)
from embedfarm.collector.result_span import describe, gather, layout_of
from embedfarm.collector.row_file import RowFile
from embedfarm.collector.sinks import (
    ColumnSink,
    KeptColumns,
    ListingSink,
    PartRows,
    open_sink,
)
from embedfarm.collector.source_check import Mark
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE
from embedfarm.contract.durable_files import (
    remove_temporaries,
    replacing,
    sha256_of,
    sync_directory,
    whole,
)
from embedfarm.contract.records import Result

IDS_FILE: Final = "ids"
RECEIPT_BYTES: Final = 160  # of a result whose vectors are stored, without ids and checksums

_NO_ROWS: Final = Layout(0, "float32", ids=False)


class Output:
    """One job's output directory, open in this process alone.

    Attributes:
        chunks_reused: Number of chunks so far whose vectors are those of other chunks; any thread
            may read it.

    Args:
        directory: Directory of the output, made when absent.
        request: What identifies the job; an output is only continued under an equal request.
        sink: Name of the format.
        part_bytes_max: Bytes of vectors (or of ids, where those are longer) after which a part is
            closed, at the end of a result.
        mark_before: Gives, for a row, the last place at or before it from which the source can be
            read on.
        columns: Has the columns of the source that are written beside the vectors.
        linked: Parts of another output, whose files are taken where they have the same rows.

    Raises:
        OutputBusy: Another process has the directory open.
        OutputError: The output is finished, belongs to another request, or lost files it had.
    """

    def __init__(  # noqa: PLR0913 -- the last three are for those who read the source
        self,
        directory: Path,
        request: dict[str, Any],
        *,
        sink: str,
        part_bytes_max: int,
        mark_before: Callable[[int], Mark | None] = lambda _row: None,
        columns: ColumnSpool | None = None,
        linked: LinkedParts | None = None,
    ) -> None:
        refuse_url(directory)
        self.directory = directory
        self._format = sink
        self._sink = open_sink(sink, directory)
        self._part_bytes_max = part_bytes_max
        self._mark_before = mark_before
        self._columns = columns
        self._linked = linked
        private = directory / STATE_DIRECTORY
        with ExitStack() as stack:
            stack.enter_context(locked(private))
            claim(directory, {**request, "format": sink})
            self._journal = Journal(private / JOURNAL_FILE)
            self._id_digests = IdDigests(private / IDS_FILE)
            self._text_digests = RowFile(directory / DIGESTS_FILE, DIGEST_BYTES)
            self._read_journal()
            self._check_columns()
            self._closing = stack.pop_all()

    def _read_journal(self) -> None:
        """Count the parts that are on the disk, and undo what goes beyond them."""
        self._parts: list[Part] = []
        self._marks: list[Mark | None] = [None, None]
        self._workers: defaultdict[str, WorkerFigures] = defaultdict(WorkerFigures)
        self._layout = _NO_ROWS
        self._results: list[Result] = []
        self._digests = bytearray()
        self._reused: list[Mapping[str, int]] = []
        self._reused_on_disk: Counter[str] = Counter()
        self._bytes = 0
        self._expected = 0
        for entry in self._journal:
            self._count(entry)
        self.chunks_reused = self._reused_on_disk.total()
        self.recover()

    def _check_columns(self) -> None:
        """Refuse columns of other types than those of the parts that are there."""
        if self._columns is None or not self._parts:
            return
        there = self.read_columns(self._parts[0])
        if there is not None:
            self._columns.compare(there.table.schema, f"{self.directory} has parts with")

    def read_columns(self, part: Part) -> KeptColumns | None:
        """Return the columns of the corpus that a part has; None for none.

        Raises:
            PartError, OSError: The part cannot be read.
        """
        sink = self._sink
        return sink.read_columns(part, self._layout) if isinstance(sink, ColumnSink) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the directory; results in memory are dropped."""
        self._closing.close()

    @property
    def parts(self) -> Sequence[Part]:
        """The parts that are on the disk, in order."""
        return self._parts

    @property
    def next_index(self) -> int:
        """Index after the last chunk that is on the disk: where a resume begins."""
        return self._parts[-1].end if self._parts else 0

    @property
    def buffered(self) -> range:
        """Chunks in memory, whose results must be kept elsewhere; `stop` is the next to add."""
        return range(self.next_index, self._expected)

    @property
    def held(self) -> Sequence[Result]:
        """The results in memory, in order."""
        return self._results

    @property
    def comparable(self) -> bool:
        """Whether all chunks on the disk have an id, and the digest of their text is known."""
        return self._layout.ids and self._text_digests.holds(self.next_index)

    @property
    def mark(self) -> Mark | None:
        """A place in the source before the last part, from which it can be read on."""
        return self._marks[0]

    @property
    def cuts(self) -> Sequence[int]:
        """The rows before which results should end, in order, so that parts can be taken."""
        return () if self._linked is None else self._linked.ends

    @property
    def listed(self) -> AbstractSet[str] | None:
        """The stored files that the parts list; None where the output has the vectors itself."""
        return self._sink.listed if isinstance(self._sink, ListingSink) else None

    @property
    def keeps_columns(self) -> bool:
        """Whether columns of the source are written beside the vectors."""
        return self._columns is not None

    def keep(self, count: int) -> None:
        """Drop all parts behind the first `count`; a crash leaves files that the next run drops."""
        self._journal.keep(count)
        self._read_journal()

    def recover(self) -> None:
        """Remove from the disk what an interrupted write has left."""
        remove_temporaries(self.directory)
        remove_temporaries(self.directory / STATE_DIRECTORY)
        self._journal.recover()
        self._sink.resume(self._parts)
        self._id_digests.resume(self.next_index)
        self._text_digests.resume(self.next_index)

    def add(
        self, result: Result, digests: bytes = b"", reused: Mapping[str, int] = MappingProxyType({})
    ) -> Part | None:
        """Take the next result, and return the part that it closed, which is durable.

        A result from before `buffered.stop` is a duplicate and changes nothing.

        Args:
            result: The result.
            digests: The `text_digests` of its texts, if they are known.
            reused: How many of its vectors were there before, by the output that had them.

        Raises:
            OutputError: The result leaves a gap, contradicts itself, lacks vectors, or has other
                dimensions, another dtype, or ids where the others have none.
            OSError: The disk refused; the result is taken all the same: `recover`, then `write`.
        """
        if result.start < self._expected:
            return None
        if result.start > self._expected:
            raise OutputError(f"result {result.start} came where {self._expected} is next")
        if result.known:
            raise OutputError(
                f"result {result.start} lacks vectors that only a run with --reuse, or with "
                "--deduplicate, knows"
            )
        layout = layout_of(result)
        if self._expected and layout != self._layout:
            raise OutputError(f"result {result.start} is {layout}, the others {self._layout}")
        self._layout = layout
        self._results.append(result)
        self._digests += digests
        self._reused.append(reused)
        self.chunks_reused += sum(reused.values())
        self._expected += result.count
        self._bytes += max(_size(result), self._size_of_columns(result))
        return self.write()

    def write(self, *, early: bool = False) -> Part | None:
        """Write results in memory as a part if they fill one, or if `early`; return that part.

        Raises:
            OSError: The disk refused; `recover`, and write again.
        """
        full = self._bytes >= self._part_bytes_max
        if self._linked is not None and self._results:
            most = 2 * self._part_bytes_max
            full = self._linked.ends_at(self._expected) or (
                full and not self._linked.begins(self.next_index, bytes(self._digests), most)
            )
        return self._write_part() if full or (early and self._results) else None

    def forget(self) -> None:
        """Drop the results in memory; the server still has them."""
        self._expected = self.next_index
        self.chunks_reused = self._reused_on_disk.total()
        self._let_go()

    def flush(self) -> None:
        """Write the results in memory to the disk, as a part that may be small.

        Raises:
            OSError: The disk refused; `recover`, and write again.
        """
        if self._results:
            self._write_part()

    def finish(self, count: int, about: About) -> Manifest:
        """Write what is buffered, the error list and the manifest; the output is complete then.

        Raises:
            TilingError: Not all of `count` chunks were added; nothing has changed.
            OSError: The disk refused; `recover`, and finish again.
        """
        if self._expected != count:
            raise TilingError(f"{self._expected} of {count} chunks have results")
        self.flush()
        tile(self._parts, count)
        self._sink.finish(count, self._layout)
        manifest = write_manifest(self.directory, self._manifest(count, about))
        for name in (JOURNAL_FILE, REQUEST_FILE):
            (self.directory / STATE_DIRECTORY / name).unlink()
        self._id_digests.remove()
        return manifest

    def _write_part(self) -> Part:
        """Put the buffered results on the disk, then into the journal."""
        written = self._write_results()
        entry = describe(self._results, self._reused, written)
        entry.mark = self._mark_before(entry.part.end)
        if self._layout.ids:
            names = (name for result in self._results for name in result.ids or ())
            self._id_digests.add(entry.part.start, names)
        if len(self._digests) == entry.part.count * DIGEST_BYTES:
            self._text_digests.append(entry.part.start, bytes(self._digests))
        self._journal.append(entry)
        self._count(entry)
        self._let_go()
        if self._columns is not None:
            self._columns.forget(entry.part.end)
        return entry.part

    def _write_results(self) -> Written:
        """Put the buffered results on the disk, as the format has it."""
        if isinstance(self._sink, ListingSink):
            return self._sink.write_results(self._results)
        rows = gather(self._results)
        if self._columns is not None:
            rows = rows._replace(columns=self._columns.take(rows.start, rows.good))
        return self._take(rows) or self._sink.write(rows)

    def _take(self, rows: PartRows) -> Written | None:
        """Take the file of another output that has just these rows, if there is one."""
        if self._linked is None:
            return None
        return self._linked.take(rows, self._layout, bytes(self._digests), self.directory)

    def _size_of_columns(self, result: Result) -> int:
        """Return about the bytes that the columns beside a result's vectors take."""
        return 0 if self._columns is None else self._columns.size(result.start, result.count)

    def _let_go(self) -> None:
        """Drop the results in memory."""
        self._results, self._reused, self._bytes = [], [], 0
        self._digests.clear()

    def _count(self, entry: JournalLine) -> None:
        """Remember a part that is in the journal."""
        self._parts.append(entry.part)
        self._marks = [self._marks[-1], entry.mark]
        self._layout = entry.layout
        self._expected = entry.part.end
        self._reused_on_disk.update(entry.reused)
        for name, figures in entry.workers.items():
            self._workers[name] += figures

    def _write_errors(self) -> str:
        """Write _errors.jsonl if a chunk failed, and return its digest."""
        path = self.directory / ERRORS_FILE
        if not any(part.errors for part in self._parts):
            if path.exists():  # of a run that did not come to its end, with other parts
                path.unlink()
                sync_directory(self.directory)
            return ""
        with replacing(path) as file:
            for entry in self._journal:
                file.writelines(msgspec.json.encode(line) + b"\n" for line in entry.failures)
        return sha256_of([whole(path)])

    def _digest_of_digests(self, count: int) -> str:
        """Return the SHA-256 of the file of all texts' digests; "" where some are not known."""
        if not count or not self._text_digests.holds(count):
            self._text_digests.remove()
            return ""
        return sha256_of([whole(self._text_digests.path)])

    def _manifest(self, count: int, about: About) -> Manifest:
        """Return the manifest: the caller's facts, and the sums over all parts."""
        return Manifest(
            **msgspec.structs.asdict(about),
            format=self._format,
            dimensions=self._layout.dimensions,
            dtype=self._layout.dtype,
            ids=self._layout.ids,
            count=count,
            failed=sum(part.errors for part in self._parts),
            tokens=sum(figures.tokens for figures in self._workers.values()),
            errors_sha256=self._write_errors(),
            digests_sha256=self._digest_of_digests(count),
            parts=self._parts,
            workers=dict(self._workers),
            reused=dict(self._reused_on_disk),
            repeated_ids=self._id_digests.find_repeated(count) if self._layout.ids else None,
        )


def _size(result: Result) -> int:
    """Return the bytes a result counts for: its vectors, or what else the server has where longer.

    That is its ids, and of vectors that are stored past the server the receipt.
    """
    ids = sum(map(len, result.ids or ()))
    receipt = 0 if result.receipt is None else RECEIPT_BYTES + len(result.checksums)
    vectors = result.embedded * result.vector_bytes
    return max(vectors, ids + receipt)
