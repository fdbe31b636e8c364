"""Tests of `embed --keep`: columns of the corpus stand beside the vectors, as the corpus has them.

All columns are compared bit for bit with those of the source, whatever happened to the command.
"""

import decimal
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embedfarm
from embedfarm.collector.column_rows import same_rows, take_rows
from embedfarm.collector.search import search
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import Embedding, manifest, null_vectors, run, texts_of

DIMENSIONS = 16
MODEL = ("--model", f"null:{DIMENSIONS}", "--devices", "cpu", "--workers", "1")
SMALL_PARTS = {
    "EMBEDFARM_PART_BYTES_MAX": str(100 * 4 * DIMENSIONS),
    "EMBEDFARM_BLOCK_CHUNKS_MAX": "30",
}
COUNT = 1500


def table_of(count: int = COUNT) -> pa.Table:
    """Return a corpus with columns of many types, nulls among them."""
    some = [None if n % 11 == 0 else n for n in range(count)]
    prices = [None if n is None else decimal.Decimal(n) / 100 for n in some]
    authors = [n and {"name": f"a{n}", "books": [{"pages": n, "price": n / 7}]} for n in some]
    small = pa.field("small", pa.int8(), metadata={"unit": "kg"})
    table = pa.table(
        {
            "text": list(texts_of(count)),
            "kind": pa.array([f"kind {n * 7 % 40}" for n in range(count)]).dictionary_encode(),
            "price": pa.array(prices, pa.decimal128(12, 2)),
            "weight": pa.array([float("nan") if n % 7 == 0 else n / 3 for n in range(count)]),
            "made": pa.array([n and n * 10**9 for n in some], pa.timestamp("us", tz="UTC")),
            "tags": [n and [f"t{n % 5}", None][: n % 3] for n in some],
            "author": authors,
            "facts": pa.array([[("a", n)] for n in some], pa.map_(pa.string(), pa.int32())),
            "raw": pa.array([bytes([n % 256]) * (n % 4) for n in range(count)], pa.large_binary()),
            "view": pa.array([n and str(n) for n in some], pa.string_view()),
            "point": pa.array([n and [n, n / 2] for n in some], pa.list_(pa.float32(), 2)),
            "void": pa.nulls(count, pa.int64()),
        }
    )
    return table.append_column(small, pa.array([n and n % 100 for n in some], pa.int8()))


