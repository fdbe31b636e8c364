"""Tests of outputs that list where workers have stored their vectors."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.collector.manifest import STATE_DIRECTORY, About, Manifest
from embedfarm.collector.output import Output
from embedfarm.collector.output_reader import OutputReader
from embedfarm.collector.patch import patch
from embedfarm.collector.search import iter_vectors
from embedfarm.collector.sinks import PartError, lists_stored, sink_names, stored_listing
from embedfarm.collector.sinks.stored_listing import Listing, Piece, listed_files, read_listing
from embedfarm.collector.stored_vectors import (
    STORED_FILE,
    StoredVectors,
    VectorsLost,
    known_places,
)
from embedfarm.collector.verify import verify
from embedfarm.contract.records import ChunkError, Receipt, Result, text_checksums
from embedfarm.contract.stored_results import (
    LocalFiles,
    StorageRefused,
    StoredFiles,
    checksum_of,
    make_name,
)
from embedfarm.runs.stored_place import RunStorage, check_stored, discard_stored, end_storing
from tests.collector.places import say_where

COUNT: Final = 48
BLOCK: Final = 4  # chunks of a result
FILE: Final = 3  # results whose vectors are in one file
PART: Final = 16  # chunks of a part
PART_BYTES: Final = 700  # of receipts and ids, more than those of three results
FAILED: Final = (1, 2, 17, 40)
ABOUT: Final = About(job="j", model="m", fingerprint={}, source={})


def rows_of(chunks: Sequence[int]) -> NDArray[np.float32]:
    """Return the vectors of some chunks, shape (n, 3); those of failed chunks are zero."""
    rows = np.array([[index + 1, index % 7, 1] for index in chunks], "<f4").reshape(-1, 3)
    rows[[index in FAILED for index in chunks]] = 0
    return rows


def result_of(start: int, receipt: Receipt | None) -> Result:
    """Return the result of a block, with its vectors or a receipt for them."""
    chunks = range(start, start + BLOCK)
    return Result(
        start=start,
        count=BLOCK,
        dimensions=3,
        dtype="<f4",
        vectors=b"" if receipt else rows_of(chunks).tobytes(),
        checksums=text_checksums([f"text {index}" for index in chunks]),
        ids=[f"id {index}" for index in chunks],
        errors=[ChunkError(index=i, reason="odd") for i in chunks if i in FAILED],
        receipt=receipt,
    )


def store(place: Path, inline: Sequence[int] = ()) -> list[Result]:
    """Store the vectors of all blocks as workers do, a few in a file; return the results.

    Args:
        place: The job's directory.
        inline: Numbers of the blocks that have their vectors themselves.
    """
    starts, results = range(0, COUNT, BLOCK), list[Result]()
    for first in range(0, len(starts), FILE):
        blocks = starts[first : first + FILE]
        name = make_name("1", blocks[0], blocks[-1] + BLOCK)
        rows = rows_of(range(blocks[0], blocks[-1] + BLOCK))
        LocalFiles(place).put(name, rows.data)
        for at, start in enumerate(blocks):
            own = rows[at * BLOCK : (at + 1) * BLOCK]
            receipt = Receipt(
                file=name, offset=at * own.nbytes, bytes=own.nbytes, checksum=checksum_of(own.data)
            )
            results.append(result_of(start, None if first + at in inline else receipt))
    return results


def write(out: Path, results: Sequence[Result]) -> Manifest:
    """Write an output of all results in parts of a few, or what is left to write of it."""
    with Output(out, {}, sink="stored", part_bytes_max=PART_BYTES) as output:
        for result in results:
            output.add(result)
        return output.finish(COUNT, ABOUT)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output directory which knows where its vectors are stored."""
    say_where(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def place(out: Path) -> Path:
    """The directory where its vectors are stored."""
    return say_where(out)


def check(out: Path, failed: Sequence[int] = FAILED) -> None:
    """Assert that an output has the vector and the id of each chunk that did not fail."""
    assert verify(out) == []
    good = [index for index in range(COUNT) if index not in failed]
    found = list(iter_vectors(out))
    assert np.concatenate([each.indices for each in found]).tolist() == good
    assert [name for each in found for name in each.ids or ()] == [f"id {index}" for index in good]
    with OutputReader(out) as reader:
        for index in range(COUNT):
            chunks = reader.read(index, 1)
            assert chunks is not None
            assert (chunks.batch.ids, chunks.end) == ([f"id {index}"], index + 1)
            assert chunks.batch.good.tolist() == [index not in failed]
            assert [each.index for each in chunks.failures] == [index] * (index in failed)


@pytest.mark.parametrize("inline", [(), (0, 3, 4, 11), range(12)], ids=["none", "some", "all"])
def test_what_workers_stored_is_listed(out: Path, place: Path, inline: Sequence[int]) -> None:
    """A part lists what its receipts say, and only vectors that have none are stored for it."""
    results = store(place, inline)
    before = {path.name for path in place.iterdir()}
    manifest = write(out, results)
    check(out)
    matrix = np.concatenate([each.matrix for each in iter_vectors(out)])
    good = [index for index in range(COUNT) if index not in FAILED]
    assert np.array_equal(matrix, rows_of(good))
    own = {path.name for path in place.iterdir()} - before
    assert bool(own) == bool(inline)
    stored = sum((place / name).stat().st_size for name in own)
    assert stored == 12 * sum(c not in FAILED for n in inline for c in range(4 * n, 4 * n + 4))
    listed = listed_files(out, manifest.parts)
    used = {each.receipt.file for each in results if each.receipt}
    assert listed == {str(place): used | own}
    sizes = [part.stored_bytes for part in manifest.parts]
    assert sum(sizes) == stored + 12 * BLOCK * (12 - len(inline))
    assert {path.suffix for path in out.glob("part-*")} == {".json"}


def test_what_the_command_stores_itself_is_whole(
    out: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that loses the end of a file without a word is asked again."""
    put, cut = LocalFiles.put, list[str]()

    def lossy(files: LocalFiles, name: str, data: memoryview) -> None:
        put(files, name, data.cast("B")[: None if cut else -1])
        cut.append(name)

    results = store(place, inline=[0])
    monkeypatch.setattr(LocalFiles, "put", lossy)
    write(out, results)
    assert len(cut) == 2
    check(out)


def test_an_output_goes_on(out: Path, place: Path) -> None:
    """A run that goes on lists what comes then, and knows what the parts before it list."""
    results = store(place)
    with Output(out, {}, sink="stored", part_bytes_max=PART_BYTES) as output:
        for result in results[:7]:
            output.add(result)
        assert output.next_index == PART
        before = set(output.listed or ())
    (out / "part-000000000016.stored.json").write_bytes(b"left by a run that was killed")
    with Output(out, {}, sink="stored", part_bytes_max=PART_BYTES) as output:
        assert output.listed == before == {r.receipt.file for r in results[:4] if r.receipt}
        assert [path.name for path in out.glob("part-*")] == ["part-000000000000.stored.json"]
    write(out, results)
    check(out)


def test_a_retry_stores_its_own_vectors_alone(out: Path, place: Path, tmp_path: Path) -> None:
    """Rows of a worker's file stay where they are; the vectors that were missing come beside."""
    write(out, store(place))
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    again, left = tmp_path / "again", [FAILED[2]]
    with Output(again, {}, sink="parquet", part_bytes_max=1 << 20) as output:
        output.add(
            Result(
                start=0, count=len(FAILED), dimensions=3, dtype="<f4",
                vectors=np.arange(1, 13, dtype="<f4").tobytes(),
                checksums=text_checksums([f"text {index}" for index in FAILED]),
                ids=[f"id {index}" for index in FAILED],
                errors=[ChunkError(index=2, reason="odd still", attempts=2)],
            )
        )  # fmt: skip
        output.finish(len(FAILED), ABOUT)
    manifest = patch(out, again)
    check(out, left)
    matrix = np.concatenate([each.matrix for each in iter_vectors(out)])
    wanted = rows_of(range(COUNT))
    wanted[list(FAILED)] = np.arange(1, 13, dtype="<f4").reshape(4, 3)
    assert np.array_equal(matrix, np.delete(wanted, left, axis=0))
    new = [path for path in place.iterdir() if path.name not in before]
    assert sum(path.stat().st_size for path in new) == 3 * 12
    assert all((place / name).read_bytes() == data for name, data in before.items())
    names = {path.name for path in place.iterdir()}
    assert listed_files(out, manifest.parts) == {str(place): names}


@pytest.mark.parametrize("harm", ["bit", "end", "gone", "place"])
def test_what_is_stored_no_more_is_found(
    out: Path, place: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored file that is damaged or gone is a problem of each part that lists it, by name."""
    write(out, store(place))
    victim = min(place.iterdir(), key=lambda path: int(path.name.split(".")[1].split("-")[0]))
    data = victim.read_bytes()
    if harm == "bit":
        victim.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    elif harm == "end":
        victim.write_bytes(data[:-1])
    elif harm == "gone":
        victim.unlink()
    else:
        monkeypatch.setattr(stored_listing, "open_place", refuse)
    problems = verify(out)
    harmed = {"bit": 1, "end": 1, "gone": 1, "place": 3}[harm]
    assert [each.file for each in problems] == [
        f"part-{start:012d}.stored.json" for start in range(0, 16 * harmed, 16)
    ]
    if harm != "place":
        assert victim.name in problems[0].sentence
    with OutputReader(out) as reader:
        if harm == "bit":  # of chunk 0: what is in other pieces is read all the same
            assert reader.read(4, 12) is not None
        with pytest.raises(PartError):
            reader.read_part(0)


def refuse(place: str) -> StoredFiles:
    """Have no library for any place."""
    raise StorageRefused(f"no library for {place}")


def test_lists_of_others_are_refused(out: Path, place: Path) -> None:
    """A list whose place has secrets, or that names another file, is not followed."""
    manifest = write(out, store(place))
    part = manifest.parts[0]
    listing = read_listing(out, part)
    for wrong in (
        msgspec.structs.replace(listing, place="s3://key:secret@bucket"),
        msgspec.structs.replace(listing, place="../elsewhere"),
        Listing(str(place), [Piece(0, 1, "../secret", 0, 0)], []),
    ):
        (out / part.file).write_bytes(msgspec.json.encode(wrong))
        with pytest.raises(PartError):
            read_listing(out, part)


def test_receipts_are_looked_at_and_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a list will name is seen to be as long as it must be, with one look at each file."""
    results, looks = store(place), list[str]()
    size = LocalFiles.size

    def look(files: LocalFiles, name: str) -> int:
        looks.append(name)
        return size(files, name)

    monkeypatch.setattr(LocalFiles, "size", look)
    monkeypatch.setattr(LocalFiles, "read", None)
    monkeypatch.setattr("embedfarm.collector.stored_vectors.LOOK_SECONDS", 0.001)
    vectors = StoredVectors(LocalFiles(place), threading.Event(), lambda _: None)
    assert [vectors.take(result) for result in results] == results
    assert len(looks) == 12 // FILE
    (place / looks[0]).write_bytes(b"short")
    with pytest.raises(VectorsLost, match="shorter"):
        vectors.take(results[0])
    (place / looks[0]).unlink()
    with pytest.raises(VectorsLost, match="is not there"):
        vectors.take(results[1])
    inline = msgspec.structs.replace(results[0], receipt=None)
    assert vectors.take(inline) is inline


def test_what_is_listed_is_not_swept(place: Path) -> None:
    """Files of the output stay, and those of a generation before that are still in memory."""
    results = store(place)
    late = make_name("1", 0, 12)
    LocalFiles(place).put(late, b"of a worker whose commit came too late")
    vectors = StoredVectors(LocalFiles(place), threading.Event(), lambda _: None)
    for result in results[:6]:
        vectors.take(result)
    names = [each.receipt.file for each in results if each.receipt]
    vectors.sweep(12, lambda: "2", {names[0]})
    left = {path.name for path in place.iterdir()}
    assert left == {names[0], names[3]}, "on the disk, and in memory"
    vectors.sweep(24, lambda: "2", {names[0]})
    assert {path.name for path in place.iterdir()} == {names[0]}, "what was in memory was made anew"


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_leaves_what_is_listed(out: Path, place: Path, *, finished: bool) -> None:
    """Behind the end of a job its place has the files that its output lists, and no others."""
    results = store(place)
    LocalFiles(place).put(make_name("1", 0, 12), b"of a worker whose commit came too late")
    if finished:
        write(out, results)
    else:
        with Output(out, {}, sink="stored", part_bytes_max=PART_BYTES) as output:
            for result in results[:7]:
                output.add(result)
    end_storing(out)
    wanted = {each.receipt.file for each in (results if finished else results[:4]) if each.receipt}
    assert {path.name for path in place.iterdir()} == wanted
    if finished:
        (out / STORED_FILE).unlink()  # as `remove_state` does
        check(out)
    assert discard_stored(out)
    assert not place.exists()


def test_an_output_that_cannot_be_read_loses_nothing(
    out: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it cannot be known what an output lists, nothing is deleted for it."""
    manifest = write(out, store(place))
    (out / manifest.parts[1].file).write_bytes(b"damaged")
    end_storing(out)
    assert len(list(place.iterdir())) == 12 // FILE
    assert "nothing that was stored for it is deleted" in caplog.text


def test_a_place_without_its_library(
    out: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be deleted is said to be there still."""
    write(out, store(place))
    monkeypatch.setattr("embedfarm.runs.stored_place.open_place", refuse)
    assert not discard_stored(out)
    assert len(list(place.iterdir())) == 12 // FILE
    assert discard_stored(out.parent / "nothing"), "there is nothing to delete"


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85", "\x0b"])
def test_a_place_that_names_another_in_a_line_of_its_own(tmp_path: Path, end: str) -> None:
    """Ending a job whose place has a line end in its name deletes nothing anywhere else."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    theirs = victim / make_name("1", 0, 12)
    theirs.touch()
    (out / STATE_DIRECTORY).mkdir(parents=True)
    directory = f"{tmp_path}/x{end}{victim}{end}/y"
    storage = RunStorage(out, directory, "parquet", directory)
    storage.make()
    LocalFiles(Path(directory)).put(make_name("1", 0, 12), b"x")
    assert known_places(out) == [directory]
    end_storing(out)
    assert not Path(directory).exists()
    assert theirs.exists()


def test_a_list_needs_a_place(tmp_path: Path) -> None:
    """A job whose vectors are stored nowhere is refused this format, and no other one."""
    assert [name for name in sink_names() if lists_stored(name)] == ["stored"]
    with pytest.raises(StorageRefused, match="--stored"):
        check_stored("stored", "")
    check_stored("npy", "")
    check_stored("stored", str(tmp_path))
    with Output(tmp_path / "out", {}, sink="stored", part_bytes_max=1) as output:
        with pytest.raises(PartError, match="nobody has said where"):
            output.add(result_of(0, None))
        assert output.directory.joinpath(STATE_DIRECTORY).exists()
