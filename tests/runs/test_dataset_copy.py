"""Tests of copies of a corpus that have the vectors as one more column."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embedfarm
from embedfarm.collector.column_rows import same_rows
from embedfarm.collector.export import export
from embedfarm.collector.manifest import OutputError
from embedfarm.collector.source_check import SourceChanged
from embedfarm.contract.settings import Settings
from embedfarm.readers import CorpusError
from embedfarm.readers.source import find_locations
from embedfarm.runs import dataset_copy, parquet_copy
from embedfarm.runs.dataset_copy import copy_with_vectors
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import null_vectors, run
from tests.runs.test_columns import DIMENSIONS, MODEL, SMALL_PARTS, table_of

SETTINGS = Settings()
COUNT = 1500
NO_TEXT = {3, 700, 1499}  # rows of the corpus
FAILED = {0, 4, 850}  # chunks


def corpus_of(home: Path) -> Path:
    """Write a corpus of two files, which differ in whatever files can differ in."""
    table = table_of(COUNT)
    texts = [None if n in NO_TEXT else text for n, text in enumerate(table["text"].to_pylist())]
    table = table.set_column(0, "text", pa.array(texts))
    table = table.replace_schema_metadata({"made by": "somebody"})
    corpus = home / "corpus"
    (corpus / "a").mkdir(parents=True)
    (corpus / "b").mkdir()
    pq.write_table(
        table.slice(0, 801), corpus / "a" / "x.parquet", row_group_size=300,
        compression={"text": "zstd", "kind": "gzip"}, use_dictionary=["kind"],
        write_statistics=["text"], sorting_columns=[pq.SortingColumn(0)],
    )  # fmt: skip
    pq.write_table(table.slice(801), corpus / "b" / "x.parquet", row_group_size=2000)
    pq.write_table(table.schema.empty_table(), corpus / "c.parquet")
    return corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a corpus, and an output of it in which some chunks failed."""
    home = tmp_path_factory.mktemp("made")
    corpus, out = corpus_of(home), home / "out"
    words = ("embed", corpus, "--out", out, "--on-bad-row", "skip", *MODEL)
    assert run(*words, environment=SMALL_PARTS).returncode == 0
    texts = pq.read_table(corpus / "a" / "x.parquet")["text"].to_pylist()
    texts += pq.read_table(corpus / "b" / "x.parquet")["text"].to_pylist()
    fail_chunks(out, [text for text in texts if text is not None], FAILED)
    return corpus, out


def look_of(path: Path) -> list[Any]:
    """Return what a file says of its rows, groups and columns, but for the vectors."""
    metadata = pq.read_metadata(path)
    said: list[Any] = [metadata.num_rows, (metadata.metadata or {}).get(b"made by")]
    for group in (metadata.row_group(n) for n in range(metadata.num_row_groups)):
        columns = [group.column(n) for n in range(group.num_columns)]
        said += [group.num_rows, group.sorting_columns]
        for each in columns:
            if not each.path_in_schema.startswith("embedding."):
                dictionary = "RLE_DICTIONARY" in each.encodings
                said.append((each.path_in_schema, each.compression, dictionary, each.is_stats_set))
    return said


