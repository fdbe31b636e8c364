"""Tests that search is exact, whatever the format and the parts."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.collector import search as module
from embedfarm.collector.manifest import About, ManifestError
from embedfarm.collector.output import Output
from embedfarm.collector.search import iter_vectors, search
from embedfarm.collector.sinks import SINKS
from embedfarm.contract.records import ChunkError, Result, text_checksums
from tests.collector.places import say_where

COUNT = 50
DIMENSIONS = 8
FAILED = 12


def matrix(dtype: str) -> NDArray[np.float32]:
    """Return vectors of all lengths, two of them in the same direction."""
    random = np.random.default_rng(11)
    rows = random.normal(size=(COUNT, DIMENSIONS)) * random.uniform(0.1, 10, size=(COUNT, 1))
    rows[40] = rows[20] * 2
    return rows.astype(dtype).astype("<f4")


def make_output(directory: Path, sink: str, dtype: str, *, with_ids: bool) -> Path:
    """Make a finished output in parts of ten rows."""
    row_bytes = DIMENSIONS * np.dtype(dtype).itemsize
    say_where(directory)
    with Output(directory, {}, sink=sink, part_bytes_max=10 * row_bytes) as output:
        for start in range(0, COUNT, 5):
            chunks = range(start, start + 5)
            output.add(
                Result(
                    start=start,
                    count=5,
                    dimensions=DIMENSIONS,
                    dtype=dtype,
                    vectors=matrix(dtype)[chunks].astype(dtype).tobytes(),
                    checksums=text_checksums(["text"] * 5),
                    ids=[f"id {index}" for index in chunks] if with_ids else None,
                    errors=[ChunkError(index=FAILED, reason="odd")] if FAILED in chunks else [],
                )
            )
        output.finish(COUNT, About(job="j", model="m", fingerprint={}, source={}))
    return directory


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("sink", SINKS)
def test_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, dtype: str, *, with_ids: bool
) -> None:
    """The hits are those of a full comparison in double precision, without the failed chunk."""
    monkeypatch.setattr(module, "_ROWS_AT_A_TIME", 7)
    output = make_output(tmp_path, sink, dtype, with_ids=with_ids)
    rows = matrix(dtype).astype("<f8")
    query = np.random.default_rng(5).normal(size=DIMENSIONS).astype("<f4")
    scores = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    scores[FAILED] = -2
    expected = np.argsort(-scores, kind="stable")
    hits = search(output, query, 100)
    assert [hit.index for hit in hits] == expected[: COUNT - 1].tolist()
    assert np.allclose([hit.score for hit in hits], scores[expected[: COUNT - 1]], atol=1e-6)
    assert [hit.id for hit in hits] == [f"id {h.index}" if with_ids else None for h in hits]
    assert search(output, query * 128, 3) == hits[:3]


def test_nearest_is_itself(tmp_path: Path) -> None:
    """A stored vector finds itself, and what points the same way, with a cosine of 1."""
    output = make_output(tmp_path, "npy", "<f4", with_ids=False)
    first, second, third = search(output, matrix("<f4")[20], 3)
    assert {first.index, second.index} == {20, 40}
    assert first.score == pytest.approx(1)
    assert second.score == pytest.approx(1)
    assert third.score < 0.99


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (np.ones(DIMENSIONS + 1), "shape"),
        (np.ones((1, DIMENSIONS)), "shape"),
        (np.zeros(DIMENSIONS), "no direction"),
        (np.full(DIMENSIONS, np.nan), "no direction"),
    ],
)
def test_wrong_query(tmp_path: Path, query: NDArray[np.float32], message: str) -> None:
    """A query from another space, or without a direction, is refused."""
    output = make_output(tmp_path, "npy", "<f4", with_ids=False)
    with pytest.raises(ValueError, match=message):
        search(output, query, 1)


def test_empty_output(tmp_path: Path) -> None:
    """A search in an empty output finds nothing."""
    with Output(tmp_path, {}, sink="parquet", part_bytes_max=1) as output:
        output.finish(0, About(job="j", model="m", fingerprint={}, source={}))
    assert search(tmp_path, np.ones(3, "<f4"), 5) == []


def test_unfinished_output(tmp_path: Path) -> None:
    """An output without a manifest is not searched."""
    with pytest.raises(ManifestError, match="no finished output"):
        iter_vectors(tmp_path)
