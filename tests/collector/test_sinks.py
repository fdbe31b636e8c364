"""Tests of the promises that every sink keeps."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from embedfarm.collector.manifest import ERRORS_FILE, STATE_DIRECTORY, About, Manifest
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import JOURNAL_FILE, State, read_state
from embedfarm.collector.search import iter_vectors
from embedfarm.collector.sinks import PartError, holding_sinks, open_sink
from embedfarm.collector.verify import verify
from embedfarm.contract.durable_files import TEMPORARY_SUFFIX
from embedfarm.contract.records import ChunkError, Result, text_checksums

COUNT = 22
DIMENSIONS = 5
BLOCK = 3
PART_ROWS = 6
# A chunk here and there, and chunks 6 to 11: the whole second part.
FAILED = (1, 6, 7, 8, 9, 10, 11, 20)
ABOUT = About(job="j", model="m", fingerprint={}, source={}, created=0.0)


@dataclass(frozen=True)
class Case:
    """A format with a dtype, with ids or without, and the output that is written in it."""

    sink: str
    dtype: str
    with_ids: bool

    def ids(self, indices: list[int]) -> list[str] | None:
        """Return the identifiers of some chunks."""
        return [f'"é{index}\n' for index in indices] if self.with_ids else None

    def matrix(self) -> NDArray[np.floating]:
        """Return a vector for each chunk."""
        return np.random.default_rng(7).normal(size=(COUNT, DIMENSIONS)).astype(self.dtype)

    def results(self) -> list[Result]:
        """Return the results of a job of 22 chunks, three a block, one in the last."""
        starts = range(0, COUNT, BLOCK)
        return [self._result(list(range(start, min(start + BLOCK, COUNT)))) for start in starts]

    def _result(self, chunks: list[int]) -> Result:
        """Return the result of one block."""
        return Result(
            start=chunks[0],
            count=len(chunks),
            dimensions=DIMENSIONS,
            dtype=self.dtype,
            vectors=self.matrix()[chunks].tobytes(),
            checksums=text_checksums([f"text {index}" for index in chunks]),
            ids=self.ids(chunks),
            errors=[ChunkError(index=i, reason="too odd") for i in chunks if i in FAILED],
        )

    def open(self, directory: Path) -> Output:
        """Open the output, new or to go on with."""
        row_bytes = DIMENSIONS * np.dtype(self.dtype).itemsize
        return Output(directory, {}, sink=self.sink, part_bytes_max=PART_ROWS * row_bytes)

    def run(self, directory: Path) -> Manifest:
        """Write the output, or what is left to write of it."""
        with self.open(directory) as output:
            for result in self.results():
                output.add(result)
            return output.finish(COUNT, ABOUT)

    def run_until(self, directory: Path, parts: int) -> None:
        """Write some parts, with half of the next one in memory, and stop."""
        with self.open(directory) as output:
            for result in self.results():
                if result.start < parts * PART_ROWS + BLOCK:
                    output.add(result)


CASES = [
    Case(sink, dtype, ids)
    for sink in holding_sinks()
    for dtype in ("<f4", "<f2")
    for ids in (True, False)
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Give each format with each dtype, with and without ids."""
    found: Case = request.param
    return found


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return all files of an output."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture
def whole(case: Case, tmp_path: Path) -> dict[str, bytes]:
    """Return the files of a run that nothing interrupted."""
    case.run(tmp_path / "whole")
    return snapshot(tmp_path / "whole")


def test_round_trip(case: Case, tmp_path: Path) -> None:
    """Every vector comes back bit for bit, in order, with its index and id; failed ones do not."""
    manifest = case.run(tmp_path)
    parts = list(iter_vectors(tmp_path))
    good = [index for index in range(COUNT) if index not in FAILED]
    assert [len(part.indices) for part in parts] == [5, 0, 6, 3]
    assert np.concatenate([part.indices for part in parts]).tolist() == good
    found = np.concatenate([part.matrix for part in parts])
    assert found.dtype == np.dtype(case.dtype)
    assert found.tobytes() == case.matrix()[good].tobytes()
    ids = [part.ids for part in parts]
    assert (None if None in ids else [i for part in ids for i in part or ()]) == case.ids(good)
    assert (manifest.count, manifest.failed) == (COUNT, len(FAILED))


