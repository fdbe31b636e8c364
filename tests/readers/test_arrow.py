"""Tests of Arrow's own formats as a corpus: files, which are Feather's, and streams."""

import io
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather

from embedfarm.collector.column_rows import same_rows
from embedfarm.readers import (
    BadRow,
    CorpusError,
    CorpusOptions,
    Cursor,
    corpus,
    fail_on_bad_row,
    read_corpus,
)
from embedfarm.readers.kept_columns import find_columns
from tests.readers.test_readers import PACK, TEXTS, read, read_bad

WRITERS: dict[str, Any] = {"arrow": pa.ipc.new_file, "arrows": pa.ipc.new_stream}


def table_of(count: int = len(TEXTS)) -> pa.Table:
    """Return a corpus with ids and other columns."""
    return pa.table(
        {
            "other": [[1.0]] * count,
            "id": range(count),
            "text": [TEXTS[n % len(TEXTS)] for n in range(count)],
            "kind": pa.array([f"kind {n % 3}" for n in range(count)]).dictionary_encode(),
            "doc": [{"title": f"title {n}", "pages": n} for n in range(count)],
        }
    )


def write(path: Path, table: pa.Table, rows: int = 3, compression: str | None = None) -> Path:
    """Write a table in the format that the suffix says, so many rows in a batch."""
    file = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    suffix = path.suffixes[0].removeprefix(".")
    with WRITERS[suffix](file, table.schema, options=options) as writer:
        writer.write_table(table, rows)
    path.write_bytes(PACK.get(path.suffix, bytes)(file.getvalue()))
    return path


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("name", ["c.arrow", "c.arrows", "c.arrows.gz", "c.arrows.zst"])
def test_arrow(tmp_path: Path, name: str, compression: str | None) -> None:
    """Files and streams have the same rows, whether their columns are compressed, or all of it."""
    path = write(tmp_path / name, table_of(), compression=compression)
    wanted = [(text, str(number)) for number, text in enumerate(TEXTS)]
    assert read(path, id_field="id") == wanted
    assert read(path, text_field="doc.title")[5] == ("title 5", None)
    assert read(path, template="{doc.title}: {doc.pages} {kind}")[4][0] == "title 4: 4 kind 1"


@pytest.mark.parametrize("name", ["corpus.feather", "corpus.ipc"])
def test_feather(tmp_path: Path, name: str) -> None:
    """What pandas and polars write as Feather is an Arrow file."""
    feather.write_feather(table_of(), str(tmp_path / name))
    assert [text for text, _ in read(tmp_path / name)] == TEXTS


def test_a_stream_through_a_pipe(tmp_path: Path) -> None:
    """A stream comes on standard input, too."""
    path = write(tmp_path / "corpus.arrows", table_of())
    code = (
        "from embedfarm.readers import *\n"
        "for rows in read_corpus(['-'], CorpusOptions(format='arrow'), print):\n"
        "    print(len(rows.texts), rows.texts[0])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as reading:
        said, _ = reading.communicate(path.read_bytes())
    assert said.decode() == f"{len(TEXTS)} plain\n"


@pytest.mark.parametrize("name", ["corpus.arrow", "corpus.arrows", "corpus.arrows.gz"])
def test_reading_goes_on_at_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A reading that begins behind any row has the rest, and the columns of the rest."""
    monkeypatch.setattr(corpus, "BATCH_ROWS_MAX", 1)
    table = table_of(20)
    path = str(write(tmp_path / name, table))
    options = CorpusOptions(keep=("kind", "doc"))
    schema = find_columns([path], options)
    for rows in range(20):
        cursor, columns = Cursor(), deque[pa.RecordBatch]()
        reading = read_corpus([path], options, fail_on_bad_row, cursor=cursor)
        for _ in range(rows):
            next(reading)
        rest = read_corpus([path], options, fail_on_bad_row, cursor=cursor, columns=columns)
        assert [batch.texts[0] for batch in rest] == table["text"].to_pylist()[rows:]
        kept = pa.Table.from_batches(columns, schema)
        assert same_rows(kept, table.select(["kind", "doc"]).slice(rows))


def test_bad_rows(tmp_path: Path) -> None:
    """A null is a bad row, named by its number over all batches; its columns go with it."""
    table = pa.table({"text": ["a", None, "c", "d", None], "n": range(5)})
    path = write(tmp_path / "corpus.arrow", table, 2)
    good, bad = read_bad(path)
    assert good == ["a", "c", "d"]
    assert bad == [f"corpus.arrow line {line}, field 'text': null" for line in (2, 5)]
    columns = deque[pa.RecordBatch]()
    skipped: list[BadRow] = []
    options = CorpusOptions(keep=("n",))
    assert list(read_corpus([str(path)], options, skipped.append, columns=columns))
    assert pa.Table.from_batches(columns)["n"].to_pylist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Tried reading schema message, was null"),
        (b"FEA1 and so on", "Feather's first version is not read"),
        (b"ARROW1\0\0", "."),
        (b"no Arrow at all, but a text", "."),
    ],
)
def test_what_is_no_arrow(tmp_path: Path, content: bytes, problem: str) -> None:
    """What is not Arrow is refused by its name."""
    path = tmp_path / "corpus.arrow"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=rf"corpus\.arrow: .*{problem}"):
        read(path)


def test_a_file_in_an_archive(tmp_path: Path) -> None:
    """A file is read at its end first, which an archive does not allow."""
    path = write(tmp_path / "corpus.arrow.gz", table_of())
    with pytest.raises(CorpusError, match="neither packed nor from a pipe"):
        read(path)


def test_texts_that_are_not_utf8(tmp_path: Path) -> None:
    """A file whose strings are none is no Arrow."""
    texts = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    path = write(tmp_path / "corpus.arrow", pa.table({"text": texts}))
    with pytest.raises(CorpusError, match=r"corpus\.arrow: .*Invalid UTF8"):
        read(path)


@pytest.mark.parametrize("cut", [1, 100, 300])
@pytest.mark.parametrize("name", ["corpus.arrow", "corpus.arrows"])
def test_truncated(tmp_path: Path, name: str, cut: int) -> None:
    """A file that was cut off is an error that names it; of a stream, if it ends within a batch."""
    path = write(tmp_path / name, table_of(1000), 100)
    path.write_bytes(path.read_bytes()[: -cut - 8])
    with pytest.raises(CorpusError, match=name):
        read(path)
