"""Tests of copies of a corpus of Arrow that have the vectors as one more column."""

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from datasets import Dataset
from pyarrow import feather

import embedfarm
from embedfarm.collector.column_rows import same_rows
from embedfarm.contract.settings import Settings
from embedfarm.readers import CorpusError, arrow
from embedfarm.readers.arrow_form import ArrowForm, form_of_file, form_of_stream
from embedfarm.runs import arrow_copy, dataset_copy
from embedfarm.runs.dataset_copy import copy_with_vectors
from embedfarm.runs.originals import RowVectors
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import null_vectors, run
from tests.full_disk import small_disk
from tests.readers.test_readers import PACK
from tests.runs.test_columns import DIMENSIONS, table_of
from tests.runs.test_dataset_copy import PowerCutError, snapshot

SETTINGS = Settings()
ROWS: Final = 100  # of a file
NO_TEXT = {3, 250, 499}  # rows of the corpus
FAILED = {0, 4, 333}  # chunks
SAYS: Final = {b"number": b"2"}  # one of the record batches, of itself
FORMS: Final = {
    "a.arrow": ArrowForm("lz4"),
    "b.feather": ArrowForm("zstd"),
    "c.arrows": ArrowForm(None, has_deltas=True),
    "d/c.arrows.gz": ArrowForm("zstd"),
    "d/e.arrow": ArrowForm(),  # a stream, whatever its name says
}


def write(path: Path, table: pa.Table) -> None:
    """Write a table as the name of the file asks, in batches of all sizes."""
    form, content = FORMS[f"d/{path.name}" if path.parent.name == "d" else path.name], io.BytesIO()
    if path.suffix == ".feather":
        feather.write_feather(table, str(path), compression="zstd", chunksize=30)
        return
    options = pa.ipc.IpcWriteOptions(compression=form.codec, emit_dictionary_deltas=form.has_deltas)
    is_file = path.name == "a.arrow"
    if is_file:
        new = pa.ipc.new_file(content, table.schema, options=options, metadata={"says": "the file"})
    else:
        new = pa.ipc.new_stream(content, table.schema, options=options)
    kinds = pa.array([f"kind {n % 40}" for n in range(len(table))])
    place = table.schema.get_field_index("kind")
    (whole,) = table.combine_chunks().to_batches()
    with new as writer:
        for number, (first, end) in enumerate(pairwise([0, 10, 10, 47, 48, len(table)])):
            batch = whole.slice(first, end - first)
            if not is_file:  # the dictionary of a stream grows, or is replaced
                some = kinds.slice(first, end - first)
                words = (kinds.slice(0, end) if form.has_deltas else some).unique()
                indices = pc.index_in(some, words)
                kind = pa.DictionaryArray.from_arrays(indices, words)
                batch = batch.set_column(place, table.schema.field("kind"), kind)
            writer.write_batch(batch, SAYS if number == 2 else None)
    path.write_bytes(PACK.get(path.suffix, bytes)(content.getvalue()))


def corpus_of(home: Path) -> list[Path]:
    """Write a corpus of files and streams, which differ in whatever these can differ in."""
    table = table_of(ROWS * len(FORMS))
    texts = [None if n in NO_TEXT else text for n, text in enumerate(table["text"].to_pylist())]
    table = table.set_column(0, "text", pa.array(texts))
    table = table.replace_schema_metadata({"made by": "somebody"})
    paths = [home / "corpus" / name for name in FORMS]
    (home / "corpus" / "d").mkdir(parents=True)
    for number, path in enumerate(paths):
        write(path, table.slice(number * ROWS, ROWS))
    return paths


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directory of a corpus, and an output of it in which some chunks failed."""
    home = tmp_path_factory.mktemp("made")
    paths, out = corpus_of(home), home / "out"
    reading = embedfarm.Reading(on_bad_row="skip")
    model = f"null:{DIMENSIONS}"
    embedfarm.embed(paths, out=out, model=model, reading=reading, progress=False)
    texts = [text for path in paths for text in read(path).table["text"].to_pylist()]
    fail_chunks(out, [text for text in texts if text is not None], FAILED)
    return home / "corpus", out


class Read:
    """All that a file or stream has: its form, its batches, and what it and these say."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = pa.CompressedInputStream(pa.BufferReader(content), "gzip").read()
        self.is_file = content.startswith(b"ARROW1")
        if self.is_file:
            reader = pa.ipc.open_file(content)
            count = reader.num_record_batches
            pairs = [reader.get_batch_with_custom_metadata(n) for n in range(count)]
        else:
            reader = pa.ipc.open_stream(content)
            pairs = list(reader.iter_batches_with_custom_metadata())
        self.stats = reader.stats
        self.form = (form_of_file if self.is_file else form_of_stream)(io.BytesIO(content))
        said = getattr(reader, "metadata", None)
        self.says = [reader.schema.metadata, said, [metadata for _, metadata in pairs]]
        self.batches = [batch for batch, _ in pairs]
        self.table = pa.Table.from_batches(self.batches, reader.schema)