def write(path: Path, table: pa.Table, row_group_size: int = 700) -> Path:
    """Write a corpus into a file."""
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return the path of a corpus of Parquet."""
    return write(tmp_path / "corpus.parquet", table_of())


def kept(out: Path) -> pa.Table:
    """Return all columns of an output but the vectors, in the order of the files."""
    parts = [pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]
    return pa.concat_tables([part.drop_columns(["embedding"]) for part in parts])


def check(out: Path, table: pa.Table, failed: Sequence[int] = ()) -> None:
    """Assert that an output has the vectors and columns of its source but for chunks that failed.

    The corpus is one without bad rows; columns that the output has not are not looked at.
    """
    found, rows = kept(out), np.setdiff1d(np.arange(table.num_rows), failed)
    assert found.column("index").to_pylist() == rows.tolist()
    columns = found.drop_columns(["index"])
    wanted = table.select(columns.column_names)
    assert columns.schema.equals(wanted.schema)
    assert same_rows(columns, take_rows(wanted, rows))
    texts = [text for row, text in enumerate(table.column("text").to_pylist()) if row not in failed]
    matrix = embedfarm.open(out).matrix[rows]
    np.testing.assert_array_equal(matrix, null_vectors(texts, DIMENSIONS))


def test_all_columns_are_kept(tmp_path: Path, corpus: Path) -> None:
    """Every column comes out in its type, row by row, also nested ones, dictionaries and NaN."""
    out = tmp_path / "out"
    words = ("embed", corpus, "--keep", "all", "--out", out, *MODEL)
    done = run(*words, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    check(out, pq.read_table(corpus))
    assert kept(out).column_names[1:] == pq.read_schema(corpus).names
    assert len(manifest(out)["parts"]) > 10
    assert pq.read_schema(out / "part-000000000000.parquet").field("small").metadata[b"unit"]
    assert not (out / ".embedfarm").exists()
    assert run("verify", out, "--against", corpus).returncode == 0
    assert "finished already" in run(*words).stdout
    changed = pq.read_table(corpus).set_column(2, "price", pa.nulls(COUNT, pa.decimal128(12, 2)))
    again = run("embed", write(corpus, changed), *words[2:])
    assert (again.returncode, "texts, ids or columns in rows 0 to" in again.stderr) == (2, True)


def test_columns_are_named(tmp_path: Path, corpus: Path, shared_farm: tuple[str, ...]) -> None:
    """Only the named columns are kept, in the order in which they are named, beside the ids."""
    out = tmp_path / "out"
    words = ("--id-field", "view", "--on-bad-row", "skip", "--keep", "price,tags", "--keep", "kind")
    assert run("embed", corpus, "--out", out, *words, *shared_farm).returncode == 0
    good = np.array([n for n in range(COUNT) if n % 11])  # the id of the others is null
    assert kept(out).column_names == ["index", "id", "price", "tags", "kind"]
    table = pq.read_table(corpus, columns=["price", "tags", "kind"])
    assert same_rows(kept(out).drop_columns(["index", "id"]), take_rows(table, good))
    assert kept(out).column("id").to_pylist() == [str(n) for n in good]
    assert run("verify", out, "--against", corpus).returncode == 0


def test_columns_beside_bad_rows(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A row that becomes no chunk takes its columns with it; the others keep theirs."""
    texts = [None if n % 5 == 2 or 600 < n < 1200 else f"text {n}" for n in range(2000)]
    corpus = write(tmp_path / "corpus.parquet", pa.table({"text": texts, "n": range(2000)}))
    out = tmp_path / "out"
    words = ("--keep", "n", "--on-bad-row", "skip", *shared_farm)
    done = run("embed", corpus, "--out", out, *words, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    good = [n for n, text in enumerate(texts) if text is not None]
    assert kept(out).column("n").to_pylist() == good
    matrix = embedfarm.open(out).matrix
    np.testing.assert_array_equal(matrix, null_vectors([f"text {n}" for n in good], DIMENSIONS))


@pytest.mark.parametrize("seed", range(2))
def test_columns_survive_kills(tmp_path: Path, corpus: Path, seed: int) -> None:
    """A command that is killed at random moments, and run again, keeps all columns as they are."""
    generator, out, table = random.Random(seed), tmp_path / "out", pq.read_table(corpus)
    words = (corpus, "--keep", "all", "--model", f"null:{DIMENSIONS}:30000", *MODEL[2:])
    for _ in range(3):
        embedding = Embedding(words, out, SMALL_PARTS)
        embedding.wait_for_parts(embedding.parts() + generator.randrange(1, 4))
        embedding.kill()
    assert Embedding(words, out, SMALL_PARTS).wait() == 0
    check(out, table)


def with_value(table: pa.Table, name: str, row: int, value: object) -> pa.Table:
    """Return a table with another value in one place."""
    values = table.column(name).to_pylist()
    values[row] = value
    field = table.schema.field(name)
    return table.set_column(table.schema.names.index(name), field, pa.array(values, field.type))


def test_other_columns_than_those_on_disk(tmp_path: Path, corpus: Path) -> None:
    """A run that goes on refuses columns that were changed meanwhile, and others to keep.

    With `--embed-changed` it embeds again from the first change on, be that of a text or a column.
    """
    out, table = tmp_path / "out", pq.read_table(corpus)
    slow = ("--model", f"null:{DIMENSIONS}:20000", *MODEL[2:])
    embedding = Embedding((corpus, "--keep", "weight,made", *slow), out, SMALL_PARTS)
    embedding.wait_for_parts(2)
    embedding.kill()
    words = ("embed", corpus, "--out", out, *slow)
    other = run(*words, "--keep", "weight", environment=SMALL_PARTS)
    assert other.returncode == 2
    assert "keep: weight, made before, weight now" in other.stderr
    second = sorted(int(path.stem.removeprefix("part-")) for path in out.glob("part-*"))[1]
    table = with_value(table, "weight", second, 0.5)
    write(corpus, table)
    changed = run(*words, "--keep", "weight,made", environment=SMALL_PARTS)
    assert (changed.returncode, "has other columns now" in changed.stderr) == (2, True)
    table = with_value(table, "text", 0, "another text")
    write(corpus, table)
    anew = run(*words, "--keep", "weight,made", "--embed-changed", environment=SMALL_PARTS)
    assert anew.returncode == 0, anew.stderr
    check(out, table)


def test_failed_chunks_keep_their_columns(
    tmp_path: Path, corpus: Path, shared_farm: tuple[str, ...]
) -> None:
    """Failed chunks have no row; those that are tried again have their columns, too."""
    out, table = tmp_path / "out", pq.read_table(corpus)
    words = ("embed", corpus, "--out", out, "--keep", "all", *shared_farm)
    assert run(*words).returncode == 0
    failed = {0, 119, 120, 700, 1499}
    fail_chunks(out, table.column("text").to_pylist(), failed, table)
    check(out, table, sorted(failed))
    done = run(*words, "--retry-failed")
    assert done.returncode == 0, done.stderr
    check(out, table)
    assert run("verify", out, "--against", corpus).returncode == 0


def test_columns_of_several_files(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Files with the same columns in another order are one corpus; with others they are refused."""
    table = table_of(600)
    source = tmp_path / "corpus"
    source.mkdir()
    write(source / "a.parquet", table.slice(0, 250))
    write(source / "b.parquet", table.slice(250).select(sorted(table.column_names)))
    out = tmp_path / "out"
    words = ("embed", source, "--keep", "all", *shared_farm)
    assert run(*words, "--out", out).returncode == 0
    check(out, table)
    price = table.column("price").cast(pa.decimal128(20, 4))
    place = table.schema.names.index("price")
    write(source / "b.parquet", table.slice(250).set_column(place, "price", price.slice(250)))
    other = run(*words, "--out", tmp_path / "other")
    assert other.returncode == 2
    assert "'price' of type decimal128(20, 4), which is decimal128(12, 2) in" in other.stderr
    write(source / "b.parquet", table.slice(250).drop_columns(["price"]))
    assert "has no column 'price', which is in" in run(*words, "--out", tmp_path / "other").stderr
    assert not (tmp_path / "other").exists()


def test_dictionaries_that_cannot_be_one(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Dictionaries of files that have room for their own values, and not for all, are kept."""
    small, source, tables = pa.dictionary(pa.int8(), pa.string()), tmp_path / "corpus", []
    source.mkdir()
    for name in "abc":
        kinds = pa.array([f"{name}{n % 90}" for n in range(200)]).dictionary_encode()
        tables.append(pa.table({"text": texts_of(200), "kind": kinds.cast(small)}))
        write(source / f"{name}.parquet", tables[-1])
    out = tmp_path / "out"
    words = ("embed", source, "--keep", "all", "--out", out, *shared_farm)
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert len(manifest(out)["parts"]) == 1
    table = pa.concat_tables(tables)
    check(out, table)
    batches = pa.Table.from_batches(embedfarm.open(out).batches())
    assert same_rows(batches.select(["kind"]), table.select(["kind"]))
    (source / "b.parquet").touch()
    assert "finished already" in run(*words).stdout
    fail_chunks(out, table.column("text").to_pylist(), set(range(0, 600, 2)), table)
    done = run(*words, "--retry-failed")
    assert done.returncode == 0, done.stderr
    check(out, table)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--keep", "text,colour"), "no single column 'colour' to keep"),
        (("--keep", "all", "--format", "npy"), "columns are kept in parquet, and not in npy"),
        (("--keep", "text,id", "--id-field", "text"), "column 'id' cannot be kept"),
        (("--keep", "index"), "column 'index' cannot be kept"),
    ],
)
def test_refused(
    tmp_path: Path, words: Sequence[str], sentence: str, shared_farm: tuple[str, ...]
) -> None:
    """Columns that cannot be kept are refused before anything is read, let alone sent."""
    columns = {name: ["a"] for name in ("body", "text", "id", "index")}
    corpus = write(tmp_path / "corpus.parquet", pa.table(columns))
    field = () if "--id-field" not in words else ("--text-field", "body")
    done = run("embed", corpus, "--out", tmp_path / "out", *words, *field, *shared_farm)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "out").exists()


