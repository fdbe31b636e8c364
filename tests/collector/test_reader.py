"""Tests of reading an output while it is written, and afterwards."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.collector.manifest import About, Failure, OutputError, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.output_reader import Chunks, NotBegun, OutputReader
from embedfarm.collector.ranges import read_ranges
from embedfarm.collector.sinks import SINKS
from embedfarm.contract.records import ChunkError, Result, text_checksums
from tests.collector.places import damage, say_where

ABOUT = About(job="j", model="m", fingerprint={}, source={})
COUNT = 60
FAILED = {0, 7, 25, 26, 59}
DTYPES = {"<f4": "float32", "<f2": "float16", "|i1": "int8", "|u1": "uint8"}


def matrix_of(dtype: str) -> NDArray[Any]:
    """Return a different row for each chunk, shape (COUNT, 3)."""
    return np.arange(1, 3 * COUNT + 1).reshape(COUNT, 3).astype(dtype)


def results(dtype: str = "<f4", *, ids: bool = False, size: int = 5) -> Iterator[Result]:
    """Yield results of all chunks, of which some failed."""
    matrix = matrix_of(dtype)
    for start in range(0, COUNT, size):
        chunks = range(start, start + size)
        yield Result(
            start=start,
            count=size,
            dimensions=3,
            dtype=dtype,
            vectors=matrix[start : start + size].tobytes(),
            checksums=text_checksums([str(index) for index in chunks]),
            ids=[f"id {index}" for index in chunks] if ids else None,
            errors=[ChunkError(index=n, reason=f"odd {n}") for n in chunks if n in FAILED],
        )


def open_output(directory: Path, sink: str) -> Output:
    """Open an output whose parts have at most three results of float32."""
    say_where(directory)
    return Output(directory, {"model": "m"}, sink=sink, part_bytes_max=3 * 60)


def pages(directory: Path, limit: int) -> Iterator[Chunks]:
    """Yield all pages that are there, read as a client would."""
    start = 0
    with OutputReader(directory) as reader:
        while (chunks := reader.read(start, limit)) is not None:
            assert chunks.batch.start == start
            assert 0 < len(chunks.batch.good) <= limit
            yield chunks
            start = chunks.end
        assert start == reader.available


def check(found: list[Chunks], count: int, dtype: str, *, ids: bool) -> None:
    """Assert that chunks 0 to `count - 1` are there once, with their vector, id or reason."""
    assert sum(len(each.batch.good) for each in found) == count
    for chunks in found:
        batch = chunks.batch
        for row, index in enumerate(range(batch.start, chunks.end)):
            assert batch.good[row] == (index not in FAILED)
            if batch.good[row]:
                assert (batch.matrix[row] == matrix_of(dtype)[index]).all()
            assert (batch.ids is not None) == ids
            assert batch.ids is None or batch.ids[row] == f"id {index}"
        assert chunks.layout.dtype == DTYPES[dtype]
    failures = [failure for chunks in found for failure in chunks.failures]
    assert [each.index for each in failures] == sorted(n for n in FAILED if n < count)
    assert all(each.reason == f"odd {each.index}" for each in failures)


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", SINKS)
def test_every_chunk_once_while_it_is_written(
    tmp_path: Path, sink: str, dtype: str, *, ids: bool
) -> None:
    """A reader finds all durable chunks after each part and in the end, by any page size."""
    with open_output(tmp_path, sink) as output:
        for result in results(dtype, ids=ids):
            if output.add(result) is not None:
                for limit in (1, 4, COUNT):
                    check(list(pages(tmp_path, limit)), output.next_index, dtype, ids=ids)
        with OutputReader(tmp_path) as before:
            assert (before.count, before.job, before.available) == (None, "", output.next_index)
            output.finish(COUNT, ABOUT)
            assert before.read(0, 9) is not None  # what it had opened is still there
    for limit in (1, 4, COUNT):
        check(list(pages(tmp_path, limit)), COUNT, dtype, ids=ids)
    with OutputReader(tmp_path) as reader:
        assert (reader.count, reader.job, reader.available) == (COUNT, "j", COUNT)


def test_a_line_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    """A reader finds the chunks before the journal's last line end, and no others."""
    with open_output(tmp_path, "parquet") as output:
        for result in results():
            output.add(result)
        ends = [part.end for part in output.parts]
        journal = tmp_path / ".embedfarm" / "parts.jsonl"
        whole = journal.read_bytes()
        lines = whole.splitlines(keepends=True)
        places = {0, 1, *np.cumsum([len(line) for line in lines]).tolist()}
        for place in sorted({near for each in places for near in (each - 1, each, each + 1)}):
            journal.write_bytes(whole[: max(0, place)])
            there = whole[: max(0, place)].count(b"\n")
            with OutputReader(tmp_path) as reader:
                assert reader.available == (ends[there - 1] if there else 0)


