"""Vectors for chunks that had failed, put into a finished output."""

import shutil
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedfarm.collector.column_rows import take_rows
from embedfarm.collector.manifest import (
    DECIDED,
    ERRORS_FILE,
    STATE_DIRECTORY,
    Failure,
    Manifest,
    OutputError,
    Part,
    Written,
    check_bytes,
    read_failures,
    read_manifest,
    settle,
    write_manifest,
)
from embedfarm.collector.sinks import ColumnSink, KeptColumns, PartRows, Vectors, open_sink
from embedfarm.contract.durable_files import replacing, sha256_of, sync_directory, whole

STAGED: Final = f"{STATE_DIRECTORY}/staged"


def patch(directory: Path, retried: Path) -> Manifest:
    """Give failed chunks the vectors that a retry made of them, and return the new manifest.

    Files that change are written beside the output, decided on by one rename, and then put in their
    places (`settle`): a crash leaves the old output, or a new one that the next reader completes.
    Memory holds one part of each output. Chunks that failed again stay on the list, with the new
    reason and all attempts counted.

    Args:
        directory: A finished output, which no other process changes.
        retried: A finished output of the chunks that `directory` lists as failed, in that order.

    Raises:
        OutputError: An output does not hold what its manifest says, or `retried` is of other
            chunks.
        OSError: The disk refuses; nothing has changed.
    """
    manifest = read_manifest(directory)
    again = _Retried(retried)
    if (again.manifest.count, again.manifest.dtype, again.manifest.dimensions) != (
        manifest.failed,
        manifest.dtype,
        manifest.dimensions,
    ):
        raise OutputError(f"{retried} is not of the chunks that failed in {directory}")
    staged = directory / STAGED
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    write_manifest(staged, _stage(directory, manifest, again, staged))
    staged.rename(directory / DECIDED)
    sync_directory(staged.parent)
    settle(directory)
    return read_manifest(directory)


def _stage(directory: Path, manifest: Manifest, again: "_Retried", staged: Path) -> Manifest:
    """Write the files that change into `staged`, and return the manifest that lists them."""
    old, new = open_sink(manifest.format, directory), open_sink(manifest.format, staged)
    failures = read_failures(directory)
    parts = []
    with replacing(staged / ERRORS_FILE) as errors:
        for part in manifest.parts:
            failed = list(islice(failures, part.errors))
            vectors, columns, left = again.take(failed)
            errors.writelines(msgspec.json.encode(line) + b"\n" for line in left)
            if len(left) == len(failed):
                parts.append(part)
                continue
            check_bytes(directory, part)
            batch = _merge(part, old.read(part, manifest.layout), vectors)
            if columns is not None and isinstance(old, ColumnSink):
                there = old.read_columns(part, manifest.layout)
                batch = batch._replace(columns=_merge_columns(there, vectors.indices, columns))
            parts.append(_change(part, new.replace(part, batch, directory), len(left)))
    failed_count = sum(part.errors for part in parts)
    path = staged / ERRORS_FILE
    digest = sha256_of([whole(path)]) if failed_count else ""
    if not failed_count:
        path.unlink()
    return msgspec.structs.replace(
        manifest, parts=parts, failed=failed_count, errors_sha256=digest, created=time.time()
    )


def _merge(part: Part, old: Vectors, new: Vectors) -> PartRows:
    """Return all chunks of a part, with the vectors that it had and those of the retry."""
    matrix = np.zeros((part.count, *old.matrix.shape[1:]), old.matrix.dtype)
    good = np.zeros(part.count, np.bool_)
    ids = None if old.ids is None else [""] * part.count
    for vectors in (old, new):
        rows = vectors.indices - part.start
        matrix[rows], good[rows] = vectors.matrix, True
        for row, identifier in zip(rows.tolist(), vectors.ids or (), strict=False):
            if ids is not None:
                ids[row] = identifier
    return PartRows(part.start, ids, matrix, good)


def _merge_columns(
    old: KeptColumns | None, indices: NDArray[np.int64], table: pa.Table
) -> pa.Table | None:
    """Return the columns beside the vectors that a part had and those of the retry, in order."""
    if old is None:
        return None
    order = np.argsort(np.concatenate([old.indices, indices]))
    return take_rows(pa.concat_tables([old.table, table]), order)


def _change(part: Part, written: Written, errors: int) -> Part:
    """Return the record of a part after it was written again."""
    figures = {"rows": part.count - errors, "errors": errors}
    return msgspec.structs.replace(part, **msgspec.structs.asdict(written), **figures)


class _Retried:
    """Finished output of a retry: what became of the failed chunks, in their order."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.manifest = directory, read_manifest(directory)
        self._sink = open_sink(self.manifest.format, directory)
        self._parts = iter(self.manifest.parts)
        self._failures = read_failures(directory)
        self._taken = self._read = 0
        self._indices = np.empty(0, np.int64)
        self._matrix = np.empty((0, self.manifest.dimensions), self.manifest.dtype)
        self._columns: pa.Table | None = None

    def take(self, failed: Sequence[Failure]) -> tuple[Vectors, pa.Table | None, list[Failure]]:
        """Return vectors of the next failed chunks, and the failures of those still without one.

        Between them are the columns of the corpus beside the vectors; None where there are none.
        """
        first, self._taken = self._taken, self._taken + len(failed)
        while self._read < self._taken:
            self._read_part()
        count = int(np.searchsorted(self._indices, self._taken))
        places = (self._indices[:count] - first).tolist()
        lines = [failed[place] for place in places]
        vectors = Vectors(
            np.array([line.index for line in lines], np.int64),
            [line.id or "" for line in lines],
            self._matrix[:count],
        )
        self._indices, self._matrix = self._indices[count:], self._matrix[count:]
        columns = None
        if self._columns is not None:
            columns, self._columns = self._columns.slice(0, count), self._columns.slice(count)
        left = sorted(set(range(len(failed))) - set(places))
        return vectors, columns, [_add(failed[place], next(self._failures)) for place in left]

    def _read_part(self) -> None:
        part = next(self._parts)
        check_bytes(self._directory, part)
        vectors = self._sink.read(part, self.manifest.layout)
        self._read = part.end
        self._indices = np.concatenate([self._indices, vectors.indices])
        self._matrix = np.concatenate([self._matrix, vectors.matrix])
        sink = self._sink
        kept = (
            sink.read_columns(part, self.manifest.layout) if isinstance(sink, ColumnSink) else None
        )
        if kept is not None:
            before = [] if self._columns is None else [self._columns]
            self._columns = pa.concat_tables([*before, kept.table])


def _add(before: Failure, again: Failure) -> Failure:
    """Return the failure of a chunk that failed twice, with all attempts counted."""
    return Failure(
        index=before.index,
        id=before.id,
        reason=again.reason,
        attempts=before.attempts + again.attempts,
    )