def test_errors_of_an_earlier_try_go(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of failed chunks that a run left when it died is not taken for that of the next."""
    line = {"index": 1, "reason": "too odd", "attempts": 1}
    with case.open(tmp_path):
        (tmp_path / ERRORS_FILE).write_text(f"{json.dumps(line)}\n")
    monkeypatch.setitem(globals(), "FAILED", set())
    assert case.run(tmp_path).failed == 0
    assert not (tmp_path / ERRORS_FILE).exists()
    assert verify(tmp_path) == []


class PowerCutError(Exception):
    """Raised to end the process."""


def cut_power(monkeypatch: pytest.MonkeyPatch, syncs: int) -> None:
    """Raise `PowerCutError` at a sync to the disk, after so many of them."""
    left = iter(range(syncs))

    def count_down(_descriptor: int) -> None:
        if next(left, None) is None:
            raise PowerCutError

    monkeypatch.setattr(os, "fsync", count_down)


def test_power_cut_anywhere(
    case: Case, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on after dying at any sync ends in the same bytes as one that never died."""
    cuts = 0
    while True:
        directory = tmp_path / str(cuts)
        with monkeypatch.context() as patch:
            cut_power(patch, cuts)
            try:
                case.run(directory)
            except PowerCutError:
                cuts += 1
            else:
                break
        if read_state(directory) is not State.FINISHED:
            case.run(directory)
        assert snapshot(directory) == whole
    # At least file, directory and journal line of each of the four parts.
    assert cuts > 12


@pytest.mark.parametrize("parts", range(4))
def test_leftovers(case: Case, tmp_path: Path, whole: dict[str, bytes], parts: int) -> None:
    """Half-written files, unknown parts and a torn journal line leave no trace after a resume."""
    directory = tmp_path / "torn"
    case.run_until(directory, parts)
    unknown = [f"part-{parts * PART_ROWS:012d}.{case.sink}"]
    if case.sink == "npy":
        unknown = ["embeddings.npy.partial", "ids.jsonl.partial"][: 1 + case.with_ids]
    for name in unknown:
        with (directory / name).open("ab") as file:
            # More than the rest of the output, so that writing on would not cover it.
            file.write(b'"never journalled' * 99)
    (directory / f"part-000000000000.parquet{TEMPORARY_SUFFIX}").write_bytes(b"half")
    with (directory / STATE_DIRECTORY / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"part":{"start":')
    with case.open(directory) as output:
        assert output.next_index == parts * PART_ROWS
    case.run(directory)
    assert snapshot(directory) == whole


def test_lost_part(case: Case, tmp_path: Path) -> None:
    """An output that lost a journalled part is refused instead of continued with a gap."""
    case.run_until(tmp_path, 2)
    name = "embeddings.npy.partial" if case.sink == "npy" else f"part-000000000000.{case.sink}"
    (tmp_path / name).unlink()
    with pytest.raises(PartError, match=name):
        case.open(tmp_path)


@pytest.mark.parametrize("sink", holding_sinks())
@settings(max_examples=40, deadline=None)
@given(
    matrix=arrays.arrays(
        np.dtype("<f4"),
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    data=st.data(),
)
def test_any_vector_and_id(sink: str, matrix: NDArray[np.float32], data: st.DataObject) -> None:
    """Any finite float32 and any text as an id survive every format."""
    count, dimensions = matrix.shape
    ids = data.draw(st.lists(st.text(), min_size=count, max_size=count))
    result = Result(
        start=0,
        count=count,
        dimensions=dimensions,
        dtype="<f4",
        vectors=matrix.tobytes(),
        checksums=text_checksums(ids),
        ids=ids,
    )
    with tempfile.TemporaryDirectory() as name:
        with Output(Path(name), {}, sink=sink, part_bytes_max=1) as output:
            output.add(result)
            output.finish(count, ABOUT)
        (vectors,) = iter_vectors(Path(name))
        assert vectors.ids == ids
        assert np.array_equal(vectors.matrix, matrix)


def test_npy_can_be_mapped(tmp_path: Path) -> None:
    """embeddings.npy opens with plain numpy, row = index, NaN where a chunk failed."""
    case = Case("npy", "<f4", with_ids=True)
    case.run(tmp_path)
    array = np.load(tmp_path / "embeddings.npy", mmap_mode="r")
    assert array.shape == (COUNT, DIMENSIONS)
    assert np.flatnonzero(np.isnan(array).all(axis=1)).tolist() == list(FAILED)
    assert np.array_equal(array[0], case.matrix()[0])
    lines = (tmp_path / "ids.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line) for line in lines] == case.ids(list(range(COUNT)))


def test_failed_chunks_of_integers(tmp_path: Path) -> None:
    """A failed chunk of integers, whose row cannot be NaN, is told from zeros by _errors.jsonl."""
    errors = [ChunkError(index=3, reason="odd")]
    with Output(tmp_path, {}, sink="npy", part_bytes_max=6) as output:
        for start in (0, 2):
            output.add(
                Result(
                    start=start,
                    count=2,
                    dimensions=3,
                    dtype="|u1",
                    vectors=bytes(6),
                    checksums=text_checksums(["a", "b"]),
                    errors=errors if start else [],
                )
            )
        output.finish(4, ABOUT)
    assert np.load(tmp_path / "embeddings.npy").dtype == np.uint8
    assert [vectors.indices.tolist() for vectors in iter_vectors(tmp_path)] == [[0, 1], [2]]
    assert not verify(tmp_path)


def test_parquet_is_plain(tmp_path: Path) -> None:
    """Parquet parts have the documented columns, and vectors encoded as they are."""
    Case("parquet", "<f2", with_ids=True).run(tmp_path)
    file = pq.ParquetFile(tmp_path / "part-000000000000.parquet")
    types = [str(field.type) for field in file.schema_arrow]
    assert file.schema_arrow.names == ["index", "id", "embedding"]
    assert types == [
        "int64",
        "string",
        f"fixed_size_list<element: halffloat not null>[{DIMENSIONS}]",
    ]
    embedding = file.metadata.row_group(0).column(2)
    assert embedding.compression == "UNCOMPRESSED"
    assert "PLAIN_DICTIONARY" not in embedding.encodings
    assert "RLE_DICTIONARY" not in embedding.encodings
    assert embedding.statistics is None


def test_jsonl_is_short(tmp_path: Path) -> None:
    """A component is the shortest decimal of its float32, not of the double it would widen to."""
    vectors = np.array([0.1, 1.0], dtype="<f4").tobytes()
    checksums = text_checksums(["a"])
    with Output(tmp_path, {}, sink="jsonl", part_bytes_max=1) as output:
        output.add(
            Result(
                start=0, count=1, dimensions=2, dtype="<f4", vectors=vectors, checksums=checksums
            )
        )
    line = (tmp_path / "part-000000000000.jsonl").read_bytes()
    assert line == b'{"index":0,"embedding":[0.1,1]}\n'


def test_unknown_format(tmp_path: Path) -> None:
    """An unknown format is refused with the names of those there are."""
    with pytest.raises(ValueError, match="no format 'csv'; there are parquet, npy, jsonl"):
        open_sink("csv", tmp_path)