def write_stream(path: Path, texts: Sequence[str], columns: Sequence[pa.StructArray]) -> Path:
    """Write a corpus of Arrow's stream format, a batch for each of some columns called `c`."""
    rows, start = [], 0
    for column in columns:
        text = pa.array(texts[start : start + len(column)])
        rows.append(pa.record_batch([text, column], ["text", "c"]))
        start += len(column)
    with pa.ipc.new_stream(path, rows[0].schema) as stream:
        for batch in rows:
            stream.write_batch(batch)
    return path


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (pa.timestamp("s"), "has no timestamp[s], and would give back timestamp[ms]"),
        (pa.time32("s"), "has no time32[s], and would give back time32[ms]"),
        (pa.date64(), "has no date64[ms], and would give back date32[day]"),
        (
            pa.dictionary(pa.int8(), pa.float64()),
            "has no dictionary<values=double, indices=int8, ordered=0>, and would give back double",
        ),
        (pa.struct([("x", pa.timestamp("s"))]), "would give back struct<x: timestamp[ms]>"),
        (pa.month_day_nano_interval(), "has no month_day_nano_interval; name the others"),
        (pa.struct([]), "has no struct<>; name the others"),
    ],
    ids=str,
)
def test_types_that_parquet_has_not(
    tmp_path: Path, kind: pa.DataType, sentence: str, shared_farm: tuple[str, ...]
) -> None:
    """A column that would come back in another type is refused before anything is read."""
    column = pa.array([None], kind)
    corpus = write_stream(tmp_path / "corpus.arrow", ["a"], [column])
    words = ("embed", corpus, "--out", tmp_path / "out", *shared_farm)
    done = run(*words, "--keep", "all")
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert "column 'c' cannot be kept" in done.stderr
    assert not (tmp_path / "out").exists()
    assert run(*words, "--keep", "text").returncode == 0