def test_what_is_not_there(tmp_path: Path) -> None:
    """A missing output, one without a part, and a damaged one are told apart."""
    with pytest.raises(NotBegun):
        OutputReader(tmp_path / "absent")
    with open_output(tmp_path, "parquet") as output:
        with OutputReader(tmp_path) as reader:
            assert (reader.available, reader.read(0, 1), reader.failures(0, 1)) == (0, None, [])
        for result in results():
            output.add(result)
        journal = tmp_path / ".embedfarm" / "parts.jsonl"
        journal.write_bytes(journal.read_bytes() + b"{}\n")
        with pytest.raises(OutputError, match="damaged"):
            OutputReader(tmp_path)


@pytest.mark.parametrize("sink", SINKS)
def test_a_damaged_part_is_not_read(tmp_path: Path, sink: str) -> None:
    """Vectors of a finished output that are not those that were written are refused by name."""
    with open_output(tmp_path, sink) as output:
        for result in results():
            output.add(result)
        output.finish(COUNT, ABOUT)
    whole, damaged, *_ = read_manifest(tmp_path).parts
    damage(tmp_path, damaged)
    with OutputReader(tmp_path) as reader:
        assert reader.read(whole.start, COUNT) is not None
        with pytest.raises(OutputError, match="has other bytes than were written"):
            reader.read(damaged.start, COUNT)


def test_ranges_are_of_whole_vectors_of_the_model(tmp_path: Path) -> None:
    """Ranges by which others are quantised are no damage's, and none of another model."""
    with open_output(tmp_path, "npy") as output:
        for result in results():
            output.add(result)
        output.finish(COUNT, ABOUT)
    assert read_ranges(tmp_path, ABOUT.model).shape == (2, 3)
    with pytest.raises(OutputError, match="no ranges of another"):
        read_ranges(tmp_path, "another")
    damage(tmp_path, read_manifest(tmp_path).parts[1])
    with pytest.raises(OutputError, match="has other bytes than were written"):
        read_ranges(tmp_path, ABOUT.model)


@pytest.mark.parametrize("finished", [True, False])
def test_failures_by_pages(tmp_path: Path, *, finished: bool) -> None:
    """Failed chunks come in order from any chunk on, as many as are wanted."""
    with open_output(tmp_path, "jsonl") as output:
        for result in results(ids=True):
            output.add(result)
        if finished:
            output.finish(COUNT, ABOUT)
    for start in range(COUNT + 2):
        for limit in (1, 2, COUNT):
            with OutputReader(tmp_path) as reader:
                found = reader.failures(start, limit)
            expected = sorted(n for n in FAILED if n >= start)[:limit]
            assert [each.index for each in found] == expected
            assert all(each.id == f"id {each.index}" for each in found)


def test_a_page_of_a_million_failures_reads_little(tmp_path: Path) -> None:
    """A page of a million failures is right at any place, and read in less than 0.1 s at best."""
    with open_output(tmp_path, "jsonl") as output:
        for result in results():
            output.add(result)
        output.finish(COUNT, ABOUT)
    path = tmp_path / "_errors.jsonl"
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.writelines(
            encode(Failure(index=index, reason="odd", attempts=3)) + b"\n"
            for index in range(0, 2_000_000, 2)
        )
    seconds = []
    for start in (0, 999_999, 1_999_998):
        began = time.monotonic()
        with OutputReader(tmp_path) as reader:
            found = reader.failures(start, 100)
        seconds.append(time.monotonic() - began)
        assert found[0].index == start + start % 2
        assert all(after.index - before.index == 2 for before, after in pairwise(found))
    assert min(seconds) < 0.1
