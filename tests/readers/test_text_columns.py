"""Tests of columns kept of JSON and CSV: strings, or what is declared, row by row."""

import gzip
import io
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from embedfarm.readers import (
    BadRow,
    CorpusError,
    CorpusOptions,
    Cursor,
    fail_on_bad_row,
    read_corpus,
)
from embedfarm.readers.fields import ColumnQueue
from embedfarm.readers.kept_columns import find_columns

BIG = 1 << 63


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    """Write a file, and return its path."""
    path.write_bytes(text.encode(encoding))
    return str(path)


def read(
    sources: Sequence[str],
    keep: Sequence[str],
    **options: Any,  # noqa: ANN401 -- as they are
) -> tuple[list[dict[str, Any]], list[BadRow]]:
    """Return the kept columns of all good rows, with their texts, and the bad rows."""
    chosen = CorpusOptions(keep=tuple(keep), **options)
    columns, bad_rows, texts = ColumnQueue(), list[BadRow](), list[str]()
    for rows in read_corpus(sources, chosen, bad_rows.append, columns=columns):
        texts += rows.texts
        assert sum(batch.num_rows for batch in columns) >= len(texts)
    table = pa.Table.from_batches(columns)
    table.validate(full=True)
    assert table.schema == find_columns(sources, chosen)
    found: list[dict[str, Any]] = table.to_pylist()
    assert [row.get("text", text) for row, text in zip(found, texts, strict=True)] == texts
    return found, bad_rows


def test_fields_of_json_are_strings(tmp_path: Path) -> None:
    """Text stays as it is, other values are their JSON as it stands there, and none is null."""
    rows = [
        '{"text": "a", "x": "t\\u00efn\\n", "y": {"z":  [1, null]}}',
        '{"text": "b", "x": 1.50, "y": null}',
        "",
        '{"text": "c", "x": true}',
    ]
    corpus = write(tmp_path / "corpus.jsonl", "\n".join(rows))
    found, _ = read([corpus], ["x", "y"])
    assert found == [
        {"x": "tïn\n", "y": '{"z":  [1, null]}'},
        {"x": "1.50", "y": None},
        {"x": "true", "y": None},
    ]
    array = write(tmp_path / "corpus.json", f"[{', '.join(filter(None, rows))}]")
    assert read([array], ["x", "y"])[0] == found
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(rows))
    assert read([str(tmp_path / "packed.jsonl.gz")], ["y", "x"])[0] == found


def test_cells_of_csv_are_strings(tmp_path: Path) -> None:
    """A cell of CSV stays as it is, whatever its encoding, and an empty one is an empty string."""
    text = 'id;text;dc:title\n007;"a;\nb";Größe\n8;c;\n'
    corpus = write(tmp_path / "corpus.csv", text, "cp1252")
    found, _ = read([corpus], ["all"], encoding="cp1252")
    assert found == [
        {"id": "007", "text": "a;\nb", "dc:title": "Größe"},
        {"id": "8", "text": "c", "dc:title": ""},
    ]
    assert read([corpus], ["dc:title", "id:int64"], encoding="cp1252")[0][0]["id"] == 7


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_declared_types(tmp_path: Path, form: str) -> None:
    """A declared column has its type; a value that is none of it makes its row a bad one."""
    good: list[tuple[Any, Any, Any]] = [
        (-BIG, -0.5, True), (BIG - 1, 1e300, False), (None, None, None), (0, 3, True),
    ]  # fmt: skip
    wrong: list[tuple[Any, Any, Any]] = [
        (BIG, 1.0, True), (-BIG - 1, 1.0, True), (1.5, 1.0, True), ("x", 1.0, True),
        (1, "1_0", True), (1, "", "no"), (1, 1.0, 1),
    ]  # fmt: skip
    rows = [*good, *wrong, *good]
    if form == "jsonl":
        lines = [json.dumps({"text": "t", "n": n, "f": f, "b": b}) for n, f, b in rows]
    else:
        cells = [["t", *("" if cell is None else str(cell) for cell in row)] for row in rows]
        lines = ["text,n,f,b", *map(",".join, cells)]
    corpus = write(tmp_path / f"corpus.{form}", "\n".join(lines))
    found, bad_rows = read([corpus], ["n:int64", "f:float64", "b:bool"])
    assert [tuple(row.values()) for row in found] == good * 2
    first = 5 + (form == "csv")
    assert [bad.line for bad in bad_rows] == list(range(first, first + len(wrong)))
    assert [bad.field for bad in bad_rows] == ["n"] * 4 + [
        "f",
        "f" if form == "jsonl" else "b",
        "b",
    ]
    assert len({bad.reason for bad in bad_rows}) >= 4
    options = CorpusOptions(keep=("n:int64",))
    with pytest.raises(CorpusError, match=rf"corpus\.{form} line {first}, field 'n': "):
        list(read_corpus([corpus], options, fail_on_bad_row))  # also where nobody wants columns


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_reading_goes_on_at_any_place(tmp_path: Path, form: str) -> None:
    """Behind any batch the rest can be read on: the same texts, beside their own columns."""
    count = 9000
    rows = [{"text": f"t{n}" + "x" * (n % 700), "n": n} for n in range(count)]
    if form == "csv":
        text = "text,n\n" + "".join(
            f"{row['text']},{'x' if n % 50 == 7 else n}\n" for n, row in enumerate(rows)
        )
    else:
        lines = [
            json.dumps(row | ({"n": "x"} if n % 50 == 7 else {})) for n, row in enumerate(rows)
        ]
        text = "\n".join(lines) if form == "jsonl" else f"[{','.join(lines)}]"
    corpus = write(tmp_path / f"corpus.{form}", text)
    options, cursor, columns = CorpusOptions(keep=("n:int64",)), Cursor(), ColumnQueue()
    places, seen = [Cursor()], [0]
    for batch in read_corpus([corpus], options, lambda _: None, cursor=cursor, columns=columns):
        places.append(Cursor(cursor.location, cursor.offset, cursor.line))
        seen.append(seen[-1] + len(batch.texts))
    numbers = pa.Table.from_batches(columns).column("n").to_pylist()
    assert numbers == [n for n in range(count) if n % 50 != 7]
    assert len(places) > 4
    for place, before in zip(places, seen, strict=True):
        rest = ColumnQueue()
        texts = [
            text
            for batch in read_corpus([corpus], options, lambda _: None, cursor=place, columns=rest)
            for text in batch.texts
        ]
        there = [number for batch in rest for number in batch.column("n").to_pylist()]
        assert there == numbers[before:]
        assert texts == [str(rows[n]["text"]) for n in there]


