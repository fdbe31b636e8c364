"""Exact nearest neighbours in a finished output, one part in memory at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedfarm.collector.column_rows import take_rows
from embedfarm.collector.dequantisation import restore
from embedfarm.collector.manifest import Layout, Manifest, Part, read_manifest
from embedfarm.collector.sinks import ColumnSink, Sink, Vectors, open_sink
from embedfarm.contract.hyperplanes import estimated_cosine, hash_vectors

_ROWS_AT_A_TIME: Final = 8192


@dataclass(frozen=True)
class Hit:
    """A chunk near a query; the score is their cosine, -1 to 1.

    Attributes:
        columns: The columns of the corpus that the output has beside its vector, by name.
    """

    index: int
    id: str | None
    score: float
    columns: Mapping[str, Any] = field(default_factory=dict)


def iter_vectors(directory: Path) -> Iterator[Vectors]:
    """Return the vectors of a finished output in order, part by part, without the failed chunks.

    Raises:
        OutputError: There is no manifest, or a part does not hold what it says.
    """
    manifest = read_manifest(directory)
    sink = open_sink(manifest.format, directory)
    return (sink.read(part, manifest.layout) for part in manifest.parts)


def search(directory: Path, query: NDArray[np.float32], k: int) -> list[Hit]:
    """Return the `k` chunks with the highest cosine to `query`, best first; ties in index order.

    Where vectors are stored as bits of hyperplanes, the cosine is an estimate.

    Args:
        directory: A finished output of any format.
        query: Vector of shape (dimensions,), of any length but 0.
        k: Number of chunks; fewer come back when there are fewer vectors.

    Raises:
        ValueError: The query is not a direction in the space of the output.
        OutputError: There is no manifest, or a part does not hold what it says.
    """
    manifest = read_manifest(directory)
    direction = _direction(query, manifest)
    if bits := manifest.settings.get("lsh_bits"):
        direction = _direction_of_bits(direction, bits)
    ranges = manifest.settings.get("ranges") or []
    best: list[Hit] = []
    for vectors in iter_vectors(directory):
        for hits in _hits(vectors, direction, ranges, k):
            best = nsmallest(k, best + hits, key=lambda hit: (-hit.score, hit.index))
    if bits:
        best = [replace(hit, score=estimated_cosine(hit.score)) for hit in best]
    return _with_columns(directory, manifest, best)


def iter_columns(directory: Path) -> Iterator[pa.Table | None]:
    """Return the columns of the corpus beside the vectors of each part, None for none.

    Raises:
        OutputError: There is no manifest, or a part does not hold what it says.
    """
    manifest = read_manifest(directory)
    sink = open_sink(manifest.format, directory)
    return (_table_of(sink, part, manifest.layout) for part in manifest.parts)


def _table_of(sink: Sink, part: Part, layout: Layout) -> pa.Table | None:
    kept = sink.read_columns(part, layout) if isinstance(sink, ColumnSink) else None
    return None if kept is None else kept.table


def _with_columns(directory: Path, manifest: Manifest, hits: Sequence[Hit]) -> list[Hit]:
    """Return hits with the columns of the corpus that the output has; one part is in memory."""
    sink = open_sink(manifest.format, directory)
    if not isinstance(sink, ColumnSink):
        return list(hits)
    found = {hit.index: hit for hit in hits}
    for part in manifest.parts:
        here = sorted(index for index in found if part.start <= index < part.end)
        kept = sink.read_columns(part, manifest.layout) if here else None
        if kept is not None:
            rows = _rows_of(take_rows(kept.table, np.searchsorted(kept.indices, here)))
            found |= {i: replace(found[i], columns=row) for i, row in zip(here, rows, strict=True)}
    return [found[hit.index] for hit in hits]


def _rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the values of each row by column; times for which Python has none are in words."""
    columns = []
    for column in table.columns:
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError):
            columns.append(column.cast(pa.string()).to_pylist())
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _direction(query: NDArray[np.float32], manifest: Manifest) -> NDArray[np.float32]:
    """Return the query, scaled to length 1."""
    width = -(-len(query) // 8) if manifest.dtype == "uint8" else len(query)
    if manifest.settings.get("lsh_bits"):
        width = manifest.dimensions  # however many components were hashed
    if manifest.dimensions and (query.ndim, width) != (1, manifest.dimensions):
        raise ValueError(
            f"the query has shape {query.shape}, the vectors ({manifest.dimensions},)"
            f" of {manifest.dtype}"
        )
    norm = np.linalg.norm(query)
    if not np.isfinite(norm) or not norm:
        raise ValueError(f"a query of length {norm} has no direction")
    return (query / norm).astype(np.float32)


def _direction_of_bits(direction: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return a query's bits as 1 and -1, of length 1: the product with others' is agreement."""
    signs = restore(hash_vectors(direction[None], bits), bits, ())[0]
    return np.asarray(signs / np.sqrt(np.float32(bits)))


def _hits(
    vectors: Vectors, direction: NDArray[np.float32], ranges: Sequence[Sequence[float]], k: int
) -> Iterator[list[Hit]]:
    """Yield the best of each slice of rows: as float32 a slice is small, a part might not be."""
    for first in range(0, len(vectors.indices), _ROWS_AT_A_TIME):
        stored = vectors.matrix[first : first + _ROWS_AT_A_TIME]
        rows = restore(stored, len(direction), ranges)
        norms = np.linalg.norm(rows, axis=1)
        scores = rows @ direction / np.maximum(norms, np.finfo(np.float32).tiny)
        best = np.argsort(-scores, kind="stable")[:k]
        yield [_hit(vectors, first + int(row), float(scores[row])) for row in best]


def _hit(vectors: Vectors, row: int, score: float) -> Hit:
    """Return the hit of one row."""
    identifier = None if vectors.ids is None else vectors.ids[row]
    return Hit(int(vectors.indices[row]), identifier, score)
