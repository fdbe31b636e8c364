"""Tests of what `verify` must find, in each format."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from embedfarm.collector.manifest import About, Manifest, read_manifest, write_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.sinks import SINKS
from embedfarm.collector.verify import OutputProblem, verify
from embedfarm.contract.records import ChunkError, Result, Rows, text_checksums
from tests.collector.places import say_where

COUNT = 10
PART_ROWS = 4
TEXTS = [f"text {index}" for index in range(COUNT)]
IDS = [f"id {index}" for index in range(COUNT)]
FAILED = 5


def make_output(directory: Path, sink: str, vectors: np.ndarray | None = None) -> Path:
    """Make a finished output of chunks in parts of 4, 4 and 2, of which chunk 5 failed."""
    matrix = np.random.default_rng(3).normal(size=(COUNT, 3)) if vectors is None else vectors
    say_where(directory)
    with Output(directory, {}, sink=sink, part_bytes_max=PART_ROWS * 12) as output:
        for start in range(0, COUNT, 2):
            chunks = slice(start, start + 2)
            output.add(
                Result(
                    start=start,
                    count=2,
                    dimensions=3,
                    dtype="<f4",
                    vectors=matrix[chunks].astype("<f4").tobytes(),
                    checksums=text_checksums(TEXTS[chunks]),
                    ids=IDS[chunks],
                    errors=[ChunkError(index=FAILED, reason="odd")] if start == 4 else [],
                )
            )
        output.finish(COUNT, About(job="j", model="m", fingerprint={}, source={}))
    return directory


def source(texts: list[str], ids: list[str] | None = None, batch: int = 3) -> Iterator[Rows]:
    """Yield a source in batches."""
    for start in range(0, len(texts), batch):
        chunks = slice(start, start + batch)
        yield Rows(texts[chunks], None if ids is None else ids[chunks])


@pytest.fixture(params=SINKS)
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make a finished output in each format."""
    return make_output(tmp_path / "output", request.param)


def sentences(problems: list[OutputProblem]) -> str:
    """Return the problems as a text to search in."""
    return "\n".join(f"{problem.file}: {problem.sentence}" for problem in problems)


def edit_manifest(directory: Path, change: Callable[[Manifest], object]) -> None:
    """Write the manifest again with a change."""
    manifest = read_manifest(directory)
    change(manifest)
    write_manifest(directory, manifest)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
def test_sound(output: Path, batch: int) -> None:
    """An output as it was written has no problem, alone or against its source."""
    assert verify(output) == []
    assert verify(output, source(TEXTS, IDS, batch)) == []


def test_any_flipped_byte(output: Path) -> None:
    """A changed bit is found wherever it is, manifest excepted, and the file is named."""
    for path in sorted(output.iterdir()):
        for offset in range(0, path.stat().st_size if path.is_file() else 0, 23):
            if path.name != "_manifest.json":
                flip(path, offset)
                problems = verify(output)
                assert problems, f"{path.name} at {offset}"
                # The lines of ids.jsonl belong to the parts of embeddings.npy.
                expected = path.name.replace("ids.jsonl", "embeddings.npy")
                assert expected in {problem.file for problem in problems}
                flip(path, offset)
    assert verify(output) == []


def test_missing_files(output: Path) -> None:
    """Each missing file is named once."""
    for path in [path for path in output.iterdir() if path.is_file()]:
        content = path.read_bytes()
        path.unlink()
        found = [problem for problem in verify(output) if problem.file == path.name]
        assert len(found) == 1, path.name
        path.write_bytes(content)


@pytest.mark.parametrize("sink", ["parquet", "jsonl"])
def test_swapped_files(tmp_path: Path, sink: str) -> None:
    """Two parts under each other's name are found, even when the manifest was made to agree."""
    output = make_output(tmp_path, sink)
    one, two = (output / f"part-{start:012d}.{sink}" for start in (0, 8))
    other = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(other)
    assert {problem.file for problem in verify(output)} == {one.name, two.name}

    def swap(manifest: Manifest) -> None:
        first, _, last = manifest.parts
        first.file, last.file = last.file, first.file
        first.start, last.start = last.start, first.start
        first.count, last.count = last.count, first.count
        first.rows, last.rows = last.rows, first.rows
        for part, path in ((first, one), (last, two)):
            part.file, part.bytes = path.name, path.stat().st_size

    edit_manifest(output, swap)
    assert "_manifest.json: chunks 0 to 7 are in no part" in sentences(verify(output))


def test_reordered_array(tmp_path: Path) -> None:
    """Parts that changed places in an array, whose rows have no index, are found by digests."""
    path = make_output(tmp_path, "npy") / "embeddings.npy"
    array = np.load(path)
    np.save(path, array[[4, 5, 6, 7, 0, 1, 2, 3, 8, 9]])
    found = sentences(verify(tmp_path))
    assert "chunks 0 to 3: has other bytes" in found
    assert "chunks 4 to 7: has other bytes" in found


