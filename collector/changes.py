"""What has changed between two outputs whose chunks have ids: a list in Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedfarm.collector.digest_index import NOWHERE, DigestIndex
from embedfarm.collector.manifest import CHANGES_FILE, Changes, Manifest
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE, text_digests
from embedfarm.contract.durable_files import replacing, sha256_of, whole

KINDS: Final = ("same", "moved", "changed", "added", "removed")
SAME, MOVED, CHANGED, ADDED, REMOVED = range(len(KINDS))
SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("change", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("index", pa.int64()),
        pa.field("index_before", pa.int64()),
    ]
)

Rows = NDArray[np.int64]


def write_changes(out: Path, before: Path, manifest: Manifest, directory: Path) -> Changes:
    """List what has changed in an output since another one, whose chunks have ids as well.

    Of chunks with one id the first one counts in the other output. Memory holds a part of an output
    at a time, and a byte for each chunk of the other one.

    Args:
        out: The output, all of whose parts and digests are on the disk.
        before: The other output, which is finished.
        manifest: Manifest of the other output.
        directory: An empty directory for an index of the other output's ids.

    Returns:
        What is in the list, which is on the disk.

    Raises:
        OutputError: A part is damaged, or gone.
        OSError: The disk refused; this may be called again, with an empty directory.
    """
    index = DigestIndex(directory)
    for start, ids in _ids(before):
        index.add(text_digests(ids), np.arange(start, start + len(ids)))
    texts, texts_before = (_digests(each) for each in (out, before))
    there, sums = np.zeros(manifest.count, np.bool_), np.zeros(len(KINDS), np.int64)
    path = out / CHANGES_FILE
    with replacing(path) as file, pq.ParquetWriter(file, SCHEMA) as writer:

        def put(ids: list[str], kinds: Rows, rows: Rows, rows_before: Rows) -> None:
            sums[:] += np.bincount(kinds, minlength=len(KINDS))
            kept = np.flatnonzero(kinds != SAME)
            if len(kept):
                writer.write_table(_table(ids, kinds, rows, rows_before, kept))

        for start, ids in _ids(out):
            rows = np.arange(start, start + len(ids))
            found = index.find(text_digests(ids))
            there[found[found != NOWHERE]] = True
            same = texts[rows] == texts_before[found]  # whatever NOWHERE finds
            kinds = np.select(
                [found == NOWHERE, ~same, found != rows], [ADDED, CHANGED, MOVED], SAME
            )
            put(ids, kinds, rows, found)
        for start, ids in _ids(before):
            rows = np.arange(start, start + len(ids))
            first = index.find(text_digests(ids)) == rows
            gone = first & ~there[rows]
            put(ids, np.where(gone, REMOVED, SAME), np.full(len(ids), NOWHERE), rows)
    _, moved, changed, added, removed = sums.tolist()
    listed = sha256_of([whole(path)])
    return Changes(str(before), added, changed, moved, removed, listed, manifest.rows_sha256)


def _ids(directory: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the ids of an output's chunks, after the index of the first of them, part by part."""
    with OutputReader(directory) as reader:
        start = 0
        while start < reader.available:
            batch = reader.read_part(start).batch
            yield start, batch.ids or []
            start += len(batch.good)


def _digests(directory: Path) -> NDArray[Any]:
    """Return the digests of an output's texts, as they lie on the disk."""
    path = directory / DIGESTS_FILE
    return np.memmap(path, f"V{DIGEST_BYTES}", "r") if path.stat().st_size else np.zeros(0, "V16")


def _table(ids: list[str], kinds: Rows, rows: Rows, rows_before: Rows, kept: Rows) -> pa.Table:
    """Return some rows of the list."""
    places = [pa.array(each[kept], mask=each[kept] == NOWHERE) for each in (rows, rows_before)]
    change = pa.DictionaryArray.from_arrays(pa.array(kinds[kept], pa.int8()), pa.array(KINDS))
    return pa.table([pa.array([ids[row] for row in kept]), change, *places], schema=SCHEMA)
