"""Tests of Lance datasets as corpora: one version of them, whatever is written meanwhile."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest

import embedfarm
from embedfarm.readers import (
    CorpusError,
    CorpusOptions,
    Cursor,
    fail_on_bad_row,
    look_at,
    read_corpus,
)
from embedfarm.readers.fields import ColumnQueue
from embedfarm.readers.kept_columns import find_columns
from embedfarm.runs.request import same_version
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import Embedding, manifest, null_vectors, run, texts_of
from tests.runs.test_columns import DIMENSIONS, MODEL, SMALL_PARTS, check, kept

COUNT = 1500
SLOW = ("--model", f"null:{DIMENSIONS}:20000", *MODEL[2:])


def table_of(count: int = COUNT) -> pa.Table:
    """Return a corpus with columns of several types, nulls among them."""
    some = [None if n % 11 == 0 else n for n in range(count)]
    return pa.table(
        {
            "text": list(texts_of(count)),
            "n": pa.array(some, pa.int32()),
            "doc": [n and {"title": f"t{n}", "tags": [str(n)] * (n % 3)} for n in some],
            "point": pa.array([n and [n, n / 2] for n in some], pa.list_(pa.float32(), 2)),
            "made": pa.array([n and n * 10**9 for n in some], pa.timestamp("us", tz="UTC")),
            "raw": pa.array([n and bytes([n % 256]) for n in some], pa.large_binary()),
        }
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Return the path of a dataset of several fragments."""
    path = tmp_path / "corpus.lance"
    lance.write_dataset(table_of(), path, max_rows_per_file=400)
    return path


