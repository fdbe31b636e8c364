"""Export of an output into a vector store: once, in order, and from where the last one was cut off.

The parts of the output are what is sent, each when it is durable; the journal says which of them
the store has confirmed. So whatever is killed, no more than a part is sent twice, and a row that is
written twice is one row, since its name follows from its id, or from job and index. What the
collection itself says (its mark) tells whether the journal is still true of it.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE, DigestIndex
from embedfarm.collector.manifest import CHANGES_FILE, Manifest, Part
from embedfarm.collector.output_reader import Chunks, OutputReader
from embedfarm.collector.request_comparison import describe_differences
from embedfarm.collector.sinks.part_rows import Matrix
from embedfarm.collector.store_changes import (
    ChangedRows,
    Predecessor,
    directory_before,
    failures_now,
    find_predecessor,
)
from embedfarm.collector.store_journal import (
    ConfirmedWhole,
    ExportHead,
    JournalEntry,
    StoreJournal,
    confirmed_part,
    journal_directory,
)
from embedfarm.collector.store_mark import CollectionMark, Origin, read_mark
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.patience import PatientStore
from embedfarm.collector.stores.store import (
    BYTE_BITS,
    Found,
    RowShape,
    StoreError,
    StoreRows,
    choose_element,
    convert,
    shape_of,
)
from embedfarm.collector.text_digests import text_digests

Others: TypeAlias = Literal["refuse", "keep", "delete"]


class ExportReport(msgspec.Struct):
    """What an export did.

    Attributes:
        sent: Rows that were written.
        deleted: Rows that were deleted, or were not there any more.
        rows: Rows that the collection has.
        exact: Whether it has the rows of the output only.
    """

    sent: int = 0
    deleted: int = 0
    rows: int = 0
    exact: bool = False


@dataclass
class StoreExport:
    """One export of one output into one collection, by one thread.

    Attributes:
        out: Directory of the output.
        address: Where the collection is.
        journal: Journal of the two, locked.
        patient: The collection.
        others: What becomes of rows that are not of the output; "refuse": an export into a
            collection that has some.
        show: Called with the number of chunks that the store has, or does not need.
        report: What was done so far.
    """

    out: Path
    address: StoreAddress
    journal: StoreJournal
    patient: PatientStore
    others: Others = "refuse"
    show: Callable[[int], object] = lambda _chunks: None
    report: ExportReport = field(default_factory=ExportReport)
    _shape: RowShape | None = None
    _origin: Origin | None = None
    _manifest: Manifest | None = None
    _changed: ChangedRows | None = None

    def close(self) -> None:
        """Let go of the store."""
        self.patient.close()

    # What the collection is, and whether it may be written.

    def check(self, job: str, base: Path | None = None) -> bool:
        """Check what can be checked before there is a vector.

        Args:
            job: Job of the output; "" if there is none yet.
            base: Output of which this one will be a new version.

        Returns:
            Whether the collection holds `base`, so that only what has changed is to be sent.

        Raises:
            StoreError: The collection holds another output.
        """
        found = self.patient.attempt(self.patient.store.find)
        if found is None:
            return False
        mark = read_mark(found)
        before = None
        if mark is not None and base is not None:
            before = find_predecessor(base, self.address, mark.token)
        self._admit(mark, job, before)
        return before is not None

    def begin(self, origin: Origin, chunks: Chunks | None = None) -> None:
        """Find or make the collection, and see which of the output's parts it has.

        Args:
            origin: What the output is.
            chunks: A part of it, where it has no manifest yet.

        Raises:
            StoreError: The collection is of other vectors, or holds another output.
        """
        layout = self._manifest.layout if self._manifest else chunks.layout if chunks else None
        if layout is None or not layout.dimensions:
            raise StoreError(f"{self.out} has no vectors")
        self._origin = origin
        shape = shape_of(layout.dimensions, layout.dtype, origin.settings, ids=layout.ids)
        store, attempt = self.patient.store, self.patient.attempt
        found = attempt(store.find)
        if found is None:
            element = choose_element(shape.element, store.elements)
            self._shape = wanted = msgspec.structs.replace(shape, element=element)
            self._begin_journal(origin, exact=True)
            attempt(lambda: store.create(wanted, self._mark(origin)))
            return
        self._shape = self._fit(shape, found)
        mark = read_mark(found)
        words = describe_differences(mark.made, origin.made) if mark else ""
        if words:
            raise StoreError(
                f"{self.address.shown} has vectors that were made in another way, and needs "
                f"another collection beside it: {words}"
            )
        head = self.journal.head
        if head is None or mark is None or head.token != mark.token:
            before = self._predecessor(mark)
            exact = self._admit(mark, origin.job, before)
            self._begin_journal(origin, exact=exact, before=before)
        elif self._is_since_the_same(head):
            return
        else:  # and there may be rows of the one before that this one does not have
            self._begin_journal(origin, exact=False)
        attempt(lambda: store.write_mark(self._mark(origin)))

    def _is_since_the_same(self, head: ExportHead) -> bool:
        """Tell whether rows that were not sent, as the collection had them, are the same ones now.

        They follow from the list of changes, and from what had failed in the output before; that
        one may have been retried, or be another one by now.
        """
        if not head.base or self._manifest is None:
            return True
        if self._manifest.lists.get(CHANGES_FILE, "") != head.changes:
            return False
        ended = head.all_rows or self.journal.whole is not None
        return ended or failures_now(Path(head.base)) == head.failures

    def _begin_journal(
        self, origin: Origin, *, exact: bool, before: Predecessor | None = None
    ) -> None:
        """Begin the journal of an export of which nothing is confirmed."""
        head = ExportHead(store=self.address.shown, job=origin.job, exact=exact)
        if before is not None and self._manifest is not None:
            head.base = str(before.directory.absolute())
            head.all_rows = not before.current
            head.changes = self._manifest.lists.get(CHANGES_FILE, "")
            head.failures = before.failures
        self.journal.begin(head)

    def _mark(self, origin: Origin) -> str:
        """Return the mark of the export that the journal is of."""
        head = self._head
        mark = CollectionMark(token=head.token, job=head.job, exact=head.exact, made=origin.made)
        return msgspec.json.encode(mark).decode()

    def _predecessor(self, mark: CollectionMark | None) -> Predecessor | None:
        """Return the output that the collection holds, if this one is a new version of it."""
        changes = self._manifest.changes if self._manifest else None
        if mark is None or changes is None:
            return None
        before = directory_before(self.out, changes)
        return find_predecessor(before, self.address, mark.token, changes)

    def _admit(self, mark: CollectionMark | None, job: str, before: Predecessor | None) -> bool:
        """Tell whether all rows that a collection has are known to this export.

        Raises:
            StoreError: They are not, and nobody has said what is to become of them.
        """
        if before is not None:
            return before.exact
        if mark is not None and mark.job == job:
            return mark.exact
        if not self.patient.attempt(self.patient.store.count):
            return True
        if self.others == "refuse":
            whose = "no output" if mark is None else f"another output, that of job {mark.job}"
            raise StoreError(
                f"{self.address.shown} has rows of {whose}: with --others delete they go when the "
                "rows of this one are there, and with --others keep they stay"
            )
        return False

    def _fit(self, shape: RowShape, found: Found) -> RowShape:
        """Return the shape in which rows go into a collection that is there.

        Raises:
            StoreError: They do not.
        """
        fits = found.element in {"float32", "float16", shape.element}
        size = BYTE_BITS * shape.bit_bytes if found.packed else shape.dimensions
        if found.dimensions != size or not fits:
            raise StoreError(
                f"{self.address.shown} has vectors of {found.dimensions} {found.element}, and "
                f"{self.out} of {shape}"
            )
        if found.ids is not None and found.ids != shape.ids:
            has = "knows rows by id" if found.ids else "has a column for the index"
            raise StoreError(f"{self.address.shown} {has}, and {self.out} does not")
        return msgspec.structs.replace(shape, element=found.element)

    # The rows.

    @property
    def _head(self) -> ExportHead:
        """The first line of the journal.

        Raises:
            StoreError: The export was not begun.
        """
        if self.journal.head is None:
            raise StoreError(f"the export to {self.address.shown} was not begun")
        return self.journal.head

    def send(self, parts: Sequence[Part]) -> None:
        """Send those of the parts, which follow each other, that the store has not confirmed.

        Raises:
            StoreError: The store refuses, or stays away.
            OutputError: A part is damaged.
        """
        for part in parts:
            line = confirmed_part(part)
            before = self.journal.parts.get(part.start)
            if before != line:
                if before is not None and before.texts != line.texts:
                    self.journal.add(JournalEntry(left=True))
                # A part that had failures then, and was tried again, is sent whole.
                every = before is not None or self._head.all_rows
                only = None if every else self._changed
                if only is None or only.in_part(part):
                    self._send_part(part, only)
                self.journal.add(JournalEntry(part=line))
            self.show(part.end)

    def _send_part(self, part: Part, only: ChangedRows | None) -> None:
        """Write the rows of a part, and delete those that it does not have."""
        with OutputReader(self.out) as reader:
            reader.expect(part)
            batch = reader.read_part(part.start).batch
        names = self._names(part.start, batch.ids or [""] * len(batch.good))
        wanted = batch.good if only is None else batch.good & only.mask(batch)
        rows = np.flatnonzero(wanted)
        for first in range(0, len(rows), step := self._rows_at_a_time()):
            self._upsert(rows[first : first + step], names, batch.start, batch.matrix)
        self._delete([names[row] for row in np.flatnonzero(~batch.good)])

    def _upsert(
        self, rows: NDArray[np.intp], names: Sequence[str], start: int, matrix: Matrix
    ) -> None:
        """Write some rows of a part; of two with one name the last one."""
        shape, origin = self._shape, self._origin
        if shape is None or origin is None:
            raise StoreError(f"the export to {self.address.shown} was not begun")
        last = list({names[row]: row for row in rows.tolist()}.values())
        vectors = convert(matrix[last], shape, origin.settings.get("ranges") or ())
        batch = StoreRows([names[row] for row in last], np.array(last) + start, vectors)
        self.patient.attempt(lambda: self.patient.store.upsert(batch, shape))
        self.report.sent += len(last)

    def _names(self, start: int, ids: Sequence[str]) -> list[str]:
        """Return the names of consecutive chunks: their ids, or made of job and index."""
        if self._shape is not None and self._shape.ids:
            return list(ids)
        return [f"{self._head.job}:{index}" for index in range(start, start + len(ids))]

    def _rows_at_a_time(self) -> int:
        """Return the number of rows in a batch."""
        store = self.patient.store
        dimensions = self._shape.dimensions if self._shape else 1
        return max(1, min(store.rows_max, store.bytes_max // (4 * dimensions)))

    def _delete(self, names: Sequence[str]) -> None:
        """Delete rows by their names."""
        store = self.patient.store
        for first in range(0, len(names), store.rows_max):
            some = names[first : first + store.rows_max]
            self.patient.attempt(lambda some=some: store.delete(some))  # type: ignore[misc]

    # The end.

    def finish(self, manifest: Manifest) -> ExportReport:
        """Send what is left of a finished output, and see that the collection has all of it.

        Raises:
            StoreError: The store refuses or stays away, or has not what it has confirmed.
            OutputError: The output has ids that repeat, or is damaged.
        """
        self._manifest = manifest
        if manifest.repeated_ids is not None:
            repeated = manifest.repeated_ids
            raise StoreError(
                f"{self.out} has {repeated.count:,} chunks with the id of an earlier one, and a "
                f"store one row for an id: the first is chunk {repeated.first:,}, with the id of "
                f"chunk {repeated.earlier:,}"
            )
        self.begin(
            Origin(job=manifest.job, settings=manifest.settings, fingerprint=manifest.fingerprint)
        )
        if self._head.base and manifest.changes is not None:
            self._changed = ChangedRows(self.out, manifest.changes, Path(self._head.base))
        self.send(manifest.parts)
        exact = self._remove_others(manifest)
        if self.journal.whole is None:
            self.patient.attempt(self.patient.store.finish, limited=False)
        self._compare(manifest, exact=exact)
        line = ConfirmedWhole(rows=self.report.rows, exact=self.report.exact)
        if self.journal.whole != line:
            self.journal.add(JournalEntry(whole=line))
        return self.report

    def _remove_others(self, manifest: Manifest) -> bool:
        """Remove rows that are not of the output, as asked; tell whether none is known to be left.

        What this very output had sent before its corpus changed goes unasked.
        """
        if self.journal.whole is not None and self.journal.whole.exact:
            return True
        head = self._head
        starts = {part.start for part in manifest.parts}
        left = self.journal.left or bool(self.journal.parts.keys() - starts)
        if head.exact and not left:
            if self._changed is None or not (manifest.changes and manifest.changes.removed):
                return True
            if self.others == "delete":
                for ids in self._changed.removed():
                    self._delete(ids)
                    self.report.deleted += len(ids)
            return self.others == "delete"
        if head.exact or self.others == "delete":
            self._sweep(manifest)
            return True
        return False

    def _sweep(self, manifest: Manifest) -> None:
        """Delete all rows of the collection that the output does not have."""
        directory = journal_directory(self.out, self.address) / "names"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        index = DigestIndex(directory)
        store = self.patient.store
        with OutputReader(self.out) as reader:
            for part in manifest.parts:
                batch = reader.read_part(part.start).batch
                names = self._names(part.start, batch.ids or [""] * len(batch.good))
                kept = [store.key(names[row]) for row in np.flatnonzero(batch.good)]
                index.add(text_digests(kept), np.zeros(len(kept), np.int64))

        def delete() -> None:
            for keys in store.pages():
                self.patient.note_answer()
                there = index.find(text_digests(keys))
                others = [keys[row] for row in np.flatnonzero(there == NOWHERE).tolist()]
                if others:
                    store.delete_keys(others)
                    self.report.deleted += len(others)

        self.patient.attempt(delete)
        shutil.rmtree(directory)

    def _compare(self, manifest: Manifest, *, exact: bool) -> None:
        """Compare what the collection says with what it should have.

        Raises:
            StoreError: It has other rows, or somebody else has exported into it meanwhile.
        """
        store, attempt = self.patient.store, self.patient.attempt
        mark = read_mark(attempt(store.find))
        if mark is None or mark.token != self._head.token:
            raise StoreError(
                f"another command has exported into {self.address.shown} meanwhile: the same "
                "command says what is to be done"
            )
        wanted, rows = manifest.count - manifest.failed, attempt(store.count)
        if exact and rows > wanted:
            if self.others == "refuse":
                raise StoreError(
                    f"{self.address.shown} has {rows - wanted:,} rows that are not of {self.out}: "
                    "with --others delete they go, and with --others keep they stay"
                )
            if exact := self.others == "delete":
                self._sweep(manifest)
                rows = attempt(store.count)
        if rows < wanted or (exact and rows > wanted):
            self.journal.remove()
            raise StoreError(
                f"{self.address.shown} has {rows:,} rows, where it has confirmed {wanted:,}: the "
                "same command sends all of them again"
            )
        self.report.rows, self.report.exact = rows, exact