def read(path: Path) -> Read:
    """Read a file or stream."""
    return Read(path)


def test_the_copy_is_the_corpus_with_vectors(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Each file has all that it had, in its own format, and the vector of each row, or null."""
    corpus, out = made
    copy = tmp_path / "copy"
    done = run("export", out, "--out", copy, "--add-column", "embedding", "--json")
    assert done.returncode == 0, done.stderr
    count = ROWS * len(FORMS) - len(NO_TEXT) - len(FAILED)
    assert json.loads(done.stdout) == {
        "out": str(copy), "files": 5, "rows": ROWS * len(FORMS), "vectors": count,
    }  # fmt: skip
    there = sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file())
    assert there == ["_copy.json", *FORMS]
    texts: list[Any] = []
    vectors: list[Any] = []
    for name, form in FORMS.items():
        before, after = read(corpus / name), read(copy / name)
        assert before.form == after.form == form
        assert before.is_file == after.is_file
        assert before.says == after.says
        assert before.stats == after.stats  # numbers of batches, dictionaries, deltas, replacements
        assert [len(each) for each in before.batches] == [len(each) for each in after.batches]
        assert same_rows(after.table.drop_columns(["embedding"]), before.table)
        names = [*before.table.column_names, "embedding"]
        assert after.table.column_names == names
        for field in before.table.schema:
            assert after.table.schema.field(field.name).equals(field, check_metadata=True)
        assert after.table.schema.field("embedding").type == pa.list_(pa.float32(), DIMENSIONS)
        texts += before.table["text"].to_pylist()
        vectors += after.table["embedding"].to_pylist()
    check_vectors(texts, vectors)
    assert read(copy / "a.arrow").says[1:] == [
        {b"says": b"the file"}, [None, None, SAYS, None, None],
    ]  # fmt: skip
    assert read(copy / "c.arrows").stats.num_dictionary_deltas
    assert read(copy / "d/e.arrow").stats.num_replaced_dictionaries


def check_vectors(texts: list[str | None], vectors: list[Any]) -> None:
    """Assert that each row has the vector of its text, and a null where there is none."""
    good = [row for row, text in enumerate(texts) if text is not None]
    without = NO_TEXT | {good[chunk] for chunk in FAILED}
    assert {row for row, vector in enumerate(vectors) if vector is None} == without
    rows = [row for row in range(len(texts)) if row not in without]
    wanted = null_vectors([str(texts[row]) for row in rows], DIMENSIONS)
    assert np.array_equal(np.array([vectors[row] for row in rows], np.float32), wanted)


def test_an_interrupted_copy_goes_on(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a copy dies, the next one goes on behind the files that are whole."""
    _, out = made
    copy_with_vectors(out, tmp_path / "whole", "v", SETTINGS)
    whole, column = snapshot(tmp_path / "whole"), arrow_copy._column
    for cut in (0, 4, 7, 19):
        copy, left = tmp_path / str(cut), iter(range(cut))

        def fail(*words: Any, left: Any = left) -> pa.Array:  # noqa: ANN401
            if next(left, None) is None:
                raise PowerCutError
            return column(*words)

        monkeypatch.setattr(arrow_copy, "_column", fail)
        with pytest.raises(PowerCutError):
            copy_with_vectors(out, copy, "v", SETTINGS)
        monkeypatch.setattr(arrow_copy, "_column", column)
        files = [copy / name for name in FORMS if (copy / name).exists()]
        before = [path.stat().st_mtime_ns for path in files]
        copy_with_vectors(out, copy, "v", SETTINGS)
        assert snapshot(copy) == whole
        assert [path.stat().st_mtime_ns for path in files] == before
        assert len(files) == {0: 0, 4: 0, 7: 1, 19: 4}[cut]


def test_a_full_disk_is_said(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A copy for which there is no room ends with the words of the disk, and goes on with room."""
    copy_with_vectors(made[1], tmp_path / "whole", "v", SETTINGS)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        copy = disk.path / "copy"
        disk.fill()
        for pages in (4, 4, 10):
            disk.free(pages)
            with pytest.raises(OSError, match="No space left on device"):
                copy_with_vectors(made[1], copy, "v", SETTINGS)
            disk.fill()
        assert list(copy.rglob("*.arrow"))
        disk.clear()
        copy_with_vectors(made[1], copy, "v", SETTINGS)
        assert snapshot(copy) == snapshot(tmp_path / "whole")


def test_the_vectors_of_a_large_batch_lie_in_a_file(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows a record batch has, few of their vectors are in memory at a time."""
    taken: list[int] = []
    mapped: list[bool] = []
    take, column = dataset_copy._OutputVectors.take, RowVectors.column

    def look(self: Any, count: int) -> Any:  # noqa: ANN401
        taken.append(count)
        return take(self, count)

    def keep(self: Any, kind: pa.DataType) -> pa.Array:  # noqa: ANN401
        mapped.append(isinstance(self.matrix, np.memmap))
        return column(self, kind)

    monkeypatch.setattr(dataset_copy._OutputVectors, "take", look)
    monkeypatch.setattr(RowVectors, "column", keep)
    monkeypatch.setattr(arrow, "_BATCH_ROWS", 20)
    copy_with_vectors(made[1], tmp_path / "copy", "v", SETTINGS)
    assert max(taken) == 20
    assert mapped
    assert all(mapped)
    assert not (tmp_path / "copy" / ".embedfarm").exists()


def write_by_polars(path: Path) -> None:
    """Write a file by polars, whose layout is its own."""
    kinds = pl.Series(["a", "b"] * 25, dtype=pl.Categorical)
    pl.DataFrame({"text": TEXTS, "kind": kinds}).write_ipc(path, compression="zstd")


def write_by_pandas(path: Path) -> None:
    """Write a file by pandas, which says what its index was."""
    pl.DataFrame({"text": TEXTS}).to_pandas().to_feather(path)


def write_by_datasets(path: Path) -> None:
    """Write a stream by Hugging Face's `datasets`."""
    Dataset.from_dict({"text": TEXTS}).save_to_disk(path.parent / "data")
    (written,) = (path.parent / "data").glob("*.arrow")
    written.rename(path)


TEXTS: Final = [f"text {n}" for n in range(50)]


@pytest.mark.parametrize("write_by", [write_by_polars, write_by_pandas, write_by_datasets])
def test_what_others_write(tmp_path: Path, write_by: Callable[[Path], None]) -> None:
    """Files of other programs are copied, and these read the copy."""
    path, copy = tmp_path / "corpus" / "corpus.arrow", tmp_path / "copy"
    path.parent.mkdir()
    write_by(path)
    before = read(path)
    with embedfarm.embed(path, model="null:8", progress=False) as vectors:
        vectors.copy_corpus(copy)
        matrix = vectors.matrix.copy()
    after = read(copy / "corpus.arrow")
    assert (before.form, before.says, before.is_file) == (after.form, after.says, after.is_file)
    assert same_rows(after.table.drop_columns(["embedding"]), before.table)
    again = (pl.read_ipc if after.is_file else pl.read_ipc_stream)(copy / "corpus.arrow")
    assert again["text"].to_list() == TEXTS
    assert np.array_equal(np.array(again["embedding"].to_list(), np.float32), matrix)


def test_a_stream_of_standard_input_is_gone(tmp_path: Path) -> None:
    """A corpus that came through a pipe cannot be copied, and the error says so."""
    content = io.BytesIO()
    with pa.ipc.new_stream(content, pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([["a", "b"]], names=["text"]))
    words = ("-", "--input-format", "arrow", "--out", tmp_path / "out", "--model", "null:8")
    assert run("embed", *words, stdin=content.getvalue()).returncode == 0
    with pytest.raises(CorpusError, match="cannot be read again to be copied"):
        copy_with_vectors(tmp_path / "out", tmp_path / "copy", "v", SETTINGS)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_damaged_form_is_an_error(is_file: bool) -> None:  # noqa: FBT001
    """Whatever is changed in the metadata of a message or a footer, nothing but an error comes."""
    content, codec = io.BytesIO(), "lz4"
    options = pa.ipc.IpcWriteOptions(compression=codec)
    batch = pa.record_batch([["a", "b"]], names=["text"])
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(content, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    whole, form_of = content.getvalue(), form_of_file if is_file else form_of_stream
    damaged = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0xFF
        try:
            form_of(io.BytesIO(bytes(data)))
        except ValueError as error:
            damaged += "damaged" in str(error)
    assert damaged > 30
