"""Tests of the file of vectors that workers of a host share: it may lose some, and no more."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.workers.vector_cache import TRANSACTION_BYTES, VectorCache
from tests.full_disk import small_disk

BYTES_MAX = 64 << 20
DIMENSIONS = 256
COUNT = 3000
RANDOM = np.random.default_rng(0).standard_normal(DIMENSIONS).astype(np.float32)


def vectors_of(first: int, count: int = COUNT) -> dict[bytes, NDArray[np.float32]]:
    """Vectors that are known by their number."""
    made = np.tile(RANDOM, (count, 1))
    made[:, 0] = range(first, first + count)
    return {
        number.to_bytes(16, "big"): vector
        for number, vector in zip(range(first, first + count), made, strict=True)
    }


def assert_right(cache: VectorCache, vectors: dict[bytes, NDArray[np.float32]]) -> int:
    """Count the vectors that are there; each is the one of its key, bit for bit."""
    found = cache.find(list(vectors))
    assert found.keys() <= vectors.keys()
    assert all(np.array_equal(each.vector, vectors[key]) for key, each in found.items())
    return len(found)


def bytes_in(directory: Path) -> int:
    """The bytes of all files of a directory."""
    return sum(each.stat().st_size for each in directory.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that is not there yet."""
    return tmp_path / "some" / "vectors"


@pytest.fixture
def cache(directory: Path) -> Iterator[VectorCache]:
    """A cache of the least size."""
    cache = VectorCache(directory, BYTES_MAX)
    yield cache
    cache.close()


def test_what_was_kept_is_found(cache: VectorCache, directory: Path) -> None:
    """Vectors are found bit for bit, by their process and by others, and nobody else may look."""
    vectors = vectors_of(0)
    cache.keep(vectors)
    other = VectorCache(directory, BYTES_MAX)
    assert assert_right(cache, vectors) == assert_right(other, vectors) == COUNT
    assert cache.find([b"another key 1234"]) == {}
    assert cache.find([]) == {}
    assert directory.stat().st_mode & 0o077 == 0
    other.close()


def test_what_is_not_used_goes(cache: VectorCache, directory: Path) -> None:
    """The bound holds whatever comes; what is asked for again and again stays, and the rest goes.

    The file and its log have at most as many bytes as is said after every call.
    """
    often = vectors_of(0, 50)
    cache.keep(often)
    first = 1000
    for first in range(1000, 100_000, COUNT):
        cache.keep(vectors_of(first))
        found = cache.find(list(often))
        cache.keep({key: each.vector for key, each in found.items() if each.fades})
        assert bytes_in(directory) <= BYTES_MAX
    assert assert_right(cache, often) == 50
    assert assert_right(cache, vectors_of(first)) == COUNT
    assert assert_right(cache, vectors_of(1000)) == 0
    kept = sum(assert_right(cache, vectors_of(each)) for each in range(1000, 100_000, COUNT))
    assert kept * DIMENSIONS * 4 > 0.55 * BYTES_MAX


def test_a_smaller_bound_holds(directory: Path) -> None:
    """A file from before there was less room is given up for a new one."""
    large = VectorCache(directory, 4 * BYTES_MAX)
    large.keep(vectors_of(0, 80_000))
    large.close()
    assert bytes_in(directory) > BYTES_MAX
    small = VectorCache(directory, BYTES_MAX)
    assert assert_right(small, vectors_of(0, 10)) == 0
    small.keep(vectors_of(0, 10))
    assert assert_right(small, vectors_of(0, 10)) == 10
    assert bytes_in(directory) < BYTES_MAX
    small.close()


WRITER = """
import sys
from pathlib import Path
from embedfarm.workers.vector_cache import VectorCache
from tests.workers.test_vector_cache import BYTES_MAX, vectors_of
cache = VectorCache(Path(sys.argv[1]), BYTES_MAX)
while True:
    for first in range(0, 5000, 1000):
        vectors = vectors_of(int(sys.argv[2]) + first, 1000)
        cache.keep(vectors)
        if cache.find(list(vectors)).keys() == vectors.keys():  # or another process writes for long
            print("kept", flush=True)
"""