def test_all_fields_of_several_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All fields are those of the first rows of all files; one that comes later is told of once."""
    late = ['{"text": "t"}'] * 10_000 + ['{"text": "t", "late": 1}'] * 2
    write(tmp_path / "a.jsonl", "\n".join(late))
    write(tmp_path / "b.jsonl", '{"b": 1, "text": "u"}\nnone\n[]\n')
    found, bad_rows = read([str(tmp_path)], ["all"])
    assert (found[0], found[-1]) == ({"text": "t", "b": None}, {"text": "u", "b": "1"})
    assert len(bad_rows) == 2
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "a.jsonl line 10001: none of the first rows has the field 'late'" in warnings[0]
    with pytest.raises(
        CorpusError, match="none of the first rows has a field 'late' to keep; they"
    ):
        read([str(tmp_path)], ["late"])
    assert read([str(tmp_path)], ["late:string"])[0][10_001] == {"late": "1"}


def test_files_without_the_columns(tmp_path: Path) -> None:
    """Columns that are not there, there twice, or of two types are refused before any row."""
    first = write(tmp_path / "a.csv", "text,x\na,1\n")
    other = write(tmp_path / "b.csv", "text,y,y\na,1,2\n")
    for keep, sentence in [
        (("z",), "a.csv: no single column 'z'; it has text, x"),
        (("all",), "no single column"),
        (("x", "x:int64"), "column 'x' cannot be kept as string and as int64 at once"),
    ]:
        with pytest.raises(CorpusError, match=sentence):
            find_columns([first, other], CorpusOptions(keep=keep))
    with pytest.raises(CorpusError, match="no single column 'x'; it has text, y, y"):
        find_columns([first, other], CorpusOptions(keep=("x",)))


def test_columns_of_standard_input() -> None:
    """Nobody can look into a pipe: its columns are declared, and those of Arrow are not kept."""
    data = b'{"text": "a", "x": 1}\n{"text": "b"}\n'
    options = CorpusOptions(keep=("x:int64",))
    assert find_columns(["-"], options) == pa.schema([("x", pa.int64())])
    columns = ColumnQueue()
    list(read_corpus(["-"], options, fail_on_bad_row, io.BytesIO(data), columns=columns))
    assert pa.Table.from_batches(columns).column("x").to_pylist() == [1, None]
    for keep, form in [("x", "jsonl"), ("all", "jsonl"), ("x", "csv"), ("x", "arrow")]:
        with pytest.raises(CorpusError, match=r"<stdin>: .*(beforehand|twice)"):
            find_columns(["-"], CorpusOptions(keep=(keep,), format=form))


def test_damaged_values(tmp_path: Path) -> None:
    """A kept value that is not UTF-8 makes its row a bad one, and costs no other row."""
    path = tmp_path / "corpus.jsonl"
    lines = [b'{"text": "a", "x": "ok"}', b'{"text": "b", "x": "\xff"}', b'{"text": "c", "x": 1}']
    path.write_bytes(b"\n".join(lines))
    found, bad_rows = read([str(path)], ["x"])
    assert [row["x"] for row in found] == ["ok", "1"]
    assert [(bad.line, bad.field, bad.reason) for bad in bad_rows] == [(2, "x", "not UTF-8")]
    path = tmp_path / "corpus.csv"
    path.write_bytes(b"text,x\na,ok\nb,\xff\n")
    found, bad_rows = read([str(path)], ["x"])
    assert [(bad.line, bad.field, bad.reason) for bad in bad_rows] == [(3, "x", "not UTF-8")]


def test_pandas_stays_out(tmp_path: Path) -> None:
    """Reading columns of text does not import pandas, which takes a quarter of a second."""
    corpus = write(tmp_path / "corpus.jsonl", '{"text": "a", "n": 1, "b": true, "s": null}\n')
    code = (
        "import sys\n"
        "from collections import deque\n"
        "from embedfarm.readers import CorpusOptions, fail_on_bad_row, read_corpus\n"
        "options = CorpusOptions(keep=('n:int64', 'b:bool', 's'))\n"
        "rows = read_corpus([sys.argv[1]], options, fail_on_bad_row, columns=(held := deque()))\n"
        "print(len(list(rows)), len(held), 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, corpus], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", "False"]
