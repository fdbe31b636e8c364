"""Tests of places where vectors are stored past the server."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.durable_files import TEMPORARY_SUFFIX
from embedfarm.contract.stored_results import (
    LocalFiles,
    StorageRefused,
    StoredFiles,
    check_place,
    is_left_over,
    is_name,
    make_name,
    open_place,
    place_below,
)


@pytest.fixture(params=["local", "url"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredFiles]:
    """A place of each kind."""
    place = str(tmp_path / "place") if request.param == "local" else "memory://bucket/place"
    files = open_place(place)
    files.make()
    yield files
    files.remove()


@given(
    generation=st.from_regex(r"[0-9]{0,13}\+*", fullmatch=True),
    start=st.integers(0, 2**53 - 1),
    count=st.integers(1, 1000),
    upto=st.integers(0, 2**53),
)
def test_names_say_who_needs_a_file(generation: str, start: int, count: int, upto: int) -> None:
    """A file is left over once all its chunks are on disk, or when it is of another generation."""
    end = min(start + count, 2**53)
    name = make_name(generation, start, end)
    assert is_name(name)
    assert name != make_name(generation, start, end)
    for each in (name, f"{name}.embedfarm.tmp"):
        assert is_left_over(each, upto, generation) == (end <= upto)
        assert is_left_over(each, upto, "") == (end <= upto)
        assert is_left_over(each, upto, f"{generation}+")
    assert not is_name(f"{name}.embedfarm.tmp")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd", "1.0-8.00", "notes.txt"])
def test_other_names_lead_nowhere(name: str) -> None:
    """What `make_name` did not make is no name, and is never left over."""
    assert not is_name(name)
    assert not is_left_over(name, 2**53, "other")


def test_a_file_is_whole_or_absent(files: StoredFiles) -> None:
    """What was put can be read in parts, listed and deleted; deleting twice does no harm."""
    files.put("1.0-8.a", b"0123456789")
    files.put("1.0-8.a", b"0123456789")
    assert files.read("1.0-8.a", 2, 3) == b"234"
    assert files.read("1.0-8.a", 8, 100) == b"89"
    assert files.read("1.0-8.a", 10, 100) == b""
    files.put("empty", b"")
    assert sorted(files.names()) == ["1.0-8.a", "empty"]
    files.delete(["1.0-8.a", "empty"])
    files.delete(["1.0-8.a"])
    assert files.names() == []
    with pytest.raises(FileNotFoundError):
        files.read("1.0-8.a", 0, 1)
    assert not files.may_pass(FileNotFoundError())
    assert files.may_pass(OSError(5, "I/O"))


def test_a_place_that_is_gone(tmp_path: Path) -> None:
    """Writing never makes a directory; listing and removing one that is gone does no harm."""
    files = open_place(str(tmp_path / "place"))
    with pytest.raises(FileNotFoundError):
        files.put("1.0-8.a", b"")
    assert files.names() == []
    files.remove()
    assert not (tmp_path / "place").exists()


def test_what_no_worker_wrote_stays(files: StoredFiles) -> None:
    """Removing a place deletes vectors, also half written ones, and no file of anybody else."""
    names = [
        "1.0-8." + 32 * "a",
        f"1.0-8.{32 * 'b'}{TEMPORARY_SUFFIX}",
        "part-000000000000.parquet",
    ]
    for name in (*names, "_manifest.json"):
        files.put(name, b"x")
    files.remove({names[0]})
    assert sorted(files.names()) == sorted([names[0], names[2], "_manifest.json"])
    files.remove()
    assert sorted(files.names()) == sorted([names[2], "_manifest.json"])
    files.delete(files.names())


def test_a_place_is_removed_beside_a_writer(tmp_path: Path) -> None:
    """A worker that still writes ends with a directory that is gone, and nothing is left."""
    files = LocalFiles(tmp_path / "place")
    files.make()
    begun = threading.Event()

    def write() -> None:
        for number in range(100_000):
            files.put(make_name(str(number), 0, 8), b"x")
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        assert begun.wait(20)
        while files.directory.exists():
            files.remove()
        with pytest.raises(FileNotFoundError):
            writer.result(20)
    assert not files.directory.exists()


def test_places_below_roots(tmp_path: Path) -> None:
    """A place is taken below a root only, after all links and dots."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/")
    roots = [str(tmp_path / "root"), "s3://bucket/vectors"]
    for place in (f"{roots[0]}/job", f"file://{roots[0]}/job", "s3://bucket/vectors/job"):
        check_place(place, roots)
    for place in (
        f"{roots[0]}/../other",
        f"{roots[0]}/link/etc",
        f"{roots[0]}2/job",
        "s3://bucket/vectors2/job",
        "s3://bucket/vectors/../job",
        "s3://other/vectors/job",
        "gcs://bucket/vectors/job",
        "s3://key:secret@bucket/vectors/job",
        "simplecache::s3://bucket/vectors/job",
        "job",
    ):
        with pytest.raises(StorageRefused) as refused:
            check_place(place, roots)
        assert "secret@" not in str(refused.value)
    with pytest.raises(StorageRefused, match="stored_roots \\(empty\\)"):
        check_place(roots[0], [])


def test_the_place_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory becomes an absolute one; a URL with secrets is refused."""
    monkeypatch.chdir(tmp_path)
    assert place_below("vectors", "j") == str(tmp_path / "vectors" / "j")
    assert place_below("s3://bucket/", "j") == "s3://bucket/j"
    with pytest.raises(StorageRefused) as refused:
        place_below("s3://key:secret@bucket", "j")
    assert "secret" not in str(refused.value).partition("has secrets")[0]


def test_what_no_library_opens() -> None:
    """A URL without a library is refused by name."""
    with pytest.raises(StorageRefused, match="nowhere"):
        open_place("nowhere://bucket")


def test_a_store_that_refuses_to_read_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is shorter than it should be reads as nothing, and not as an outage."""
    files = open_place("memory://bucket/short")
    files.put("a", b"123")

    def refuse(*_: object, **__: object) -> bytes:
        raise OSError("416 range not satisfiable")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    assert files.read("a", 3, 8) == b""
    with pytest.raises(OSError, match="416"):
        files.read("a", 0, 8)