def test_dictionaries_in_columns_survive_kills(tmp_path: Path) -> None:
    """Batches of a stream have dictionaries of their own, also in lists, and a run goes on."""
    out, texts, columns = tmp_path / "out", list(texts_of(COUNT)), []
    for start in range(0, COUNT, 70):
        names = pa.array([f"{n % 7} of {start}" for n in range(start, min(start + 70, COUNT))])
        tags = pa.ListArray.from_arrays(
            pa.array(range(len(names) + 1), pa.int32()), names.dictionary_encode()
        )
        columns.append(pa.StructArray.from_arrays([names.dictionary_encode(), tags], ["s", "l"]))
    corpus = write_stream(tmp_path / "corpus.arrow", texts, columns)
    words = (corpus, "--keep", "c", "--model", f"null:{DIMENSIONS}:20000", *MODEL[2:])
    embedding = Embedding(words, out, SMALL_PARTS)
    embedding.wait_for_parts(2)
    embedding.kill()
    corpus.touch()
    assert Embedding(words, out, SMALL_PARTS).wait() == 0
    check(out, pa.table({"text": texts, "c": pa.chunked_array(columns)}))
    corpus.touch()
    assert "finished already" in run("embed", *words, "--out", out).stdout


def test_columns_of_arrow(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Columns of an Arrow file are kept as those of Parquet are, after a retry, too."""
    table, corpus, out = table_of(500), tmp_path / "corpus.arrow", tmp_path / "out"
    with pa.ipc.new_file(corpus, table.schema) as file:
        file.write_table(table, 77)
    words = ("embed", corpus, "--out", out, "--keep", "all", *shared_farm)
    assert run(*words, environment=SMALL_PARTS).returncode == 0
    check(out, table)
    fail_chunks(out, table.column("text").to_pylist(), {7, 400}, table)
    assert run(*words, "--retry-failed").returncode == 0
    check(out, table)


def test_columns_that_share_memory(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Views and dictionaries of a large record batch make no more parts than strings do.

    A null among the values of a dictionary is as good as one in a row.
    """
    bodies = pa.array([f"{n:0500d}" for n in range(COUNT)])
    codes = pa.array([None if n % 11 == 0 else n % 3 for n in range(COUNT)], pa.int16())
    columns = {"body": bodies, "view": bodies.cast(pa.string_view())}
    columns["user"] = bodies.dictionary_encode()
    columns["kind"] = pa.DictionaryArray.from_arrays(codes, ["a", None, "c"])
    table = pa.table({"text": list(texts_of(COUNT)), **columns})
    corpus, part_bytes = tmp_path / "corpus.arrow", {"EMBEDFARM_PART_BYTES_MAX": str(3 << 20)}
    with pa.ipc.new_file(corpus, table.schema) as file:
        file.write_table(table)
    out, words = tmp_path / "out", ("embed", corpus, "--keep", "all", *shared_farm)
    done = run(*words, "--out", out, environment=part_bytes)
    assert done.returncode == 0, done.stderr
    assert len(manifest(out)["parts"]) == 1
    check(out, table)


def test_a_corpus_without_columns(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """Plain text has no columns that could be kept."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a\n")
    done = run("embed", corpus, "--out", tmp_path / "out", "--keep", "n", *shared_farm)
    sentence = "csv, tsv, parquet, arrow, lance and a database, not txt"
    assert (done.returncode, sentence in done.stderr) == (2, True)


def lines_of(form: str, count: int = COUNT) -> list[str]:
    """Return the lines of a corpus of text, in which each 50th row is none that can be kept."""
    numbers = ["odd" if n % 50 == 7 else n for n in range(count)]
    rows = [
        {"text": text, "n": n, "s": f"s{n}"}
        for text, n in zip(texts_of(count), numbers, strict=True)
    ]
    if form == "jsonl":
        return [json.dumps(row) for row in rows]
    return ["text,n,s", *(",".join(map(str, row.values())) for row in rows)]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_columns_of_text_survive_kills_and_retries(tmp_path: Path, form: str) -> None:
    """Columns of JSON Lines and CSV stand beside their vectors after kills, and after a retry."""
    corpus, out = tmp_path / f"corpus.{form}", tmp_path / "out"
    corpus.write_text("\n".join(lines_of(form)))
    keep = ("--keep", "s,n:int64")
    slow = ("--model", f"null:{DIMENSIONS}:30000", *MODEL[2:])
    words = (corpus, *keep, "--on-bad-row", "skip", *slow)
    for parts in (2, 5):
        embedding = Embedding(words, out, SMALL_PARTS)
        embedding.wait_for_parts(parts)
        embedding.kill()
    assert Embedding(words, out, SMALL_PARTS).wait() == 0
    good = [n for n in range(COUNT) if n % 50 != 7]
    texts = [list(texts_of(COUNT))[n] for n in good]
    table = pa.table({"text": texts, "s": [f"s{n}" for n in good], "n": pa.array(good, pa.int64())})
    check(out, table)
    assert len((out / "_skipped.jsonl").read_text().splitlines()) == COUNT - len(good)
    assert run("verify", out, "--against", corpus).returncode == 0
    fail_chunks(out, texts, {0, 700, 1469}, table.select(["s", "n"]))
    done = run("embed", "--out", out, *words, "--retry-failed")
    assert done.returncode == 0, done.stderr
    check(out, table)


def test_changed_columns_of_text(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """A finished output of JSON Lines is not another corpus's, nor that of other columns."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    lines = lines_of("jsonl", 100)
    corpus.write_text("\n".join(lines))
    words = ("embed", corpus, "--out", out, *shared_farm)
    assert run(*words, "--keep", "all").returncode == 0
    assert kept(out).column_names == ["index", "text", "n", "s"]
    assert kept(out).column("n").to_pylist()[6:9] == ["6", "odd", "8"]
    assert "finished already" in run(*words, "--keep", "all").stdout
    assert "keep: all before, s now" in run(*words, "--keep", "s").stderr
    corpus.write_text("\n".join([*lines[:-1], lines[-1].replace("s99", "s98")]))
    again = run(*words, "--keep", "all")
    assert (again.returncode, "texts, ids or columns in rows 0 to" in again.stderr) == (2, True)


def test_columns_go_along(tmp_path: Path, corpus: Path, shared_farm: tuple[str, ...]) -> None:
    """Exports to Parquet, hits of a search and batches in Python have the columns."""
    out, table = tmp_path / "out", pq.read_table(corpus)
    words = ("--keep", "kind,price,author", *shared_farm)
    assert run("embed", corpus, "--out", out, *words, environment=SMALL_PARTS).returncode == 0
    for name in ("parquet", "npy"):
        assert run("export", out, "--out", tmp_path / name, "--format", name).returncode == 0
        assert run("verify", tmp_path / name, "--against", corpus).returncode == 0
    check(tmp_path / "parquet", table)
    without = ("embed", corpus, "--out", tmp_path / "npy", "--format", "npy", *shared_farm)
    assert "finished already" in run(*without).stdout
    batches = pa.Table.from_batches(embedfarm.open(out).batches())
    assert batches.column_names == ["index", "kind", "price", "author", "embedding"]
    assert same_rows(batches.select(["kind", "author"]), table.select(["kind", "author"]))
    wanted = [7, 1234]
    for row in wanted:
        hit = search(out, embedfarm.open(out).matrix[row], 3)[0]
        assert hit.index == row
        columns = table.select(["kind", "price", "author"]).slice(row, 1)
        assert [dict(hit.columns)] == columns.to_pylist()
    found = run("search", out, "a query", "--json")
    assert set(json.loads(found.stdout)[0]["columns"]) == {"kind", "price", "author"}
    assert "price:" in run("search", out, "a query").stdout


def test_times_beyond_those_of_python(tmp_path: Path) -> None:
    """A hit has times that Python cannot represent in words."""
    corpus, out = tmp_path / "corpus.parquet", tmp_path / "out"
    times = {
        "at": pa.array([1 << 62], pa.timestamp("us")),
        "on": pa.array([2**31 - 1], pa.date32()),
    }
    pq.write_table(pa.table({"text": ["a"], **times}), corpus)
    words = ("embed", corpus, "--out", out, "--keep", "all", "--model", "null:8")
    assert run(*words).returncode == 0
    [hit] = search(out, embedfarm.open(out).matrix[0], 1)
    assert hit.columns["on"] == "<value out of range: 2147483647>"
    assert str(1 << 62) in hit.columns["at"]


def test_vectors_are_reused_beside_other_columns(
    tmp_path: Path, corpus: Path, shared_farm: tuple[str, ...]
) -> None:
    """A command with other columns takes the vectors that are there, and embeds nothing."""
    old, out = tmp_path / "old", tmp_path / "out"
    assert run("embed", corpus, "--out", old, *shared_farm).returncode == 0
    words = ("--keep", "all", "--reuse", old, *shared_farm)
    assert run("embed", corpus, "--out", out, *words, environment=SMALL_PARTS).returncode == 0
    check(out, pq.read_table(corpus))
    assert sum(each["chunks"] for each in manifest(out)["workers"].values()) == 0
