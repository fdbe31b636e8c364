"""Tests of estimates how many chunks a corpus has, while it is read."""

import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedfarm.readers import (
    CorpusOptions,
    CorpusShare,
    Cursor,
    fail_on_bad_row,
    read_corpus,
)

ROWS = 20_000
TEXT = "a text of ten words that is always the same"


def estimates(sources: list[Path], options: CorpusOptions | None = None) -> Iterator[int]:
    """Yield what is estimated after each batch of rows."""
    names, cursor, count = list(map(str, sources)), Cursor(), 0
    share = CorpusShare.of(names, options or CorpusOptions())
    for rows in read_corpus(names, share.options, fail_on_bad_row, cursor=cursor):
        count += len(rows.texts)
        yield share.chunks(count, cursor)


def write(path: Path, rows: int = ROWS) -> Path:
    """Write so many equal rows in the format of a path."""
    if path.suffix == ".parquet":
        table = pa.table({"text": [TEXT] * rows})
        pq.write_table(table, path, compression="none", use_dictionary=False)
    elif path.suffix in {".csv", ".tsv"}:
        path.write_text("text\n" + f"{TEXT}\n" * rows)
    elif path.suffix == ".txt":
        path.write_text(f"{TEXT}\n" * rows)
    else:
        lines = f"{json.dumps({'text': TEXT})}\n" * rows
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.txt", "a.parquet"])
def test_a_file_is_estimated_as_it_is_read(tmp_path: Path, name: str) -> None:
    """Equal rows are counted after a few of them, and after each batch again."""
    found = [each for each in estimates([write(tmp_path / name)]) if each]
    assert len(found) >= 9
    assert found == pytest.approx([ROWS] * len(found), rel=0.01)
    assert found[-1] == ROWS


def test_a_short_beginning_says_nothing(tmp_path: Path) -> None:
    """Nothing is estimated before a two-hundredth of a corpus was read."""
    first, *_ = estimates([write(tmp_path / "a.jsonl", 200 * ROWS)])
    assert first == 0


@pytest.mark.parametrize("name", ["{}.jsonl", "{}.parquet"])
def test_files_count_by_their_bytes(tmp_path: Path, name: str) -> None:
    """A small file before a large one is not taken for half of the corpus."""
    sources = [write(tmp_path / name.format(n), n * ROWS // 10) for n in (1, 9)]
    found = [each for each in estimates(sources) if each]
    assert found == pytest.approx([ROWS] * len(found), rel=0.1)


def test_compressed_files_count_when_they_were_read(tmp_path: Path) -> None:
    """The first of several compressed files is all that is known of the others."""
    sources = [write(tmp_path / f"{n}.jsonl.gz", ROWS // 4) for n in range(4)]
    found = list(estimates(sources))
    assert found[0] == 0
    assert ROWS in found
    assert found[-1] == ROWS


def test_what_cannot_be_measured_is_not_estimated(tmp_path: Path) -> None:
    """Databases, pipes, compressed and damaged files have no share before they were read."""
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as database:
        database.execute("create table t (id integer, text text)")
        database.executemany("insert into t values (?, ?)", [(n, TEXT) for n in range(ROWS)])
    database.close()
    options = CorpusOptions(query="select id, text from t", id_field="id")
    share = CorpusShare.of([f"sqlite:///{path}"], options)
    assert share.chunks(100, Cursor(0, 100)) == 0
    assert CorpusShare.of(["-"], CorpusOptions()).chunks(100, Cursor(0, 100)) == 0
    packed = CorpusShare.of([str(write(tmp_path / "a.jsonl.gz"))], CorpusOptions())
    assert packed.chunks(100, Cursor(0, 100)) == 0
    wide = CorpusShare.of([str(write(tmp_path / "a.jsonl"))], CorpusOptions(encoding="utf-16"))
    assert wide.chunks(100, Cursor(0, 9000)) == 0
    gone = write(tmp_path / "gone.parquet")
    damaged = write(tmp_path / "damaged.parquet")
    share = CorpusShare.of([str(gone), str(damaged)], CorpusOptions())
    gone.unlink()
    damaged.write_bytes(b"PAR1")
    assert share.chunks(100, Cursor(0, 100)) == 0
    assert share.chunks(100, Cursor(1, 100)) == 200
    assert share.chunks(100, Cursor(2, 0)) == 100


def test_documents_count_by_their_number(tmp_path: Path) -> None:
    """A directory of documents is measured by its files."""
    for number in range(40):
        (tmp_path / f"{number:02}.md").write_text(TEXT)
    share = CorpusShare.of([str(tmp_path)], CorpusOptions())
    assert share.chunks(10, Cursor(0, 20)) == 20