def test_processes_that_are_killed_lose_nothing_of_others(
    cache: VectorCache, directory: Path
) -> None:
    """Workers that write at once, each killed at some moment, leave sound vectors to the others."""
    generator = random.Random(0)
    for turn in range(3):
        places = [turn * 100_000, turn * 100_000 + 50_000]
        children = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(directory), str(place)], stdout=subprocess.PIPE
            )
            for place in places
        ]
        for child in children:
            assert child.stdout is not None
            for _ in range(generator.randint(1, 20)):
                assert child.stdout.readline() == b"kept\n"
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        for place in places:
            assert assert_right(cache, vectors_of(place, 5000)) >= 1000
        cache.keep(vectors_of(900_000, 10))
        assert assert_right(cache, vectors_of(900_000, 10)) == 10
    with sqlite3.connect(next(directory.glob("*.sqlite"))) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_stopped_process_holds_up_nobody(cache: VectorCache, directory: Path) -> None:
    """While another process is in a transaction, vectors are found, and new ones are not kept."""
    cache.keep(vectors_of(0, 10))
    other = sqlite3.connect(next(directory.glob("*.sqlite")), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    cache.keep(vectors_of(10, 10))
    assert assert_right(cache, vectors_of(0, 20)) == 10
    other.execute("ROLLBACK")
    other.close()
    cache.keep(vectors_of(10, 10))
    assert assert_right(cache, vectors_of(0, 20)) == 20


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_gives_no_wrong_vector(directory: Path, seed: int) -> None:
    """Whatever happens to the file, what is found is right, and soon new vectors are kept again."""
    generator = random.Random(seed)
    cache, vectors = VectorCache(directory, BYTES_MAX), vectors_of(0)
    cache.keep(vectors)
    cache.close()
    (path,) = directory.glob("*.sqlite")
    content = bytearray(path.read_bytes())
    if seed % 4 == 0:
        content = bytearray(generator.randbytes(5000))
    elif seed % 4 == 1:
        del content[generator.randrange(len(content)) :]
    for _ in range(seed % 4 * 30):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    for _ in range(3):
        assert_right(cache, vectors)
        cache.keep(vectors)
    assert assert_right(cache, vectors) == COUNT
    cache.close()


@pytest.mark.parametrize("damage", ["7", "'words'", "x''", "x'0011'"])
def test_a_row_of_another_type_is_not_found(
    cache: VectorCache, directory: Path, damage: str
) -> None:
    """A row in which damage has left no vector raises nothing, and is written over."""
    cache.keep(vectors_of(0, 2))
    with sqlite3.connect(next(directory.glob("*.sqlite"))) as file:
        file.execute(f"UPDATE vectors SET vector = {damage} WHERE place = 1")  # noqa: S608 # ours
    file.close()
    assert assert_right(cache, vectors_of(0, 2)) == 1
    cache.keep(vectors_of(0, 2))
    assert assert_right(cache, vectors_of(0, 2)) == 2


def test_an_exchanged_vector_is_not_found(cache: VectorCache, directory: Path) -> None:
    """A row under another key than its own counts as damaged, until it is kept anew."""
    cache.keep(vectors_of(0, 2))
    one, other = vectors_of(0, 2)
    with sqlite3.connect(next(directory.glob("*.sqlite"))) as file:
        query = (
            "UPDATE vectors SET vector = (SELECT vector FROM vectors WHERE key = ?) WHERE key = ?"
        )
        file.execute(query, (one, other))
    file.close()
    assert set(cache.find([one, other])) == {one}
    cache.keep(vectors_of(0, 2))
    assert assert_right(cache, vectors_of(0, 2)) == 2


def test_a_removed_file_is_begun_anew(cache: VectorCache, directory: Path) -> None:
    """Removing the files while workers run gives an empty cache, which works."""
    cache.keep(vectors_of(0, 10))
    for path in directory.iterdir():
        path.unlink()
    assert assert_right(cache, vectors_of(0, 10)) == 0
    cache.keep(vectors_of(0, 10))
    assert assert_right(cache, vectors_of(0, 10)) == 10
    other = VectorCache(directory, BYTES_MAX)
    assert assert_right(other, vectors_of(0, 10)) == 10
    other.close()


def test_a_directory_that_cannot_be_used_is_an_empty_cache(tmp_path: Path) -> None:
    """Where there is no directory to be had, nothing is found, and nothing is raised."""
    (tmp_path / "file").touch()
    cache = VectorCache(tmp_path / "file" / "vectors", BYTES_MAX)
    cache.keep(vectors_of(0, 10))
    assert cache.find(list(vectors_of(0, 10))) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_directory_of_somebody_else_is_not_used(directory: Path) -> None:
    """Vectors that another user wrote are not believed."""
    directory.mkdir(parents=True)
    os.chown(directory, 1234, 1234)
    cache = VectorCache(directory, BYTES_MAX)
    cache.keep(vectors_of(0, 10))
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_costs_new_vectors_only(tmp_path: Path) -> None:
    """A full disk raises nothing; what is there is found, and room is used when it comes."""
    with small_disk(tmp_path / "disk", 4 * TRANSACTION_BYTES) as disk:
        cache = VectorCache(disk.path / "vectors", BYTES_MAX)
        cache.keep(vectors_of(0, 100))
        disk.fill()
        cache.keep(vectors_of(100))
        assert assert_right(cache, vectors_of(0, 100)) == 100
        disk.clear()
        cache.keep(vectors_of(100, 500))
        assert assert_right(cache, vectors_of(0, 600)) == 600
        cache.close()


def test_threads_share_a_cache(cache: VectorCache) -> None:
    """One thread may look while another one keeps."""
    cache.keep(vectors_of(0))
    wrong: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(20):
                assert assert_right(cache, vectors_of(0, 300)) == 300
        except BaseException as error:  # noqa: BLE001 # the test looks at it
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for first in range(10_000, 13_000, 500):
        cache.keep(vectors_of(first, 500))
    for thread in threads:
        thread.join()
    assert not wrong