def test_the_copy_is_the_corpus_with_vectors(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Each file has all that it had, and the vector of each row, null where there is none."""
    corpus, out = made
    copy = tmp_path / "copy"
    done = run("export", out, "--out", copy, "--add-column", "embedding", "--json")
    assert done.returncode == 0, done.stderr
    count = COUNT - len(NO_TEXT) - len(FAILED)
    assert json.loads(done.stdout) == {
        "out": str(copy), "files": 3, "rows": COUNT, "vectors": count,
    }  # fmt: skip
    names = ["_copy.json", "a/x.parquet", "b/x.parquet", "c.parquet"]
    assert sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()) == names
    vectors: list[Any] = []
    texts: list[Any] = []
    for name in names[1:]:
        before, after = pq.read_table(corpus / name), pq.read_table(copy / name)
        assert same_rows(after.drop_columns(["embedding"]), before)
        assert after.column_names == [*before.column_names, "embedding"]
        assert after.schema.field("small").metadata == before.schema.field("small").metadata
        assert look_of(copy / name) == look_of(corpus / name)
        assert after.schema.field("embedding").type == pa.list_(pa.float32(), DIMENSIONS)
        vectors += after.column("embedding").to_pylist()
        texts += before.column("text").to_pylist()
    good = [row for row, text in enumerate(texts) if text is not None]
    without = NO_TEXT | {good[chunk] for chunk in FAILED}
    assert {row for row, vector in enumerate(vectors) if vector is None} == without
    rows = [row for row in range(COUNT) if row not in without]
    wanted = null_vectors([texts[row] for row in rows], DIMENSIONS)
    assert np.array_equal(np.array([vectors[row] for row in rows], np.float32), wanted)
    stored = pq.read_metadata(copy / "a" / "x.parquet").row_group(0)
    assert stored.column(stored.num_columns - 1).compression == "UNCOMPRESSED"


class PowerCutError(Exception):
    """Raised to end the copying."""


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_an_interrupted_copy_goes_on(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a copy dies, the next one goes on behind the files that are whole."""
    _, out = made
    copy_with_vectors(out, tmp_path / "whole", "v", SETTINGS)
    whole = snapshot(tmp_path / "whole")
    write_table, cuts, ended = pq.ParquetWriter.write_table, 0, False
    while not ended:
        copy, left = tmp_path / str(cuts), iter(range(cuts))

        def write(writer: pq.ParquetWriter, *words: Any, left: Any = left, **more: Any) -> None:  # noqa: ANN401
            if next(left, None) is None:
                raise PowerCutError
            write_table(writer, *words, **more)

        with monkeypatch.context() as patch:
            patch.setattr(pq.ParquetWriter, "write_table", write)
            try:
                copy_with_vectors(out, copy, "v", SETTINGS)
                ended = True
            except PowerCutError:
                cuts += 1
                before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.parquet")}
        copy_with_vectors(out, copy, "v", SETTINGS)
        assert snapshot(copy) == whole
        if not ended:
            assert {path: path.stat().st_mtime_ns for path in before} == before
    assert cuts > 3


def test_a_copy_that_is_done_stays(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is made once; of another column or output it is refused."""
    _, out = made
    copy = tmp_path / "copy"
    embedfarm.open(out).copy_corpus(copy, "v")
    first = copy_with_vectors(out, copy, "v", SETTINGS)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", None)
    assert copy_with_vectors(out, copy, "v", SETTINGS) == first
    with pytest.raises(OutputError, match="made of another column"):
        copy_with_vectors(out, copy, "w", SETTINGS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"other holds mine\.txt"):
        copy_with_vectors(out, tmp_path / "other", "v", SETTINGS)


def test_a_copy_is_of_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy neither goes on with another output of the same job, nor is taken for one of it."""
    corpus, out = [tmp_path / name / "x.parquet" for name in ("a", "b")], tmp_path / "out"
    for path in corpus:
        path.parent.mkdir()
        pq.write_table(pa.table({"text": [f"{path} {n}" for n in range(30)]}), path)
    embed = partial(embedfarm.embed, corpus, out=out, job_id="nightly", progress=False)
    embed(model="null:8")
    write = parquet_copy.ParquetOriginal.write

    def cut_off(original: parquet_copy.ParquetOriginal, *words: Any) -> None:  # noqa: ANN401
        if original.location.name == str(corpus[1]):
            raise PowerCutError
        write(original, *words)

    with monkeypatch.context() as patch:
        patch.setattr(parquet_copy.ParquetOriginal, "write", cut_off)
        with pytest.raises(PowerCutError):
            copy_with_vectors(out, tmp_path / "begun", "v", SETTINGS)
    copy_with_vectors(out, tmp_path / "done", "v", SETTINGS)
    shutil.rmtree(out)
    embed(model="null:8", prompt="other: ")
    for copy in ("begun", "done"):
        with pytest.raises(OutputError, match="made of another output"):
            copy_with_vectors(out, tmp_path / copy, "v", SETTINGS)


def test_a_copy_that_has_lost_a_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A copy that was finished, and has lost a file or its end, says so."""
    _, out = made
    copy_with_vectors(out, tmp_path, "v", SETTINGS)
    os.truncate(tmp_path / "b" / "x.parquet", 9)
    with pytest.raises(OutputError, match=r"was finished, but b/x\.parquet has 9 bytes only"):
        copy_with_vectors(out, tmp_path, "v", SETTINGS)
    (tmp_path / "a" / "x.parquet").unlink()
    with pytest.raises(OutputError, match=r"was finished, but a/x\.parquet is gone"):
        copy_with_vectors(out, tmp_path, "v", SETTINGS)


def test_a_corpus_on_several_file_systems(tmp_path: Path) -> None:
    """Files that share no directory, and may have one path, are refused before one is copied."""
    here, elsewhere = tmp_path / "a.parquet", f"memory:/{tmp_path}/a.parquet"
    for place in (here, elsewhere):
        with fsspec.open(place, "wb") as file:
            pq.write_table(pa.table({"text": ["a", "b"]}), file)
    locations = [*find_locations(str(here)), *find_locations(elsewhere)]
    with pytest.raises(CorpusError, match="is on another file system than"):
        dataset_copy._name_files(locations)


def test_a_copy_beside_a_file_of_rows(tmp_path: Path) -> None:
    """A corpus that is a file may have its copy in a directory beside it."""
    corpus, out, copy = tmp_path / "a.parquet", tmp_path / "out", tmp_path / "copy"
    pq.write_table(pa.table({"text": ["a", "b"]}), corpus)
    embedfarm.embed(corpus, out=out, model="null:8", progress=False)
    copy_with_vectors(out, copy, "v", SETTINGS)
    assert pq.read_schema(copy / "a.parquet").names == ["text", "v"]


def test_what_cannot_be_copied(tmp_path: Path) -> None:
    """A corpus that has changed, is none of Parquet, or has the column, is refused."""
    corpus = tmp_path / "corpus" / "a.parquet"
    corpus.parent.mkdir()
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    pq.write_table(table, corpus)
    out, copy = tmp_path / "out", tmp_path / "copy"
    embedfarm.embed(corpus, out=out, model="null:8", progress=False)
    with pytest.raises(CorpusError, match="there is a column 'n' already"):
        copy_with_vectors(out, copy, "n", SETTINGS)
    embedfarm.embed(corpus.parent, out=tmp_path / "all", model="null:8", progress=False)
    for of, place in ((tmp_path / "all", corpus.parent / "copy"), (out, corpus.parent)):
        with pytest.raises(OutputError, match="is in the directory of the corpus"):
            copy_with_vectors(of, place, "v", SETTINGS)
        assert [path.name for path in corpus.parent.iterdir()] == ["a.parquet"]
    globbed = tmp_path / "globbed"
    embedfarm.embed(f"{corpus.parent}/**/*.parquet", out=globbed, model="null:8", progress=False)
    for write in (
        partial(copy_with_vectors, column="v", settings=SETTINGS),
        partial(export, sink="parquet"),
    ):
        with pytest.raises(OutputError, match="would be in its own corpus"):
            write(globbed, corpus.parent / "copy")
        assert [path.name for path in corpus.parent.iterdir()] == ["a.parquet"]
    for texts in (["a", "c"], ["a"]):
        pq.write_table(pa.table({"text": texts}), corpus)
        with pytest.raises(SourceChanged):
            copy_with_vectors(out, tmp_path / str(len(texts)) / texts[-1], "v", SETTINGS)
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), corpus)
    with pytest.raises(OutputError, match="more rows than 2 now"):
        copy_with_vectors(out, tmp_path / "more", "v", SETTINGS)
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"text": "a"}\n')
    embedfarm.embed(lines, out=tmp_path / "lines", model="null:8", progress=False)
    with pytest.raises(CorpusError, match="added to Parquet and Arrow, and not to jsonl"):
        copy_with_vectors(tmp_path / "lines", copy, "v", SETTINGS)
    assert not copy.exists()


def test_memory_holds_a_few_rows(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A row group that is put together lies in a file, which goes with the copy's state."""
    _, out = made
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        take = dataset_copy._OutputVectors.take

        def look(self: Any, count: int) -> Any:  # noqa: ANN401
            seen.append(count)
            return take(self, count)

        patch.setattr(dataset_copy._OutputVectors, "take", look)
        patch.setattr(parquet_copy, "_BATCH_ROWS", 100)
        copy_with_vectors(out, tmp_path / "copy", "v", SETTINGS)
    assert max(seen) == 100
    assert not (tmp_path / "copy" / ".embedfarm").exists()
