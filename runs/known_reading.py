"""A reading of a corpus that puts down what is known of it, and lists the texts that are not."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE
from embedfarm.collector.durable_files import replacing
from embedfarm.collector.known_vectors import OUTPUT, KnownVectors
from embedfarm.collector.output import Output
from embedfarm.collector.source_check import PrefixCheck, SourceChanged
from embedfarm.collector.text_digests import DIGEST_BYTES, text_digests
from embedfarm.contract.records import ChunkError, Result, Rows, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.producer.readers import CorpusError, fail_on_bad_row, look_at, read_corpus
from embedfarm.runs.disk_room import with_room
from embedfarm.runs.request import Request, file_facts
from embedfarm.runs.run import Interrupted
from embedfarm.runs.size_limits import check_output, corpus_limits
from embedfarm.runs.skipped_rows import SKIPPED_FILE, SkippedFile, describe_no_rows

if TYPE_CHECKING:
    from typing import BinaryIO

T = TypeVar("T")


@dataclass
class KnownReading:
    """One reading of a corpus from its first row to the last.

    What is known goes into the output, up to the first text that is not. Such texts are listed,
    each once.

    Attributes:
        request: Says where the corpus is, and how it is read.
        output: The output of the corpus, of which earlier readings may have written parts.
        known: What is known of texts.
        texts: File that lists the others; there is none if there are no others.
        settings: The farm's limits.
        stop: Event that ends the reading.
        new: Number of texts that were not known.
        taken: Number of rows by the output that has their vectors, as far as those are known.
        count: Number of rows.
        files: Size and time of change of the local files, as they were when the reading began.
        skipped: The rows that became no chunk.
    """

    request: Request
    output: Output
    known: KnownVectors
    texts: Path
    settings: Settings
    stop: threading.Event
    new: int = 0
    count: int = 0
    taken: Counter[int] = field(default_factory=Counter)
    files: Mapping[str, list[int]] = field(default_factory=dict)
    skipped: SkippedFile = field(init=False)
    _listed_bytes: int = 0

    def __post_init__(self) -> None:
        directory, seconds = self.output.directory, self.settings.full_disk_seconds
        self.skipped = SkippedFile(directory / SKIPPED_FILE, seconds, self.stop)

    def read(self) -> None:
        """Read the corpus.

        Raises:
            Interrupted: `stop` was set.
            SourceChanged: A part of the output was made of other rows, or the corpus was changed
                while it was read.
            CorpusError: The corpus cannot be read, or is empty.
            OutputError: Another output is damaged, or this one becomes too large.
        """
        request = self.request
        self.files = file_facts(request.sources)
        facts = look_at(request.sources, request.options)
        on_bad_row = self.skipped.add if request.skip_bad_rows else fail_on_bad_row
        check = PrefixCheck(self.output.parts)
        with closing(self.skipped), ExitStack() as stack:
            for rows in read_corpus(
                request.sources, request.options, on_bad_row, limits=corpus_limits(self.settings)
            ):
                if self.stop.is_set():
                    raise Interrupted
                checksums, digests = text_checksums(rows.texts), text_digests(rows.texts)
                check.feed(checksums, rows.ids)
                places = self.known.find(digests)
                unknown = np.flatnonzero(places == NOWHERE)
                if len(unknown):
                    if not self.new:
                        file = stack.enter_context(replacing(self.texts))
                    self._list(file, rows, digests, unknown)
                elif not self.new:
                    self._put(rows, checksums, digests, places)
                self.count += len(rows.texts)
            check.finish()
            if look_at(request.sources, request.options).digest != facts.digest:
                raise SourceChanged("the source was changed while it was read; run this again")
        if not self.count:
            raise CorpusError(describe_no_rows(self.skipped.count, self.output.directory))

    def _list(
        self, file: "BinaryIO", rows: Rows, digests: bytes, unknown: NDArray[np.int64]
    ) -> None:
        """List the texts of some rows, each once, that are not known."""
        cuts = (slice(row * DIGEST_BYTES, (row + 1) * DIGEST_BYTES) for row in unknown.tolist())
        first = {digests[cut]: row for cut, row in zip(cuts, unknown.tolist(), strict=True)}
        lines = (msgspec.json.encode({"text": rows.texts[row]}) + b"\n" for row in first.values())
        data = b"".join(lines)
        self._with_room(partial(self._write_list, file, data))
        self._listed_bytes += len(data)
        self.known.expect(b"".join(first), self.new)
        self.new += len(first)

    def _write_list(self, file: "BinaryIO", data: bytes) -> None:
        """Write behind what is listed, over what an earlier attempt may have left."""
        file.seek(self._listed_bytes)
        file.write(data)
        file.flush()

    def _put(self, rows: Rows, checksums: bytes, digests: bytes, places: NDArray[np.int64]) -> None:
        """Put rows into the output, all of whose vectors are known."""
        self.taken.update(np.floor_divide(places, OUTPUT).tolist())
        start = max(self.count, self.output.buffered.stop)
        skip = start - self.count
        if skip >= len(rows.texts):
            return
        taken = self._with_room(partial(self.known.take, places[skip:]))
        result = Result(
            start=start,
            count=len(rows.texts) - skip,
            dimensions=taken.matrix.shape[1],
            dtype=taken.matrix.dtype.str,
            vectors=taken.matrix.tobytes(),
            checksums=checksums[4 * skip :],
            ids=None if rows.ids is None else rows.ids[skip:],
            errors=[
                ChunkError(index=start + row, reason=each.reason, attempts=each.attempts)
                for row, each in taken.failures.items()
            ],
        )
        add = partial(self.output.add, result, digests[DIGEST_BYTES * skip :])
        if self.store(add, self.output.write) is not None:
            check_output(self.output.parts, self.settings)

    def store(self, write: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the answer of `write`, which changes the output.

        While the disk is full, its remains are undone, and `again` is called.
        """
        attempts = [write]

        def attempt() -> T:
            try:
                return attempts[-1]()
            except OSError:
                self.output.recover()
                attempts.append(again)
                raise

        return self._with_room(attempt)

    def _with_room(self, begin: Callable[[], T]) -> T:
        return with_room(begin, self.output.directory, self.settings.full_disk_seconds, self.stop)
