"""Tests of `embed --reuse --by-reference`: parts that stay the same are links to the same files."""

import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import embedfarm
from embedfarm.collector.export import export
from embedfarm.collector.linked_parts import LinkedParts
from embedfarm.collector.manifest import OutputError, read_manifest
from embedfarm.collector.output import Output
from embedfarm.collector.text_digests import text_digests
from embedfarm.contract.records import Result, text_checksums
from tests.farm.harness import Embedding, manifest, null_vectors, run, texts_of, write_corpus
from tests.runs.test_columns import DIMENSIONS, MODEL, SMALL_PARTS
from tests.runs.test_columns import write as write_table

TEXTS = list(texts_of(1000))
IDS = [f"id {n}" for n in range(1000)]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, shared_farm: tuple[str, ...]) -> Path:
    """A finished output of a thousand texts, in parts of a hundred or a few more."""
    home = tmp_path_factory.mktemp("old")
    corpus = write_corpus(home / "corpus.jsonl", TEXTS, IDS)
    words = ("embed", corpus, "--id-field", "id", "--out", home / "old", *shared_farm)
    assert run(*words, environment=SMALL_PARTS).returncode == 0
    return home / "old"


def shared(out: Path, old: Path) -> set[str]:
    """Return the files of parts that two outputs share; the manifest names just these."""
    inodes = {path.stat().st_ino for path in old.glob("part-*")}
    files = {path.name for path in out.glob("part-*") if path.stat().st_ino in inodes}
    said = {part["file"] for part in manifest(out)["parts"] if part.get("linked") == str(old)}
    assert said == files
    return files


def same_parts(old: Path, rows: Sequence[int]) -> set[str]:
    """Return the files of the parts that have none of these rows."""
    parts = read_manifest(old).parts
    return {p.file for p in parts if not any(p.start <= row < p.end for row in rows)}


def check(out: Path, corpus: Path, texts: Sequence[str]) -> None:
    """Assert that an output has the vectors of these texts, and that its files are as written."""
    np.testing.assert_array_equal(embedfarm.open(out).matrix, null_vectors(texts, DIMENSIONS))
    assert run("verify", out, "--against", corpus).returncode == 0


