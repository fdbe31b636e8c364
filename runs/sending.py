"""The corpus of a run: read, compared with what earlier runs have made of it, and sent."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from embedfarm.collector.column_check import ColumnCheck
from embedfarm.collector.manifest import SKIPPED_FILE, Part
from embedfarm.collector.output import Output
from embedfarm.collector.source_check import Mark, PrefixCheck, SourceChanged, SourceCheck
from embedfarm.contract import tracing
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Rows, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.source_places import SourceReference
from embedfarm.contract.status import JobStatus
from embedfarm.producer.submitter import Rewind, Stale, SubmissionCancelled, Submitter
from embedfarm.readers import (
    CorpusDigest,
    CorpusError,
    CorpusShare,
    Cursor,
    fail_on_bad_row,
    look_at,
    read_corpus,
)
from embedfarm.readers.fields import ColumnQueue
from embedfarm.readers.limits import Limits
from embedfarm.readers.references import references
from embedfarm.runs.disk_room import with_room
from embedfarm.runs.request import Request, file_facts
from embedfarm.runs.skipped_rows import SkippedFile, describe_no_rows

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Sending:
    """Reads and sends the corpus of one run.

    Attributes:
        request: Says where the corpus is, and how it is read.
        out: The output directory.
        stop: Event that ends the sending.
        limits: What the corpus may hold.
        full_disk_seconds: Time between two attempts to list a skipped row on a full disk.
        source: Check that is told what was read; the collector compares results with it.
        skipped: Number of rows that became no chunk, so far.
        expected: Estimate of the chunks of the corpus, 0 while nobody can tell.
        files: The `file_facts` of the sources, as they were when the reading began.
    """

    request: Request
    out: Path
    stop: threading.Event
    limits: Limits
    full_disk_seconds: float
    source: SourceCheck = field(default_factory=SourceCheck)
    skipped: int = 0
    expected: int = 0
    files: Mapping[str, list[int]] = field(default_factory=dict)
    _columns: ColumnCheck = field(init=False)

    def rooted(self, settings: Settings) -> Settings:
        """Return settings for a private farm, whose workers may read what its command says.

        Raises:
            CorpusError: Blocks are to refer to the corpus, and cannot.
        """
        roots = {each.file.rpartition("/")[0] or "/" for each in self._beginnings()}
        return settings.model_copy(
            update={"source_roots": (*settings.source_roots, *sorted(roots))}
        )

    def _beginnings(self) -> list[SourceReference]:
        """Return the beginnings of the corpus's files if blocks are to refer to them, else none."""
        request = self.request
        if request.spec.texts_from != "source":
            return []
        return references(request.sources, request.options)

    def note(self, job: Job, status: JobStatus, chunks_reused: int) -> None:
        """Note with the job what the server cannot count, if that has changed.

        Args:
            job: The job.
            status: Its status, with what was noted before.
            chunks_reused: Number of chunks so far whose vectors are those of other chunks.
        """
        counts = {"rows_skipped": self.skipped, "chunks_reused": chunks_reused}
        grown = {name: count for name, count in counts.items() if count > getattr(status, name)}
        if self.expected not in {0, status.chunks_expected}:
            grown["chunks_expected"] = self.expected
        for name, count in grown.items():
            job.note(name, count)

    def unchanged(self, output: Output) -> int:
        """Count the parts before the first one that was made of other rows than there are now."""
        request, parts = self.request, output.parts
        check, columns = PrefixCheck(parts), ColumnCheck(output.read_columns, parts)
        held, kept = ColumnQueue(), len(parts)
        for rows in read_corpus(
            request.sources, request.options, lambda _: None, columns=self._if_kept(held)
        ):
            if kept == len(parts):
                kept = _count_same(parts, partial(columns.feed_all, held))
            feed = partial(check.feed, text_checksums(rows.texts), rows.ids)
            same = _count_same(parts, feed)
            kept = min(kept, same)
            # Columns are read ahead of texts, so that earlier texts may have changed as well.
            if kept < len(parts) and (same < len(parts) or check.count >= parts[kept].start):
                break
        else:
            kept = min(kept, _count_same(parts, check.finish))
        if kept < len(parts):
            log.warning("embeds again from row %d on", parts[kept].start)
        return kept

    def send(self, submitter: Submitter, output: Output, trace: str) -> None:
        """Send the corpus; again from where the server has lost it, or has other rows of it.

        A job that somebody cancels gets no more; whoever collects ends it.

        Args:
            submitter: Submitter of the job that fills the output.
            output: The output, which says what is done, and where the last run was.
            trace: Trace that the sending is a part of.

        Raises:
            SourceChanged: What is on disk was made of other rows, or the corpus was changed while
                it was read.
            CorpusError: The corpus cannot be read.
            JobRefused: Somebody deleted the job.
            Rewind: The server has lost rows, and standard input cannot be read again.
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        while not self.stop.is_set():
            try:
                submitter.watch(self._send(submitter, output, trace))
            except SubmissionCancelled:
                self.source.abandon()
                return
            except Rewind:
                if "-" in self.request.sources:
                    raise
                submitter.attach()
            except Stale as error:
                if "-" in self.request.sources:
                    raise SourceChanged(f"{error}, of other rows than come now") from error
                # What the collector holds was compared with the rows as they were: none of it is
                # written once it is decided from where on to embed again.
                with self.source.held:
                    self._with_room(partial(self.source.begin, output.parts))
                    log.warning("%s: embeds again from row %d on", error, output.next_index)
                    submitter.start_over(output.next_index)

    def _send(self, submitter: Submitter, output: Output, trace: str) -> int:
        """Read the corpus, compare the part of it that is done, and send the rest."""
        request = self.request
        files = file_facts(request.sources)
        facts = look_at(request.sources, request.options)
        mark = output.mark
        # A server that has lost its log's end may want rows again that come before the mark.
        if mark is not None and (mark.facts != facts.digest or mark.row > submitter.start):
            mark = None
        sample = self.source.sample
        if mark is not None and sample is not None and not sample.recall(mark.facts):
            mark = None
        first = mark.row if mark else 0
        self._with_room(partial(self.source.begin, output.parts, first))
        self._columns = ColumnCheck(output.read_columns, output.parts, first)
        beginnings = self._beginnings()
        record = SkippedFile(self.out / SKIPPED_FILE, self.full_disk_seconds, self.stop)
        with contextlib.closing(record):
            rows = self._rest(self._rows(record, mark, facts), submitter.start, mark)
            with tracing.span("submit", trace, first_chunk=submitter.start):
                count = submitter.submit(rows, beginnings)
            if not self.stop.is_set():
                if look_at(request.sources, request.options).digest != facts.digest:
                    raise SourceChanged("the source was changed while it was read; run this again")
                self.files = files
                self.source.end()
            return count

    def _rest(self, source: Iterator[Rows], start: int, mark: Mark | None) -> Iterator[Rows]:
        """Yield the rows from `start` on.

        Raises:
            Stale: The source has fewer rows than `start`.
            CorpusError: It has none at all.
        """
        index = mark.row if mark else 0
        for rows in source:
            if self.stop.is_set():
                return
            skip = max(0, start - index)
            index += len(rows.texts)
            if skip < len(rows.texts):
                yield rows.piece(skip, len(rows.texts))
        if self.stop.is_set():
            return
        if index < start:
            self.source.check_end()
            raise Stale(f"the source has {index} rows now; an earlier run had sent {start}")
        if not index:
            raise CorpusError(describe_no_rows(self.skipped, self.out))

    def _rows(self, record: SkippedFile, mark: Mark | None, facts: CorpusDigest) -> Iterator[Rows]:
        """Yield the rows of the corpus from a mark on, all of which go through the comparison."""
        request = self.request
        on_bad_row = record.add if request.skip_bad_rows else fail_on_bad_row
        columns = ColumnQueue()
        cursor = Cursor(mark.location, mark.offset, mark.line) if mark else Cursor()
        index = mark.row if mark else 0
        limits = replace(self.limits, chunks_before=index)
        share = CorpusShare.of(request.sources, request.options)
        for rows in read_corpus(
            request.sources, request.options, on_bad_row, cursor=cursor, limits=limits,
            columns=self._if_kept(columns), placed=request.spec.texts_from == "source",
        ):  # fmt: skip
            self._put(columns)
            self.skipped = record.count
            index += len(rows.texts)
            self.expected = share.chunks(index, cursor)
            marked = facts.settled and not record.count  # skipped rows are listed from the start
            here = Mark(index, cursor.location, cursor.offset, cursor.line, facts.digest)
            yield self._with_room(partial(self.source.feed, rows, here if marked else None))
        self.skipped = record.count

    def _put(self, columns: ColumnQueue) -> None:
        """Put columns that were read where the parts take them from."""
        while columns and self.source.columns is not None:
            self._with_room(partial(self.source.columns.put, columns[0]))
            self._columns.feed(columns.popleft())

    def _if_kept(self, columns: ColumnQueue) -> ColumnQueue | None:
        """Return a queue of columns, if any are kept."""
        return None if self.source.columns is None else columns

    def _with_room(self, begin: Callable[[], T]) -> T:
        """Return the answer of `begin`, which is repeated until the disk has room for it."""
        return with_room(begin, self.out, self.full_disk_seconds, self.stop)


def _count_same(parts: Sequence[Part], compare: Callable[[], object]) -> int:
    """Return how many parts come before the first one that `compare` finds to be of other rows."""
    try:
        compare()
    except SourceChanged as error:
        if error.part is None:
            raise
        return parts.index(error.part)
    return len(parts)