def test_all_columns_are_kept(tmp_path: Path, dataset: Path) -> None:
    """Rows that are not deleted come in their order, beside all their columns in their types."""
    lance.dataset(dataset).delete("n % 100 = 3 OR n >= 1450")
    table = lance.dataset(dataset).to_table()
    assert 1400 < table.num_rows < COUNT - 50
    out = tmp_path / "out"
    words = ("embed", dataset, "--out", out, "--keep", "all", *MODEL)
    done = run(*words, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    check(out, table)
    assert kept(out).column_names[1:] == table.column_names
    assert manifest(out)["settings"]["sources"] == [f"{dataset}@v2"]
    assert run("verify", out, "--against", dataset).returncode == 0
    assert "finished already" in run(*words).stdout
    planned = run("embed", dataset, "--out", tmp_path / "planned", "--plan", *MODEL)
    assert (planned.returncode, f"{table.num_rows:,} chunks" in planned.stdout) == (0, True)


def test_a_killed_command_goes_on_with_its_version(tmp_path: Path, dataset: Path) -> None:
    """Whatever is written meanwhile, an output is of one version; another one takes what is new."""
    out, table = tmp_path / "out", table_of()
    words = (dataset, "--keep", "n,doc", *SLOW)
    embedding = Embedding(words, out, SMALL_PARTS)
    embedding.wait_for_parts(2)
    embedding.kill()
    lance.write_dataset(table_of(COUNT + 70).slice(COUNT), dataset, mode="append")
    changing = lance.dataset(dataset)
    changing.delete("n < 50")
    changing.optimize.compact_files()
    newest = lance.dataset(dataset)
    done = run("embed", "--out", out, *words, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    assert f"has version {newest.version} now; this output is of version 1" in done.stderr
    check(out, table)
    for source, status in [(dataset, 0), (f"{dataset}/", 0), (f"{dataset}@v3", 1)]:
        assert run("verify", out, "--against", source).returncode == status
    new = tmp_path / "new"
    done = run("embed", "--out", new, *words, "--reuse", out, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    check(new, newest.to_table())
    assert sum(each["chunks"] for each in manifest(new)["workers"].values()) == 70
    fail_chunks(out, table.column("text").to_pylist(), {7, 1400}, table.select(["n", "doc"]))
    assert run("embed", "--out", out, *words, "--retry-failed").returncode == 0
    check(out, table)
    other = run("embed", f"{dataset}@v2", "--out", out, *words[1:])
    assert (other.returncode, "corpus.lance@v1 before" in other.stderr) == (2, True)


def test_sources_with_versions(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that an output has is read in its version; one that names another, in that."""
    monkeypatch.chdir(tmp_path)
    before = ["/other.lance@v9", f"{dataset}@v2", "s3://b/x.lance@v4"]
    for source, same in [
        ("corpus.lance", "corpus.lance@v2"),
        (f"{dataset}/", f"{dataset}@v2"),
        ("corpus.lance@v1", "corpus.lance@v1"),
        ("s3://b/x.lance", "s3://b/x.lance@v4"),
        ("s3://b/y.lance", "s3://b/y.lance"),
        ("/other.lance", "/other.lance"),  # there is none now
        ("corpus.parquet", "corpus.parquet"),
    ]:
        assert same_version(source, before) == same


def test_a_version_that_is_gone(tmp_path: Path, dataset: Path) -> None:
    """A command whose version was cleaned up says so, and embeds nothing of another one."""
    out = tmp_path / "out"
    embedding = Embedding((dataset, *SLOW), out, SMALL_PARTS)
    embedding.wait_for_parts(2)
    embedding.kill()
    lance.write_dataset(table_of(10), dataset, mode="overwrite")
    lance.dataset(dataset).cleanup_old_versions(timedelta(0))
    done = run("embed", dataset, "--out", out, *SLOW)
    assert done.returncode == 2
    assert "no Lance dataset is there, or none of version 1 any more" in done.stderr
    assert ".rs:" not in done.stderr


def test_reading_goes_on_at_any_place(dataset: Path) -> None:
    """Behind any batch the rest can be read on, beside its columns, deleted rows or not."""
    lance.dataset(dataset).delete("n % 7 = 0")
    lance.write_dataset(table_of(4000), dataset, mode="append")
    table = lance.dataset(dataset).to_table(columns=["text", "n"])
    texts, numbers = table.column("text").to_pylist(), table.column("n").to_pylist()
    options, cursor = CorpusOptions(keep=("n",)), Cursor()
    places = [0]
    for rows in read_corpus([str(dataset)], options, fail_on_bad_row, cursor=cursor):
        places.append(places[-1] + len(rows.texts))
        assert (cursor.location, cursor.offset) in {(0, places[-1]), (1, 0)}
    assert places[-1] == table.num_rows
    for place in [*places[:-1], 5, 399, 400, 1201]:
        columns, found = ColumnQueue(), list[str]()
        for rows in read_corpus(
            [str(dataset)], options, fail_on_bad_row, cursor=Cursor(0, place), columns=columns
        ):
            found += rows.texts
        assert found == texts[place:]
        assert pa.Table.from_batches(columns).column("n").to_pylist() == numbers[place:]


def test_what_says_that_a_dataset_has_changed(dataset: Path) -> None:
    """The newest version has other facts after each change; those of a named version stay."""
    first, named = look_at([str(dataset)], CorpusOptions()), f"{dataset}@v1"
    before = look_at([named], CorpusOptions())
    assert first.settled
    lance.dataset(dataset).delete("n = 1")
    assert look_at([str(dataset)], CorpusOptions()).digest != first.digest
    assert look_at([named], CorpusOptions()) == before


def test_texts_of_lancedb(tmp_path: Path) -> None:
    """A table of LanceDB is a dataset, whose fields inside others and numbers are read as such."""
    rows = [{"id": n, "doc": {"body": f"b{n}", "title": f"t{n}"}} for n in range(30)]
    lancedb.connect(tmp_path / "db").create_table("docs", rows)
    out = tmp_path / "out"
    words = ("--text", "{doc.title}: {doc.body}", "--id-field", "id", "--keep", "doc", *MODEL)
    done = run("embed", f"file://{tmp_path}/db/docs.lance/", "--out", out, *words)
    assert done.returncode == 0, done.stderr
    texts = [f"t{n}: b{n}" for n in range(30)]
    matrix = embedfarm.open(out).matrix
    np.testing.assert_array_equal(matrix, null_vectors(texts, DIMENSIONS))
    assert kept(out).column("id").to_pylist() == [str(n) for n in range(30)]
    assert kept(out).column("doc").to_pylist() == [row["doc"] for row in rows]


def test_refused(tmp_path: Path, dataset: Path) -> None:
    """What is no dataset, version or column is told in one sentence with its name."""
    (tmp_path / "none.lance").mkdir()
    cases: list[tuple[object, dict[str, Any], str]] = [
        (tmp_path / "none.lance", {}, "none.lance: no Lance dataset is there: "),
        (f"{dataset}@v9", {}, "no Lance dataset is there, or none of version 9"),
        (tmp_path / "missing.lance", {}, "missing.lance: no such file or directory"),
        (tmp_path / "c*.lance", {}, "a Lance dataset is named by itself, and not by a glob"),
        (dataset, {"text_field": "colour"}, "no single column 'colour'; it has text, n, doc"),
        (dataset, {"text_field": "n"}, "column 'n' is of type int32, which holds no text"),
        (dataset, {"query": "SELECT 1"}, "a query is for a database, which this is not"),
    ]
    for source, options, sentence in cases:
        with pytest.raises(CorpusError, match=sentence):
            list(read_corpus([str(source)], CorpusOptions(**options), fail_on_bad_row))
    with pytest.raises(CorpusError, match="no single column 'colour' to keep"):
        find_columns([str(dataset)], CorpusOptions(keep=("colour",)))


def test_lance_stays_out(tmp_path: Path) -> None:
    """A process that reads another corpus does not import Lance, which takes a second."""
    (tmp_path / "corpus.txt").write_text("a\n")
    code = (
        "import sys\n"
        "import embedfarm.runs.completion\n"
        "from embedfarm.readers import CorpusOptions, fail_on_bad_row, read_corpus\n"
        "rows = list(read_corpus([sys.argv[1]], CorpusOptions(), fail_on_bad_row))\n"
        "print(len(rows), 'lance' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "corpus.txt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "False"]
