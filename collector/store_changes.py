"""Rows that a store lacks which holds the output before, of which another is a new version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.collector.changes import ADDED, CHANGED, KINDS, REMOVED
from embedfarm.collector.manifest import (
    CHANGES_FILE,
    Changes,
    ManifestError,
    OutputError,
    Part,
    read_failures,
    read_manifest,
)
from embedfarm.collector.sinks.part_rows import PartRows
from embedfarm.collector.store_journal import StoreJournal, confirmed_part
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.contract.durable_files import sha256_of, whole

NAMES_AT_A_TIME: Final = 10_000


class Predecessor(NamedTuple):
    """An output that a collection holds whole, and of which another one is a new version.

    Attributes:
        directory: Directory of the output.
        exact: Whether the collection has rows of it only.
        current: Whether the output is still as it was exported.
        failures: Its `Manifest.errors_sha256`.
    """

    directory: Path
    exact: bool
    current: bool
    failures: str


def find_predecessor(
    directory: Path, address: StoreAddress, token: str, changes: Changes | None = None
) -> Predecessor | None:
    """Return an output as the predecessor of another one, if a collection with a mark holds it.

    Args:
        directory: A finished output, or what is left of it.
        address: Where the collection is.
        token: Token of the collection's mark.
        changes: What has changed since the output that the directory had then, if that is known: it
            may have another one now, of which the list says nothing.
    """
    journal = StoreJournal.of(directory, address)
    if journal.head is None or journal.whole is None or journal.head.token != token:
        return None
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return None
    if changes is not None and changes.since_rows != manifest.rows_sha256:
        return None
    parts = manifest.parts
    current = all(journal.parts.get(part.start) == confirmed_part(part) for part in parts)
    return Predecessor(directory, journal.whole.exact, current, manifest.errors_sha256)


def failures_now(directory: Path) -> str:
    """Return `Manifest.errors_sha256` of an output; "" where there is no finished one any more."""
    try:
        return read_manifest(directory).errors_sha256
    except ManifestError:
        return ""


def directory_before(out: Path, changes: Changes) -> Path:
    """Return the directory of the output that changes are since, also where both were moved."""
    named = Path(changes.since)
    beside = out.absolute().parent / named.name
    return beside if not named.exists() and beside.exists() else named


class ChangedRows:
    """Rows of an output that are not, with the same id and vector, in the one before.

    A row that has only moved is the same: no store keeps the index of a row that has an id.

    Args:
        out: The output.
        changes: What its manifest says of the list.
        before: Directory of the other output.

    Raises:
        OutputError: The list is damaged, or gone.
    """

    def __init__(self, out: Path, changes: Changes, before: Path) -> None:
        self._path = out / CHANGES_FILE
        if not self._path.exists() or sha256_of([whole(self._path)]) != changes.sha256:
            raise OutputError(f"{self._path} is not as it was written")
        rows = [
            batch.column("index").filter(_is(batch, ADDED, CHANGED)).to_numpy(zero_copy_only=False)
            for batch in self._batches()
        ]
        self._rows: NDArray[np.int64] = np.sort(np.concatenate([np.zeros(0, np.int64), *rows]))
        # What had failed has no row in the store, whether its text has changed or not.
        self._failed = {each.id for each in read_failures(before)}

    def in_part(self, part: Part) -> bool:
        """Tell whether a part may have such rows, or rows that must not be in the store."""
        first, end = self._rows.searchsorted([part.start, part.end])
        return bool(end > first or self._failed or part.errors)

    def mask(self, batch: PartRows) -> NDArray[np.bool_]:
        """Return which rows of a part they are: shape (rows,)."""
        first, end = self._rows.searchsorted([batch.start, batch.start + len(batch.good)])
        found = np.zeros(len(batch.good), np.bool_)
        found[self._rows[first:end] - batch.start] = True
        if self._failed:
            found |= np.array([name in self._failed for name in batch.ids or ()], np.bool_)
        return found

    def removed(self) -> Iterator[list[str]]:
        """Yield the ids that are no more, in batches."""
        for batch in self._batches():
            yield batch.column("id").filter(_is(batch, REMOVED)).to_pylist()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Return an iterator over the list, some rows at a time."""
        return iter(pq.ParquetFile(self._path).iter_batches(NAMES_AT_A_TIME))


def _is(batch: pa.RecordBatch, *kinds: int) -> NDArray[np.bool_]:
    """Return which lines of the list are of some kinds."""
    names = pc.cast(batch.column("change"), "string")
    wanted = pa.array([KINDS[kind] for kind in kinds])
    found: NDArray[np.bool_] = pc.is_in(names, value_set=wanted).to_numpy(zero_copy_only=False)
    return found
