"""Tests of patching: chunks that failed get their vectors, whatever happens in between."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.cli.output_report import report
from embedfarm.collector.export import export
from embedfarm.collector.manifest import (
    STATE_DIRECTORY,
    About,
    OutputError,
    read_failures,
    read_manifest,
    settle,
)
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import State, read_state
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.patch import patch
from embedfarm.collector.search import iter_vectors
from embedfarm.collector.sinks import SINKS
from embedfarm.collector.verify import verify
from embedfarm.contract.records import ChunkError, Result, Rows, text_checksums
from tests.collector.places import damage, say_where

COUNT = 40
PER_RESULT = 4
FAILED = (3, 4, 5, 17, 30, 31)
AGAIN = (1, 4)  # places in FAILED
TEXTS = [f"text {index}" for index in range(COUNT)]
IDS = [f"id {index}" for index in range(COUNT)]
ABOUT = About(job="j", model="m", fingerprint={}, source={})


def vectors_of(indices: Sequence[int], dtype: str) -> NDArray[np.generic]:
    """Return vectors that tell whose they are, shape (n, 3)."""
    return np.asarray([[index + 1, index % 7, 1] for index in indices], dtype)


def write(  # noqa: PLR0913 -- all that an output consists of
    directory: Path,
    sink: str,
    indices: Sequence[int],
    failed: Sequence[int],
    dtype: str,
    *,
    ids: bool,
) -> Path:
    """Write an output of the chunks `indices`; those at the places `failed` have failed."""
    say_where(directory)
    with Output(directory, {}, sink=sink, part_bytes_max=8 * 3 * np.dtype(dtype).itemsize) as out:
        for start in range(0, len(indices), PER_RESULT):
            chunks = indices[start : start + PER_RESULT]
            out.add(
                Result(
                    start=start,
                    count=len(chunks),
                    dimensions=3,
                    dtype=dtype,
                    vectors=vectors_of(chunks, dtype).tobytes(),
                    checksums=text_checksums([TEXTS[index] for index in chunks]),
                    ids=[IDS[index] for index in chunks] if ids else None,
                    errors=[
                        ChunkError(index=place, reason=f"{directory.name} odd", attempts=2)
                        for place in failed
                        if start <= place < start + len(chunks)
                    ],
                )
            )
        out.finish(len(indices), ABOUT)
    return directory


def source(ids: bool) -> Iterator[Rows]:  # noqa: FBT001 -- a parameter of the test
    """Yield the corpus."""
    yield Rows(TEXTS, IDS if ids else None)


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("dtype", ["<f4", "|i1"])
@pytest.mark.parametrize("again", [(), AGAIN, range(len(FAILED))], ids=["none", "some", "all"])
@pytest.mark.parametrize("sink", SINKS)
def test_patch(tmp_path: Path, sink: str, again: Sequence[int], dtype: str, ids: bool) -> None:  # noqa: FBT001 -- pytest passes it
    """Retried vectors are in their places, chunks that failed again are listed, others stay."""
    out = write(tmp_path / "first", sink, range(COUNT), FAILED, dtype, ids=ids)
    untouched = {part.start: part.sha256 for part in read_manifest(out).parts if not part.errors}
    retried = write(tmp_path / "second", "parquet", FAILED, again, dtype, ids=ids)
    manifest = patch(out, retried)
    assert verify(out, source(ids)) == []
    assert manifest == read_manifest(out)
    left = [FAILED[place] for place in again]
    assert manifest.failed == len(left)
    assert [line.index for line in read_failures(out)] == left
    assert {(line.reason, line.attempts) for line in read_failures(out)} <= {("second odd", 4)}
    good = [index for index in range(COUNT) if index not in left]
    stored = list(iter_vectors(out))
    np.testing.assert_array_equal(np.concatenate([v.indices for v in stored]), good)
    matrix = np.concatenate([v.matrix for v in stored])
    np.testing.assert_array_equal(matrix, vectors_of(good, dtype))
    assert [each for v in stored for each in v.ids or ()] == [IDS[i] for i in good if ids]
    assert untouched.items() <= {part.start: part.sha256 for part in manifest.parts}.items()
    assert (out / "_errors.jsonl").exists() == bool(left)


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("sink", SINKS)
def test_a_damaged_part_is_not_written_again(tmp_path: Path, sink: str, which: str) -> None:
    """A part with other bytes than were written gets no checksum under which it looks whole."""
    out = write(tmp_path / "first", sink, range(COUNT), FAILED, "<f4", ids=False)
    retried = write(tmp_path / "second", sink, FAILED, (), "<f4", ids=False)
    damage(tmp_path / which, read_manifest(tmp_path / which).parts[0])
    before = verify(out)
    with pytest.raises(OutputError, match="has other bytes than were written"):
        patch(out, retried)
    assert verify(out) == before


def make_older(out: Path) -> None:
    """Give the files beside the vectors the names that they had in earlier versions."""
    for path in [*out.glob("_*"), *out.glob(f"{STATE_DIRECTORY}/*/_*")]:
        path.rename(path.with_name(path.name[1:]))


@pytest.mark.parametrize("again", [(), AGAIN], ids=["none", "some"])
@pytest.mark.parametrize("sink", SINKS)
def test_an_older_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sink: str, again: Sequence[int]
) -> None:
    """An output with the names of earlier versions is read, exported and patched as any other."""
    out = write(tmp_path / "first", sink, range(COUNT), FAILED, "<f4", ids=True)
    make_older(out)
    assert read_state(out) is State.FINISHED
    report(read_manifest(out), out, before=None, as_json=False)
    assert f"{out}/errors.jsonl" in capsys.readouterr().out.replace("\n", "")
    assert verify(out, source(ids=True)) == []
    assert [failure.index for failure in OutputReader(out).failures(4, 3)] == [4, 5, 17]
    export(out, tmp_path / "copy", "jsonl" if sink == "npy" else "npy")
    assert verify(tmp_path / "copy") == []
    patch(out, write(tmp_path / "second", "parquet", FAILED, again, "<f4", ids=True))
    assert verify(out, source(ids=True)) == []
    names = {path.name for path in out.iterdir()}
    assert "_manifest.json" in names
    assert not names & {"manifest.json", "errors.jsonl"}


def test_an_older_change_that_was_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that an earlier version decided, and did not come to make, is made."""
    out = write(tmp_path / "first", "parquet", range(COUNT), FAILED, "<f4", ids=True)
    retried = write(tmp_path / "second", "parquet", FAILED, AGAIN, "<f4", ids=True)
    with monkeypatch.context() as patched:
        patched.setattr("embedfarm.collector.patch.settle", leave)
        with pytest.raises(Crash):
            patch(out, retried)
    make_older(out)
    assert read_manifest(out).failed == len(AGAIN)
    assert verify(out, source(ids=True)) == []