def test_parts_that_are_the_same_are_links(
    old: Path, tmp_path: Path, shared_farm: tuple[str, ...]
) -> None:
    """Each part without a change is the old file; the others are new, and all of it is whole."""
    texts, changed = list(TEXTS), [3, 555, 556, 998]
    for row in changed:
        texts[row] = f"new {row}"
    before = shutil.copytree(old, tmp_path / "before")
    corpus, out = write_corpus(tmp_path / "corpus.jsonl", texts, IDS), tmp_path / "out"
    words = ("embed", corpus, "--id-field", "id", *shared_farm, "--out", out, "--reuse", before)
    done = run(*words, "--by-reference", environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    same = same_parts(before, changed)
    assert len(same) >= 4
    assert shared(out, before) == same
    check(out, corpus, texts)
    for path in before.glob("part-*"):  # as whoever removes an output does
        path.unlink()
    check(out, corpus, texts)
    assert "finished already" in run(*words, "--by-reference").stdout


def test_rows_that_are_not_the_same(
    old: Path, tmp_path: Path, shared_farm: tuple[str, ...]
) -> None:
    """Rows that have moved, have other ids, or other columns beside them are written anew."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    parts = read_manifest(old).parts
    ids = [f"{each} now" if n == parts[1].start else each for n, each in enumerate(IDS)]
    write_corpus(corpus, TEXTS, ids)
    words = ("embed", corpus, "--id-field", "id", *shared_farm, "--reuse", old, "--by-reference")
    assert run(*words, "--out", out, environment=SMALL_PARTS).returncode == 0
    assert shared(out, old) == same_parts(old, [parts[1].start])
    write_corpus(corpus, ["first", *TEXTS], ["first", *IDS])
    assert run(*words, "--out", tmp_path / "moved", environment=SMALL_PARTS).returncode == 0
    assert not shared(tmp_path / "moved", old)
    check(tmp_path / "moved", corpus, ["first", *TEXTS])


def test_columns_are_the_same_too(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A part with columns beside the vectors is taken where these are the same, bit for bit."""
    rows = {"text": TEXTS, "n": range(1000), "x": [float("nan")] * 1000}
    corpus = write_table(tmp_path / "corpus.parquet", pa.table(rows))
    words = ("embed", corpus, "--keep", "n,x", *shared_farm, "--out")
    old, out = tmp_path / "old", tmp_path / "out"
    assert run(*words, old, environment=SMALL_PARTS).returncode == 0
    numbers = list(range(1000))
    numbers[500] = -1
    write_table(corpus, pa.table(rows | {"n": numbers}))
    more = ("--reuse", old, "--by-reference")
    assert run(*words, out, *more, environment=SMALL_PARTS).returncode == 0
    assert shared(out, old) == same_parts(old, [500])
    check(out, corpus, TEXTS)
    without = tmp_path / "without"
    bare = ("embed", corpus, *shared_farm, "--out", without)
    assert run(*bare, *more, environment=SMALL_PARTS).returncode == 0
    assert not shared(without, old)


@pytest.mark.parametrize("seed", range(2))
def test_links_survive_kills(tmp_path: Path, seed: int) -> None:
    """A command that is killed, and goes on with links or without them, makes the same vectors."""
    texts, generator = list(TEXTS), random.Random(seed)
    texts[450:520:7] = [f"new {n}" for n in range(10)]
    texts += [f"more {n}" for n in range(500)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts, [*IDS, *map(str, range(500))])
    out, slow = tmp_path / "out", ("--model", f"null:{DIMENSIONS}:4000", *MODEL[2:])
    base = tmp_path / "base"
    first = ("embed", write_corpus(tmp_path / "base.jsonl", TEXTS, IDS), "--id-field", "id", *slow)
    assert run(*first, "--out", base, environment=SMALL_PARTS).returncode == 0
    words = (corpus, "--id-field", "id", *slow, "--reuse", base)
    for _ in range(2):
        embedding = Embedding((*words, "--by-reference"), out, SMALL_PARTS)
        embedding.wait_for_parts(embedding.parts() + generator.randrange(1, 4))
        embedding.kill()
    assert Embedding(words, out, SMALL_PARTS).wait() == 0
    check(out, corpus, texts)
    assert shared(out, base)


def fill(out: Path, linked: LinkedParts, sink: str = "parquet") -> list[str]:
    """Make an output of the texts with the parts of another one; return what it has linked."""
    with Output(out, {}, sink=sink, part_bytes_max=10_000, linked=linked) as output:
        for start, end in zip([0, *linked.ends], linked.ends, strict=False):
            texts = TEXTS[start:end]
            vectors = null_vectors(texts, DIMENSIONS).tobytes()
            result = Result(
                start=start, count=end - start, dimensions=DIMENSIONS, dtype="<f4", vectors=vectors,
                checksums=text_checksums(texts), ids=IDS[start:end],
            )  # fmt: skip
            output.add(result, text_digests(texts))
        return [part.linked for part in output.parts]


def test_parts_of_json_lines(old: Path, tmp_path: Path) -> None:
    """Parts of JSON Lines are taken as those of Parquet are, also of an export."""
    export(old, tmp_path / "old", "jsonl")
    linked = LinkedParts(tmp_path / "old", read_manifest(tmp_path / "old"), "jsonl")
    assert set(fill(tmp_path / "out", linked, "jsonl")) == {str(tmp_path / "old")}


def test_a_disk_without_links(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a file cannot have a name, as on another disk, the part is written, and it is said."""
    linked = LinkedParts(old, read_manifest(old), "parquet")
    assert set(fill(tmp_path / "linked", linked)) == {str(old)}

    def refuse(_name: Path, _path: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert set(fill(tmp_path / "copied", linked)) == {""}
    assert [each.getMessage().count("are copied, not linked") for each in caplog.records] == [1]


def test_what_is_refused(old: Path, tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A damaged part is not taken; formats with one file, and no output to reuse, are refused."""
    damaged = shutil.copytree(old, tmp_path / "damaged")
    path = next(iter(sorted(damaged.glob("part-*"))))
    path.write_bytes(path.read_bytes().replace(b"id 7", b"id 8"))
    linked = LinkedParts(damaged, read_manifest(damaged), "parquet")
    with pytest.raises(OutputError, match="has other bytes than were written"):
        fill(tmp_path / "filled", linked)
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    words = ("embed", corpus, *shared_farm, "--out", tmp_path / "out", "--by-reference")
    alone = run(*words)
    assert (alone.returncode, "that --reuse names" in alone.stderr) == (2, True)
    other = run(*words, "--reuse", old, "--format", "npy")
    assert (other.returncode, "both have to be parquet or both jsonl" in other.stderr) == (2, True)