def test_longer_files(output: Path) -> None:
    """Bytes behind the end of a file are found."""
    for path in [path for path in output.iterdir() if path.is_file()]:
        content = path.read_bytes()
        path.write_bytes(content + b"x")
        assert path.name in {problem.file for problem in verify(output)}
        path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["part-000000000009.parquet", "embeddings.npy.partial", "part-000000000010.jsonl"]
)
def test_unlisted_files(output: Path, name: str) -> None:
    """A file that looks like a part and is in no manifest is found; others are no concern."""
    (output / "README").touch()
    assert verify(output) == []
    (output / name).touch()
    assert verify(output) == [OutputProblem(name, "is not listed in the manifest")]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda manifest: manifest.parts.pop(1), "chunks 4 to 7 are in no part"),
        (lambda manifest: manifest.parts.reverse(), "chunks 0 to 7 are in no part"),
        (lambda manifest: setattr(manifest, "count", 11), "chunks 10 to 10 are in no part"),
        (lambda manifest: setattr(manifest, "failed", 0), "counts 0 failed chunks"),
        (lambda manifest: setattr(manifest.parts[0], "rows", 3), "does not add up"),
        (lambda manifest: setattr(manifest, "format", "csv"), "no format 'csv'"),
        (lambda manifest: setattr(manifest, "errors_sha256", ""), "error list"),
    ],
)
def test_wrong_manifest(output: Path, change: Callable[[Manifest], object], sentence: str) -> None:
    """A manifest that contradicts itself or its files is found."""
    edit_manifest(output, change)
    assert sentence in sentences(verify(output))


def test_wrong_dimensions(output: Path) -> None:
    """Vectors of other dimensions than the manifest says are found in every part."""
    edit_manifest(output, lambda manifest: setattr(manifest, "dimensions", 4))
    found = sentences(verify(output))
    assert all(f"chunks {chunks}: " in found for chunks in ("0 to 3", "4 to 7", "8 to 9"))


def test_wrong_dtype(tmp_path: Path) -> None:
    """Vectors of another dtype than the manifest says are found where the file has one."""
    for sink in ("parquet", "npy"):
        output = make_output(tmp_path / sink, sink)
        edit_manifest(output, lambda manifest: setattr(manifest, "dtype", "float16"))
        assert "float16" in sentences(verify(output))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([0, 0, 0], "chunks 4 to 7: has a vector that is zero, the first for chunk 6"),
        ([1, np.inf, 1], "chunks 4 to 7: has a vector that is not finite, the first for chunk 6"),
        ([1, 1, np.nan], "chunks 4 to 7: has a vector that is not finite, the first for chunk 6"),
    ],
)
@pytest.mark.parametrize("sink", ["parquet", "npy"])
def test_meaningless_vectors(tmp_path: Path, sink: str, row: list[float], sentence: str) -> None:
    """A vector of zeros or with a component that is no number is found."""
    matrix = np.ones((COUNT, 3))
    matrix[6] = row
    assert sentence in sentences(verify(make_output(tmp_path, sink, matrix)))


def test_chunk_without_vector(tmp_path: Path) -> None:
    """A chunk that did not fail and has no vector is found: a row of NaN is not an excuse."""
    matrix = np.ones((COUNT, 3))
    matrix[6] = np.nan
    found = verify(make_output(tmp_path, "npy", matrix))
    assert "chunks 4 to 7: holds 2 x 3 float32 with ids instead of 3 x 3" in sentences(found)


def test_lost_error_list(output: Path) -> None:
    """A missing _errors.jsonl is found, and the chunks are named that have no vector."""
    (output / "_errors.jsonl").unlink()
    found = sentences(verify(output))
    assert "_errors.jsonl: is missing" in found
    assert f"misses chunk {FAILED}, which _errors.jsonl does not list" in found


def test_wrong_error_list(output: Path) -> None:
    """An error list that names another chunk than the one without a vector is found."""
    path = output / "_errors.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"index":5', b'"index":6'))
    found = sentences(verify(output))
    assert "_errors.jsonl: is not the error list that was written" in found


@pytest.mark.parametrize("edited", range(COUNT))
def test_edited_text(output: Path, edited: int) -> None:
    """An edited text is found, and its part and range are named; the failed chunk's too."""
    texts = [*TEXTS[:edited], "edited", *TEXTS[edited + 1 :]]
    first = edited // PART_ROWS * PART_ROWS
    (problem,) = verify(output, source(texts, IDS))
    assert problem.sentence.startswith(f"chunks {first} to {min(first + 3, 9)}: was made from")


@pytest.mark.parametrize(
    "texts",
    [["new", *TEXTS], TEXTS[1:], TEXTS[:-1], [*TEXTS, "new"], []],
    ids=["shifted", "first gone", "last gone", "grown", "empty"],
)
def test_other_count(output: Path, texts: list[str]) -> None:
    """A source with more or fewer rows than there are vectors is found."""
    found = sentences(verify(output, source(texts, IDS[:1] * len(texts))))
    assert f"counts 10 chunks, the source has {len(texts)} rows" in found
    assert ("was made from other texts" in found) == (texts[:COUNT] != TEXTS)


@pytest.mark.parametrize("ids", [None, [*IDS[:8], "other", IDS[9]]], ids=["none", "another"])
def test_other_ids(output: Path, ids: list[str] | None) -> None:
    """A source with another id, or without any, is found."""
    assert "chunks 8 to 9: has other ids" in sentences(verify(output, source(TEXTS, ids)))


def test_no_output(tmp_path: Path) -> None:
    """A directory without a manifest, or with a damaged one, is one problem and no exception."""
    assert [problem.file for problem in verify(tmp_path)] == ["_manifest.json"]
    (tmp_path / "_manifest.json").write_bytes(msgspec.json.encode({"version": 1}))
    assert "damaged" in sentences(verify(tmp_path))
