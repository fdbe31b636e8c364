"""Tests of the output directory: its states, its lock, its journal, and what it refuses."""

import errno
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.collector.journal import Journal, JournalError
from embedfarm.collector.manifest import (
    About,
    ManifestError,
    OutputError,
    Part,
    TilingError,
    WorkerFigures,
    checksum,
    read_manifest,
    tile,
)
from embedfarm.collector.output import Output
from embedfarm.collector.output_directory import OutputBusy, State, read_request, read_state
from embedfarm.collector.output_reader import read_parts
from embedfarm.collector.request_comparison import compare_requests
from embedfarm.collector.source_check import PrefixCheck, SourceChanged
from embedfarm.contract.records import ChunkError, Result, text_checksums

ABOUT = About(job="j", model="m", fingerprint={}, source={}, created=0.0)
REQUEST = {"model": "m", "shape": (1, 2)}
ROOT = Path(__file__).parents[2]


def result(start: int, count: int = 2, **changes: object) -> Result:
    """Return a result of vectors (1, 1)."""
    vectors = np.ones((count, 2), "<f4").tobytes()
    checksums = text_checksums([str(index) for index in range(start, start + count)])
    made = Result(
        start=start, count=count, dimensions=2, dtype="<f4", vectors=vectors, checksums=checksums
    )
    return msgspec.structs.replace(made, **changes)


def open_output(directory: Path, request: dict[str, object] | None = None) -> Output:
    """Open an output whose parts hold four rows."""
    return Output(directory, request or dict(REQUEST), sink="parquet", part_bytes_max=32)


def test_states(tmp_path: Path) -> None:
    """An output is new, then unfinished until its manifest is there, then finished for good."""
    assert read_state(tmp_path / "absent") is State.NEW
    with open_output(tmp_path) as output:
        assert read_state(tmp_path) is State.UNFINISHED
        assert read_request(tmp_path) == {"model": "m", "shape": [1, 2], "format": "parquet"}
        output.add(result(0))
        output.finish(2, ABOUT)
    assert read_state(tmp_path) is State.FINISHED
    assert [path.name for path in (tmp_path / ".embedfarm").iterdir()] == ["lock"]
    with pytest.raises(OutputError, match="is finished"):
        open_output(tmp_path)


def test_parts_close_at_results(tmp_path: Path) -> None:
    """A part closes with the result that fills it; what is not in a part counts as buffered."""
    with open_output(tmp_path) as output:
        assert output.add(result(0, 3)) is None
        assert (output.next_index, output.buffered) == (0, range(3))
        part = output.add(result(3, 3))
        assert part is not None
        assert (part.start, part.count, part.rows) == (0, 6, 6)
        assert (output.next_index, output.buffered) == (6, range(6, 6))
    with open_output(tmp_path) as output:
        assert output.buffered == range(6, 6)
        assert list(output.parts) == [part]


def test_duplicates_change_nothing(tmp_path: Path) -> None:
    """A result that was added already, on the disk or in memory, is ignored."""
    with open_output(tmp_path) as output:
        for start in (0, 0, 2, 0, 2, 4, 4):
            output.add(result(start))
        assert (output.next_index, output.buffered) == (4, range(4, 6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (result(4), "result 4 came where 2 is next"),
        (result(2, dimensions=1), "sizes"),
        (result(2, count=0, vectors=b"", checksums=b""), "sizes"),
        (result(2, checksums=b""), "sizes"),
        (result(2, ids=["only one"]), "sizes"),
        (result(2, errors=[ChunkError(index=4, reason="")]), "sizes"),
        (result(2, dtype="<f8"), "<f8"),
        (result(2, dtype="<f2", dimensions=4), "float16.*float32"),
        (result(2, ids=["a", "b"]), "ids=True.*ids=False"),
    ],
)
def test_wrong_results(tmp_path: Path, wrong: Result, message: str) -> None:
    """A result that leaves a gap, contradicts itself or the others is refused, and not kept."""
    with open_output(tmp_path) as output:
        output.add(result(0))
        with pytest.raises(OutputError, match=message):
            output.add(wrong)
        assert output.buffered == range(2)


