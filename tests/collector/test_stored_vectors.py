"""Tests of stored vectors as a collector reads and deletes them."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from embedfarm.collector import stored_vectors
from embedfarm.collector.stored_vectors import StoredVectors, VectorsLost, remove_stored
from embedfarm.contract.records import Receipt, Result
from embedfarm.contract.stored_results import LocalFiles, checksum_of, make_name


@pytest.fixture
def said() -> list[str]:
    """What was noted with the job."""
    return []


@pytest.fixture
def vectors(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> StoredVectors:
    """The vectors of a job in an empty directory, with short waits."""
    monkeypatch.setattr(stored_vectors, "LOOK_SECONDS", 0.001)
    files = LocalFiles(tmp_path / "place")
    files.make()
    return StoredVectors(files, threading.Event(), said.append)


def store(vectors: StoredVectors, starts: range, generation: str = "1") -> list[Result]:
    """Store a file of blocks of as many chunks as the step, and return their results."""
    matrix = np.arange(2.0 * len(starts) * starts.step, dtype="<f4").reshape(-1, 2) + starts.start
    name = make_name(generation, starts.start, starts.stop)
    vectors.files.put(name, matrix.tobytes())
    results = []
    for place, start in enumerate(starts):
        own = matrix[place * starts.step : (place + 1) * starts.step].tobytes()
        receipt = Receipt(
            file=name, offset=place * len(own), bytes=len(own), checksum=checksum_of(own)
        )
        result = Result(
            start=start, count=starts.step, dimensions=2, dtype="<f4", vectors=b"",
            checksums=bytes(4 * starts.step), receipt=receipt,
        )  # fmt: skip
        results.append(msgspec.structs.replace(result, token_count=len(own)))
    return results


def matrix_of(vectors: StoredVectors, results: list[Result]) -> list[float]:
    """Return the first component of each vector."""
    return [float(row[0]) for result in results for row in vectors.fill(result).matrix()]


@pytest.mark.parametrize("ahead", [1, 20, 1 << 20])
def test_vectors_are_read_in_any_order(
    vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Each result gets its own vectors, however much is read ahead, and from whichever file."""
    monkeypatch.setattr(stored_vectors, "READ_BYTES", ahead)
    one, other = store(vectors, range(0, 32, 8)), store(vectors, range(100, 132, 8))
    wanted = [2.0 * row + first for first in (0, 100) for row in range(32)]
    assert matrix_of(vectors, one + other) == wanted
    mixed = [each for pair in zip(reversed(one), other, strict=True) for each in pair]
    assert sorted(matrix_of(vectors, mixed)) == sorted(wanted)
    plain = msgspec.structs.replace(one[0], receipt=None)
    assert vectors.fill(plain) is plain


def test_what_was_changed_is_lost(vectors: StoredVectors) -> None:
    """A bit that has turned, an end that is missing and a file that is gone are found."""
    results = store(vectors, range(0, 32, 8))
    (path,) = vectors.files.directory.iterdir()  # type: ignore[union-attr] # it is local
    whole = path.read_bytes()
    path.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
    assert len(matrix_of(vectors, results[:1])) == 8
    with pytest.raises(VectorsLost, match="other bytes"):
        vectors.fill(results[1])
    path.write_bytes(whole[:-1])
    assert len(matrix_of(vectors, results[:3])) == 24
    with pytest.raises(VectorsLost, match="other bytes"):
        vectors.fill(results[3])
    path.unlink()
    with pytest.raises(VectorsLost, match="is not there"):
        vectors.fill(results[3])


def test_names_that_lead_elsewhere(vectors: StoredVectors, tmp_path: Path) -> None:
    """A receipt that names another file than stored vectors is refused, unread and undeleted."""
    (tmp_path / "secret").write_bytes(b"12345678")
    (result,) = store(vectors, range(0, 1, 1))
    assert result.receipt is not None
    receipt = msgspec.structs.replace(result.receipt, file="../secret")
    with pytest.raises(VectorsLost, match="no name"):
        vectors.fill(msgspec.structs.replace(result, receipt=receipt))
    vectors.sweep(2**53, lambda: "2")
    assert (tmp_path / "secret").exists()


def failing(times: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails so often with EIO, and then does what another one does."""
    left = iter(range(times))

    def call(*arguments: object) -> object:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "no answer")
        return then(*arguments)

    return call


def test_a_storage_that_is_away_is_waited_for(
    vectors: StoredVectors, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading goes on when the storage answers again, and the job says why it waited."""
    results = store(vectors, range(0, 8, 8))
    monkeypatch.setattr(LocalFiles, "read", failing(3, LocalFiles.read))
    assert len(matrix_of(vectors, results)) == 8
    assert said == ["waits for its storage: [Errno 5] no answer"] * 3 + [""]


def test_a_failure_that_passes_costs_little(
    vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage is asked again soon, and more rarely the longer it is away."""
    results, waits = store(vectors, range(0, 8, 8)), list[float]()
    monkeypatch.setattr(LocalFiles, "read", failing(9, LocalFiles.read))
    monkeypatch.setattr(vectors.stop, "wait", waits.append)
    vectors.fill(results[0])
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_stop_ends_the_waiting(vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is to stop, an answer that does not come is an error."""
    results = store(vectors, range(0, 8, 8))
    monkeypatch.setattr(LocalFiles, "read", failing(3, LocalFiles.read))
    vectors.stop.set()
    with pytest.raises(OSError, match="no answer"):
        vectors.fill(results[0])


def test_files_go_when_nobody_needs_them(
    vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file goes when its last chunk is on disk, or with its generation; one in use stays."""
    for starts, generation in (
        (range(0, 32, 8), "1"), (range(32, 64, 8), "1"), (range(8, 16, 8), "1"),
        (range(64, 72, 8), "0"),
    ):  # fmt: skip
        store(vectors, starts, generation)

    def left() -> list[str]:
        return sorted(name.split(".")[1] for name in vectors.files.names())

    vectors.sweep(24, lambda: "1")
    assert left() == ["0-32", "32-64"]
    vectors.sweep(24, lambda: "2")  # nothing new is on disk: nobody looks
    assert left() == ["0-32", "32-64"]
    monkeypatch.setattr(LocalFiles, "delete", failing(1, LocalFiles.delete))
    vectors.sweep(32, lambda: "1")
    assert left() == ["0-32", "32-64"]
    vectors.sweep(32, lambda: "1")
    assert left() == ["32-64"]


def test_a_listing_that_is_behind(vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is deleted though no listing has it yet."""
    results = store(vectors, range(0, 32, 8))
    matrix_of(vectors, results)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "names", lambda _: [])
        vectors.sweep(32, lambda: "1")
    assert vectors.files.names() == []


def test_what_cannot_be_removed_stays(
    vectors: StoredVectors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage that refuses to delete spoils no job that has ended."""
    monkeypatch.setattr(LocalFiles, "delete", failing(1, LocalFiles.delete))
    remove_stored(vectors.files)
    assert "cannot be deleted" in caplog.text
    remove_stored(vectors.files)
    assert vectors.files.names() == []
