"""Outputs to be exported, and what stores have of them, read with the stores' own clients."""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lancedb
import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql
from pymilvus import MilvusClient
from qdrant_client import QdrantClient

from embedfarm.collector.changes import write_changes
from embedfarm.collector.manifest import STATE_DIRECTORY, About, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.text_digests import text_digests
from embedfarm.contract.records import ChunkError, Result, text_checksums

Vector = NDArray[Any]
Contents = dict[str, Vector]
DIMENSIONS = 8
PER_RESULT = 10
PART_RESULTS = 5


def vectors_of(texts: Sequence[str], dimensions: int = DIMENSIONS) -> NDArray[np.float32]:
    """Return a vector of length 1 for each text, the same each time: float32."""
    seeds = np.frombuffer(text_digests(texts), np.uint8).reshape(-1, 16).astype(np.float32)
    spread = np.tile(seeds, (1, -(-dimensions // 16)))[:, :dimensions] - 127.5
    made = spread / np.linalg.norm(spread, axis=1, keepdims=True)
    return np.asarray(made, np.float32)


def write_output(  # noqa: PLR0913 -- all that an output consists of
    out: Path,
    texts: Mapping[str, str] | Sequence[str],
    *,
    failed: Sequence[str] = (),
    before: Path | None = None,
    matrix: Vector | None = None,
    settings: Mapping[str, Any] | None = None,
    model: str = "a",
    per_result: int = PER_RESULT,
) -> Path:
    """Write a finished output.

    Args:
        out: Its directory.
        texts: Texts by id, or without ids.
        failed: Texts that failed.
        before: The output that its changes are since.
        matrix: Vectors, if not those of `vectors_of`.
        settings: What was asked for.
        model: Fingerprint of the model.
        per_result: Chunks in a result; a part has five results.
    """
    ids = list(texts) if isinstance(texts, Mapping) else None
    rows = list(texts.values()) if isinstance(texts, Mapping) else list(texts)
    vectors = vectors_of(rows) if matrix is None else matrix
    limit = PART_RESULTS * per_result * vectors[0].nbytes
    with Output(out, {}, sink="parquet", part_bytes_max=limit) as output:
        for start in range(0, len(rows), per_result):
            some = rows[start : start + per_result]
            errors = [
                ChunkError(index=start + place, reason="odd")
                for place, text in enumerate(some)
                if text in failed
            ]
            result = Result(
                start=start,
                count=len(some),
                dimensions=vectors.shape[1],
                dtype=vectors.dtype.str,
                vectors=vectors[start : start + per_result].tobytes(),
                checksums=text_checksums(some),
                errors=errors,
                ids=None if ids is None else ids[start : start + per_result],
            )
            output.add(result, text_digests(some))
        output.flush()
        changes = None
        if before is not None:
            (index := out / STATE_DIRECTORY / "ids-before").mkdir()
            changes = write_changes(out, before, read_manifest(before), index)
        about = About(
            job=f"job-{out.name}",
            model="m",
            fingerprint={"weights": model},
            source={"files": {}},
            settings=dict(settings or {}),
            changes=changes,
        )
        output.finish(len(rows), about)
    shutil.rmtree(out / STATE_DIRECTORY)
    return out


def read_contents(url: str) -> Contents:
    """Read all rows of a collection by name, with the client of its store."""
    parts = urlsplit(url)
    pairs = READERS[parts.scheme](url, parts.fragment)
    found = dict(pairs)
    assert len(found) == len(pairs), "a name is there twice"
    return found


def _read_postgresql(url: str, table: str) -> list[tuple[str, Vector]]:
    with psycopg.connect(url.partition("#")[0]) as connection:
        query = sql.SQL("SELECT id, embedding::text FROM {}").format(sql.Identifier(table))
        rows = connection.execute(query).fetchall()
    return [(name, _parse(text)) for name, text in rows]


def _parse(text: str) -> Vector:
    """Return a vector, or bits, as PostgreSQL writes them."""
    if text.startswith("["):
        return np.array(text[1:-1].split(","), np.float32)
    return np.packbits(np.array(list(text), np.uint8))


def _read_qdrant(url: str, name: str) -> list[tuple[str, Vector]]:
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # it is slow when large
        client = QdrantClient(path=urlsplit(url).path)
    points, _ = client.scroll(name, limit=1_000_000, with_vectors=True)
    client.close()
    # It scales vectors to length 1, in a directory when it is asked, on a server when they come.
    return [
        (str((each.payload or {})["id"]), scale(np.array(each.vector, np.float32)))
        for each in points
    ]


def scale(vectors: Vector) -> Vector:
    """Return vectors of length 1 with the same directions."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _read_lancedb(url: str, name: str) -> list[tuple[str, Vector]]:
    table = lancedb.connect(urlsplit(url).path).open_table(name).to_arrow()
    vectors = table.column("embedding").to_pylist()
    dtype = table.schema.field("embedding").type.value_type.to_pandas_dtype()
    names = table.column("id").to_pylist()
    return [(each, np.array(vector, dtype)) for each, vector in zip(names, vectors, strict=True)]


def _read_milvus(url: str, name: str) -> list[tuple[str, Vector]]:
    parts = urlsplit(url)
    client: Any = MilvusClient(f"http://{parts.netloc}" if parts.netloc else parts.path)
    client.load_collection(name)
    pages, found = client.query_iterator(name, 16_000, output_fields=["id", "embedding"]), []
    while page := pages.next():
        found += [(each["id"], np.array(each["embedding"], np.float32)) for each in page]
    pages.close()
    client.close()
    return found


READERS = {
    "postgresql": _read_postgresql,
    "qdrant": _read_qdrant,
    "lancedb": _read_lancedb,
    "milvus": _read_milvus,
}


def assert_contents(url: str, wanted: Mapping[str, Vector], tolerance: float = 0.0) -> None:
    """Assert that a collection has the rows, each with its vector, and no others."""
    found = read_contents(url)
    assert found.keys() == wanted.keys()
    names = sorted(wanted)
    have, want = (np.stack([rows[name] for name in names]) for rows in (found, wanted))
    np.testing.assert_allclose(have, want, rtol=0, atol=tolerance)