def test_finish_refuses_holes(tmp_path: Path) -> None:
    """An output that lacks chunks cannot be finished, and work on it can go on."""
    with open_output(tmp_path) as output:
        output.add(result(0))
        for count in (1, 3):
            with pytest.raises(TilingError, match=f"2 of {count} chunks"):
                output.finish(count, ABOUT)
        assert (read_state(tmp_path), output.next_index) == (State.UNFINISHED, 0)
        output.add(result(2, 1))
        assert output.finish(3, ABOUT).count == 3


@pytest.mark.parametrize("sink", ["parquet", "npy", "jsonl"])
def test_empty_job(tmp_path: Path, sink: str) -> None:
    """A corpus without chunks has an output without parts."""
    with Output(tmp_path, {}, sink=sink, part_bytes_max=1) as output:
        output.finish(0, ABOUT)
    assert read_manifest(tmp_path).parts == []


def test_second_process(tmp_path: Path) -> None:
    """Two processes cannot write to an output; the lock of one that was killed is free."""
    code = (
        "import sys; from embedfarm.collector.output import *; from pathlib import Path\n"
        "output = Output(Path(sys.argv[1]), {}, sink='npy', part_bytes_max=1)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(OutputBusy, match="another process"):
            Output(tmp_path, {}, sink="npy", part_bytes_max=1)
        other.kill()
    Output(tmp_path, {}, sink="npy", part_bytes_max=1).close()


def test_what_differs_is_said_in_words(tmp_path: Path) -> None:
    """The names and values of a refusal are those of people, not those of the record."""
    stored = {"read_id_field": None, "skip_bad_rows": False, "sources": ["/a"], "prompt": ""}
    asked = {"read_id_field": "id", "skip_bad_rows": True, "sources": ["/a", "/b"], "prompt": "q:"}
    with pytest.raises(OutputError) as raised:
        compare_requests(tmp_path, stored, asked | {"read_encoding": "cp1252"})
    assert str(raised.value).partition("of its own: ")[2] == (
        "prompt: none before, q: now; encoding: the default before, cp1252 now;"
        " id field: none before, id now; skip bad rows: no before, yes now;"
        " sources: /a before, /a, /b now"
    )


def test_other_request(tmp_path: Path) -> None:
    """A request that differs is refused by name of what differs; an equal one goes on."""
    open_output(tmp_path).close()
    open_output(tmp_path).close()
    with pytest.raises(OutputError, match=r"model: m before, n now$"):
        open_output(tmp_path, {**REQUEST, "model": "n"})
    with pytest.raises(OutputError, match=r"format: parquet before, npy now$"):
        Output(tmp_path, dict(REQUEST), sink="npy", part_bytes_max=32)
    open_output(tmp_path).close()


def test_foreign_files(tmp_path: Path) -> None:
    """A new output does not overwrite vectors that are there; other files do not disturb it."""
    (tmp_path / "notes.txt").touch()
    open_output(tmp_path / "beside").close()
    (tmp_path / "embeddings.npy").touch()
    with pytest.raises(OutputError, match=r"embeddings\.npy of another output"):
        open_output(tmp_path)


def test_failures_and_figures_survive(tmp_path: Path) -> None:
    """The error list and the workers' figures cover the runs before a resume too."""
    for start, worker in ((0, "a"), (4, "b"), (8, "a")):
        with open_output(tmp_path) as output:
            errors = [
                ChunkError(index=start + 3, reason="late", attempts=3),
                ChunkError(index=start + 1, reason="odd"),
            ]
            ids = [f"id {index}" for index in range(start, start + 4)]
            output.add(
                result(start, 4, errors=errors, ids=ids, worker=worker, token_count=10, seconds=0.5)
            )
    with open_output(tmp_path) as output:
        manifest = output.finish(12, ABOUT)
    assert read_manifest(tmp_path) == manifest
    assert (manifest.failed, manifest.tokens) == (6, 30)
    assert manifest.workers == {"a": WorkerFigures(8, 20, 1.0), "b": WorkerFigures(4, 10, 0.5)}
    lines = (tmp_path / "_errors.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["index"] for line in lines] == [1, 3, 5, 7, 9, 11]
    assert lines[:2] == [
        b'{"index":1,"id":"id 1","reason":"odd","attempts":1}',
        b'{"index":3,"id":"id 3","reason":"late","attempts":3}',
    ]


def test_torn_journal(tmp_path: Path) -> None:
    """A torn last line of the journal is dropped, and the lines before it count."""
    with open_output(tmp_path) as output:
        for start in (0, 4):
            output.add(result(start, 4))
    path = tmp_path / ".embedfarm" / "parts.jsonl"
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for size in (first, first + 1, len(content) - 2):
        path.write_bytes(content[:size])
        with open_output(tmp_path) as output:
            assert output.next_index == 4
        assert path.read_bytes() == content[:first]
    path.write_bytes(content[:first] + b"\0" * 99 + b"\n")
    with open_output(tmp_path) as output:
        output.add(result(4, 4))
    assert path.read_bytes() == content


def test_a_line_has_its_end_once_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads a part whose line is not synced; a resume gives a whole line its end."""
    path = tmp_path / ".embedfarm" / "parts.jsonl"

    def refuse(file: BinaryIO) -> None:
        file.flush()
        assert not read_parts(tmp_path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched, open_output(tmp_path) as output:
        patched.setattr("embedfarm.collector.journal.sync", refuse)
        with pytest.raises(OSError, match="Input/output"):
            output.add(result(0, 4))
        assert path.read_bytes()
        assert not read_parts(tmp_path)
    with open_output(tmp_path) as output:
        assert output.next_index == 4
    assert [part.end for part in read_parts(tmp_path)] == [4]
    assert path.read_bytes().count(b"\n") == 1


def test_a_line_whose_end_is_zero(tmp_path: Path) -> None:
    """A loss of power that leaves a zero for the end of a line takes no part that was durable."""
    with open_output(tmp_path) as output:
        output.add(result(0, 4))
    path = tmp_path / ".embedfarm" / "parts.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.removesuffix(b"\n") + b"\0")
    with open_output(tmp_path) as output:
        assert output.next_index == 4
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"{}\n", b"\n", b"\xff\n"])
def test_damaged_journal(tmp_path: Path, damage: bytes) -> None:
    """A journal that is damaged before its last line is refused by number of the line."""
    with open_output(tmp_path) as output:
        output.add(result(0, 4))
    path = tmp_path / ".embedfarm" / "parts.jsonl"
    line = path.read_bytes()
    for content, number in ((damage + line, 1), (line + line, 2)):
        path.write_bytes(content)
        with pytest.raises(JournalError, match=f"line {number} does not continue"):
            Journal(path)


def parts_of(bounds: list[tuple[int, int]]) -> list[Part]:
    """Return parts with those starts and ends."""
    return [
        Part(
            file=f"part {start}",
            bytes=1,
            sha256="",
            start=start,
            count=end - start,
            rows=end - start,
            errors=0,
            tokens=0,
            texts_sha256="",
        )
        for start, end in bounds
    ]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 4), (6, 9)], "chunks 4 to 5 are in no part"),
        ([(1, 9)], "chunks 0 to 0 are in no part"),
        ([(0, 8)], "chunks 8 to 8 are in no part"),
        ([], "chunks 0 to 8 are in no part"),
        ([(0, 4), (3, 9)], "chunks 3 to 3 are in more than one part"),
        ([(0, 4), (4, 10)], "go on to chunk 9, but there are only 9"),
    ],
)
def test_tiling(bounds: list[tuple[int, int]], message: str) -> None:
    """The first chunks that are missing, double or too many are named."""
    with pytest.raises(TilingError, match=message):
        tile(parts_of(bounds), 9)


@given(st.lists(st.integers(1, 9)))
def test_tiling_holds(counts: list[int]) -> None:
    """Parts of any size, one after the other, tile their chunks."""
    ends = np.cumsum([0, *counts]).tolist()
    tile(parts_of(list(pairwise(ends))), ends[-1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "is damaged"),
        (b"\xff", "is damaged"),
        (b"{}", "missing required field"),
    ],
)
def test_damaged_manifest(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A manifest that cannot be read is a clear error with its path."""
    if content is not None:
        (tmp_path / "_manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match=rf"manifest\.json.*{message}"):
        read_manifest(tmp_path)


def test_other_manifest(tmp_path: Path) -> None:
    """A manifest of another version is refused by name."""
    with open_output(tmp_path) as output:
        output.finish(0, ABOUT)
    path = tmp_path / "_manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(ManifestError, match="version 2; this program reads 1"):
        read_manifest(tmp_path)


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Whatever it says otherwise is found by its own checksum, and another layout is none of it."""
    with open_output(tmp_path) as output:
        output.add(result(0))
        finished = output.finish(2, ABOUT)
    path = tmp_path / "_manifest.json"
    data = path.read_bytes()
    facts = json.loads(data)
    assert facts["manifest_sha256"] == checksum(facts) == finished.manifest_sha256
    path.write_text(json.dumps(facts, indent=7, sort_keys=True))
    assert read_manifest(tmp_path) == finished
    for name, value in (("model", "another"), ("created", 1.5), ("unheard_of", 1)):
        path.write_text(json.dumps(facts | {name: value}))
        with pytest.raises(ManifestError, match=r"_manifest\.json is damaged.* its own checksum"):
            read_manifest(tmp_path)
    digits = data.index(b'"texts_sha256": "') + len(b'"texts_sha256": "')
    path.write_bytes(data[:digits] + bytes([data[digits] ^ 1]) + data[digits + 1 :])
    with pytest.raises(ManifestError, match="its own checksum"):
        read_manifest(tmp_path)


def test_a_manifest_without_a_checksum_is_read(tmp_path: Path) -> None:
    """A manifest of an earlier version says nothing of itself, and is read as it is."""
    with open_output(tmp_path) as output:
        output.finish(0, ABOUT)
    path = tmp_path / "_manifest.json"
    later = {"manifest_sha256", "canaries", "sample"}
    facts = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in later}
    path.write_text(json.dumps(facts))
    manifest = read_manifest(tmp_path)
    assert (manifest.manifest_sha256, manifest.canaries, manifest.sample) == ("", None, None)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Part]:
    """Return parts of chunks 0 to 3, 4 to 7 and 8 to 9, with texts "0" to "9"."""
    with open_output(tmp_path_factory.mktemp("parts")) as output:
        for start in range(0, 10, 2):
            output.add(result(start))
        return output.finish(10, ABOUT).parts


def feed(check: PrefixCheck, texts: list[str], cuts: list[int]) -> None:
    """Feed texts in batches."""
    for first, last in pairwise([0, *sorted(cuts), len(texts)]):
        check.feed(text_checksums(texts[first:last]))


@given(cuts=st.lists(st.integers(0, 12)), more=st.integers(0, 2))
def test_same_source(parts: list[Part], cuts: list[int], more: int) -> None:
    """A source that begins with the same texts passes, in batches of any size, grown or not."""
    texts = [str(index) for index in range(10 + more)]
    check, other = PrefixCheck(parts), PrefixCheck([])
    feed(check, texts, [min(cut, len(texts)) for cut in cuts])
    feed(other, texts, [])
    assert check.finish() == other.finish()


@given(cuts=st.lists(st.integers(0, 10)), edited=st.integers(0, 9))
def test_changed_source(parts: list[Part], cuts: list[int], edited: int) -> None:
    """An edited text is found, and the rows of its part are named."""
    texts = [str(index) for index in range(10)]
    texts[edited] = "edited"
    first = edited // 4 * 4
    with pytest.raises(SourceChanged, match=f"rows {first} to {min(first + 3, 9)} "):
        feed(PrefixCheck(parts), texts, cuts)


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_shorter_source(parts: list[Part], count: int) -> None:
    """A source that ends before the parts do is found."""
    check = PrefixCheck(parts)
    feed(check, [str(index) for index in range(count)], [])
    with pytest.raises(SourceChanged, match="the source ends at row"):
        check.finish()