def leave(_directory: Path) -> None:
    """Crash before anything is put in its place."""
    raise Crash


class Crash(BaseException):
    """Raised to end the process."""


@pytest.mark.parametrize("older", [False, True], ids=["today's", "older"])
@pytest.mark.parametrize("again", [AGAIN, ()], ids=["some", "none"])
@pytest.mark.parametrize("sink", SINKS)
def test_a_crash_at_any_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sink: str,
    again: Sequence[int],
    older: bool,  # noqa: FBT001 -- pytest passes it
) -> None:
    """A crash leaves the old or the new output, and the same command then makes it the new one.

    A step is a name that changes, a file that is removed or written durably, before and after.
    """
    whole = write(tmp_path / "whole", sink, range(COUNT), FAILED, "<f4", ids=True)
    if older:
        make_older(whole)
    retried = write(tmp_path / "second", "parquet", FAILED, again, "<f4", ids=True)
    seen: set[int] = set()
    for step in range(200):
        out = tmp_path / f"out-{step}"
        shutil.copytree(whole, out)
        with monkeypatch.context() as patched:
            left = crash_at(step, patched)
            try:
                patch(out, retried)
            except Crash:
                assert left() == 0
        crashed = left() == 0
        assert verify(out, source(ids=True)) == []
        seen.add(read_manifest(out).failed)
        if read_manifest(out).failed == len(FAILED):
            patch(out, retried)
        assert verify(out, source(ids=True)) == []
        assert read_manifest(out).failed == len(again)
        if not crashed:
            break
    assert seen == {len(FAILED), len(again)}
    assert not crashed, "every step was tried"
    assert step > 8


def crash_at(step: int, patched: pytest.MonkeyPatch) -> Callable[[], int]:
    """Raise `Crash` before a change of the disk; return a function that tells the steps left."""
    left = [step + 1]

    def count() -> None:
        left[0] -= 1
        if left[0] <= 0:
            left[0] = 0
            raise Crash

    for owner, name in (
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (shutil, "rmtree"),
        (os, "fsync"),
    ):
        change = getattr(owner, name)

        def stepping(*words: Any, _change: Any = change, **more: Any) -> Any:  # noqa: ANN401 -- any change
            count()
            return _change(*words, **more)

        patched.setattr(owner, name, stepping)
    return lambda: left[0]


def test_another_output_is_refused(tmp_path: Path) -> None:
    """A patch that is not of the chunks that failed is refused, and changes nothing."""
    out = write(tmp_path / "first", "parquet", range(COUNT), FAILED, "<f4", ids=True)
    before = (out / "_manifest.json").read_bytes()
    for name, indices, dtype in (("fewer", FAILED[:3], "<f4"), ("other", FAILED, "<f2")):
        with pytest.raises(OutputError, match="not of the chunks that failed"):
            patch(out, write(tmp_path / name, "parquet", indices, (), dtype, ids=True))
    assert (out / "_manifest.json").read_bytes() == before


def test_nothing_to_settle(tmp_path: Path) -> None:
    """An output without a started patch stays as it is, its directory included."""
    out = write(tmp_path / "first", "parquet", range(COUNT), (), "<f4", ids=True)
    shutil.rmtree(out / STATE_DIRECTORY)
    settle(out)
    assert not (out / STATE_DIRECTORY).exists()
