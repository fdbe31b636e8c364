"""Tests of the readers, on real files of every format, good and bad."""

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from embedfarm.contract.records import Rows
from embedfarm.readers import (
    BadRow,
    CorpusError,
    CorpusOptions,
    Cursor,
    corpus,
    directory,
    fail_on_bad_row,
    look_at,
    read_corpus,
    source,
)
from embedfarm.readers.fields import ColumnQueue

TEXTS = [
    "plain",
    "",
    'a, "quoted"\tthing',
    "two\nlines\r\nand a third",
    "e\u0301 combining, 👩‍🔬 emoji, 中文, \u2028 separator",
    "nul \0 inside",
    "plain",
    "long " * 20_000,
]
ENCODABLE = st.text(alphabet=st.characters(exclude_categories=["Cs"]))

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": partial(gzip.compress, compresslevel=1),
    ".zst": zstandard.compress,
}

Pairs = list[tuple[str, str | None]]


def pairs(batches: Iterable[Rows]) -> Pairs:
    """Texts with their ids, of all batches."""
    rows: Pairs = []
    for texts, ids, *_ in batches:
        rows += zip(texts, repeat(None) if ids is None else ids, strict=ids is not None)
    return rows


def read(path: Path | str, **options: Any) -> Pairs:  # noqa: ANN401 - passed on as they are
    """The rows of one source that has no bad row."""
    return pairs(read_corpus([str(path)], CorpusOptions(**options), fail_on_bad_row))


def read_bad(path: Path | str, **options: Any) -> tuple[list[str], list[str]]:  # noqa: ANN401 - same
    """The good texts of a source, and its bad rows as people read them, less the folder."""
    bad: list[BadRow] = []
    batches = read_corpus([str(path)], CorpusOptions(**options), bad.append)
    texts = [text for batch in batches for text in batch.texts]
    return texts, [str(row).removeprefix(f"{Path(path).parent}/") for row in bad]


def write(path: Path, content: bytes | str) -> Path:
    """Write a file of that content, compressed as its suffix says."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK.get(path.suffix, bytes)(content))
    return path


def json_lines(texts: Iterable[str]) -> str:
    """JSON Lines with ids that count from 0."""
    rows = ({"id": str(index), "text": text} for index, text in enumerate(texts))
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def delimited(texts: Iterable[str], delimiter: str) -> str:
    """A table with ids that count from 0."""
    file = io.StringIO(newline="")
    table = csv.writer(file, delimiter=delimiter)
    table.writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue()


CONTENTS: dict[str, Callable[[Iterable[str]], str]] = {
    "jsonl": json_lines,
    "csv": lambda texts: delimited(texts, ","),
    "tsv": lambda texts: delimited(texts, "\t"),
}
COMPRESSIONS = ["", ".gz", ".zst"]


# Every format


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", CONTENTS)
def test_round_trip(tmp_path: Path, name: str, compression: str) -> None:
    """Any Unicode text, of any length, comes out as it went in, with its id, in order."""
    path = write(tmp_path / f"corpus.{name}{compression}", CONTENTS[name](TEXTS))
    assert read(path, id_field="id") == [(text, str(n)) for n, text in enumerate(TEXTS)]
    assert read(path) == [(text, None) for text in TEXTS]


@pytest.mark.parametrize("name", CONTENTS)
@given(texts=st.lists(ENCODABLE))
def test_any_text(name: str, texts: list[str]) -> None:
    """Any Unicode text that can be written can be read."""
    stdin = io.BytesIO(CONTENTS[name](texts).encode())
    batches = read_corpus(["-"], CorpusOptions(format=name), fail_on_bad_row, stdin)
    assert pairs(batches) == [(text, None) for text in texts]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.jsonl", '{"text": "a"}\r\n\r\n{"text": "b"}'),
        ("corpus.NDJSON", '{"text": "a"}\n  \n{"text": "b"}\n\n'),
        ("corpus.csv", 'text\r\na\r\n\r\n"b"'),
        ("corpus.tsv", "id\ttext\n1\ta\n2\tb\n"),
        ("corpus.txt", "a\r\nb"),
        ("corpus.txt", "a\nb\n"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends(tmp_path: Path, name: str, content: str, compression: str, mark: str) -> None:
    """A byte order mark, CRLF, blank lines and a missing last line end change no text."""
    path = write(tmp_path / f"{name}{compression}", mark + content)
    assert read(path) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "name", ["corpus.jsonl", "corpus.txt", "corpus.jsonl.gz", "corpus.txt.zst"]
)
@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_empty_file(tmp_path: Path, name: str, content: str) -> None:
    """An empty file has no rows and is no error."""
    assert read(write(tmp_path / name, content)) == []


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_truncated_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, kept: float
) -> None:
    """A truncated archive is an error that names it, after the batches before the damage."""
    monkeypatch.setattr(corpus, "BATCH_ROWS_MAX", 100)
    lines = json_lines(os.urandom(500).hex() for _ in range(3_000))
    path = write(tmp_path / f"corpus.jsonl{compression}", lines)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    batches = read_corpus([str(path)], CorpusOptions(), lambda _: None)
    assert next(batches).texts
    with pytest.raises(CorpusError, match=rf"corpus\.jsonl{compression}: Truncated"):
        list(batches)


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_not_an_archive(tmp_path: Path, compression: str) -> None:
    """A suffix that promises compression where there is none is an error that names the file."""
    path = tmp_path / f"corpus.jsonl{compression}"
    path.write_text(json_lines(["a"]))
    with pytest.raises(CorpusError, match=r"corpus\.jsonl\..*decompress|corpus\.jsonl\..*inflate"):
        read(path)


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_archive_of_several_parts(tmp_path: Path, compression: str) -> None:
    """Archives put one behind the other are read to the end."""
    path = write(tmp_path / f"corpus.txt{compression}", "a\n")
    path.write_bytes(path.read_bytes() * 3)
    assert read(path) == [("a", None)] * 3


def test_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that would fill the memory is refused by number."""
    monkeypatch.setattr(source, "LINE_BYTES_MAX", 1 << 20)
    path = write(tmp_path / "corpus.txt", "a\n" + "b" * (1 << 20) + "\n")
    with pytest.raises(CorpusError, match=r"corpus\.txt line 2: longer than 1 MiB"):
        read(path)


def test_batches_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends at its number of rows or of characters, whichever is reached first."""
    monkeypatch.setattr(corpus, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS_MAX", 10)
    path = write(tmp_path / "corpus.txt", "\n".join(["a", "b", "c", "d", "e" * 9, "f", "g" * 11]))
    batches = read_corpus([str(path)], CorpusOptions(), fail_on_bad_row)
    assert [len(batch.texts) for batch in batches] == [3, 2, 2]


# JSON Lines

NO_FIELDS = "missing; the row has no fields"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a"', "not JSON: Input data was truncated"),
        (b'{"text": "\0"}', "not JSON: JSON is malformed: invalid character (byte 10)"),
        (b'["a"]', "an object is expected, not array"),
        (b'"text"', "an object is expected, not string"),
        (b'{"id": 5}', "field 'text': missing; there are 'id', and --text-field says which it is"),
        (b'{"id": 5, "text": null}', "field 'text': string expected, not null"),
        (b'{"id": 5, "text": 5}', "field 'text': string expected, not number"),
        (b'{"id": 5, "text": ["a"]}', "field 'text': string expected, not array"),
        (b'{"text": "a"}', "field 'id': missing; there are 'text', and --id-field says"),
        (b'{"text": "a", "id": null}', "field 'id': string or number expected, not null"),
        (b'{"text": "a", "id": true}', "field 'id': string or number expected, not boolean"),
        (b'{"text": "a\xff", "id": 5}', "not UTF-8: invalid start byte"),
        (b'{"text": "\\ud800", "id": 5}', "surrogate"),
        (b'{"text": "\xed\xa0\x80", "id": 5}', "not UTF-8"),
        (b'{"text": "a", "id": "\\udc00"}', "surrogate"),
        (b'{"text": 5, "text": "a", "id": 5}', "Expected `str`, got `int`"),
        (b'{"text": "a", "id": 5, "x": ' + b"[" * 100_000, "not JSON: maximum recursion depth"),
        (b'{"text": "a", "id": 1e999}', "Number out of range"),
    ],
)
def test_bad_json_row(tmp_path: Path, line: bytes, problem: str) -> None:
    """A bad line is named with file, line, field and reason; the lines around it are read."""
    good = b'{"text": "a", "id": 1}\n\n'
    path = write(tmp_path / "corpus.jsonl", good + line + b"\n" + good)
    texts, [bad] = read_bad(path, id_field="id")
    assert texts == ["a", "a"]
    assert bad.startswith("corpus.jsonl line 3")
    assert problem in bad


def test_first_bad_row_fails(tmp_path: Path) -> None:
    """The error for a bad row says where and what, and carries the row."""
    path = write(tmp_path / "corpus.jsonl", '{"text": "a"}\n' * 6 + "{}\n")
    with pytest.raises(CorpusError) as caught:
        read(path)
    assert str(caught.value) == f"{path} line 7, field 'text': {NO_FIELDS}"
    assert caught.value.bad_row == BadRow(str(path), 7, "text", NO_FIELDS)


def test_json_ids(tmp_path: Path) -> None:
    """JSON strings and numbers become ids as they are written, however large."""
    rows = ['"a"', '""', "7", "-1", "1.5", "123456789012345678901234567890"]
    lines = "".join(f'{{"key": {row}, "body": "t", "text": 5}}\n' for row in rows)
    path = write(tmp_path / "corpus.jsonl", lines)
    ids = [identifier for _, identifier in read(path, text_field="body", id_field="key")]
    assert ids == ["a", "", "7", "-1", "1.5", "123456789012345678901234567890"]


def test_json_field_that_cannot_be_named(tmp_path: Path) -> None:
    """A field name the decoder refuses is an error, not a traceback."""
    with pytest.raises(CorpusError, match=r"corpus\.jsonl: "):
        read(write(tmp_path / "corpus.jsonl", "{}"), text_field='a"b')


# CSV and TSV


def test_bad_delimited_rows(tmp_path: Path) -> None:
    """Each bad row is named with the physical line it begins on; the rest is read."""
    content = (
        b'id,text\n1,"two\nlines"\n2\n3,a,b\n\n4,\xff\n\xff,b\n'
        b'5,"x"y\n6,"c\n\n",\n7,good\n8,"open\n'
    )
    texts, bad = read_bad(write(tmp_path / "corpus.csv", content), id_field="id")
    assert texts == ["two\nlines", "good"]
    assert bad == [
        "corpus.csv line 4: 1 columns, where the header has 2",
        "corpus.csv line 5: 3 columns, where the header has 2",
        "corpus.csv line 7, field 'text': not UTF-8",
        "corpus.csv line 8, field 'id': not UTF-8",
        "corpus.csv line 9: no row: ',' expected after '\"'",
        "corpus.csv line 10: 3 columns, where the header has 2",
        "corpus.csv line 14: no row: unexpected end of data",
    ]


STRAY = {
    "never closed": ('2,"Hello\n3,good\n', [(5, "unexpected end of data")]),
    "closed by another": (
        '2,"Hello\n\n3,good\n4,"Bye\n5,"go\nod"\n6,"Hi" x\n7,"x" y\n',
        [(number, "',' expected after '\"'") for number in (5, 8, 11, 12)],
    ),
    "beyond the limit": (
        '2,"Hello\n' + "3,good\n" * 200,
        [(5, "field larger than field limit (1000)")],
    ),
}


@pytest.mark.parametrize("keep", [(), ("id:int64",)])
@pytest.mark.parametrize(("lines", "problems"), STRAY.values(), ids=STRAY)
def test_a_stray_quote(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    problems: list[tuple[int, str]],
    keep: tuple[str, ...],
) -> None:
    """A quote that nothing closes costs its own line; those behind it are rows, from each place on.

    So no row is lost that is neither read nor named.
    """
    monkeypatch.setattr("embedfarm.readers.delimited.LINE_BYTES_MAX", 1000)
    monkeypatch.setattr("embedfarm.readers.corpus.BATCH_ROWS_MAX", 1)
    content = f'id,text\r\n0,"one\nrow"\r\n1,é\n{lines}8,last\n9,end'
    path = write(tmp_path / "corpus.csv", b"\xef\xbb\xbf" + content.encode())
    bad: list[BadRow] = []

    def read_on(cursor: Cursor) -> list[tuple[str, Cursor]]:
        options, columns = CorpusOptions(keep=keep), ColumnQueue() if keep else None
        rows = read_corpus([str(path)], options, bad.append, cursor=cursor, columns=columns)
        return [(each.texts[0], replace(cursor)) for each in rows]

    found = read_on(Cursor())
    good = [text.replace("\n", "") for text, _ in found[2:-2]]
    assert good == ["good"] * (lines.count("good") + lines.count("go\nod"))
    assert [text for text, _ in found[:2] + found[-2:]] == ["one\nrow", "é", "last", "end"]
    assert [str(row) for row in bad] == [f"{path} line {n}: no row: {why}" for n, why in problems]
    for rows, (_, place) in enumerate(found, 1):
        assert read_on(place) == found[rows:]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_other_delimiters(tmp_path: Path, suffix: str, delimiter: str) -> None:
    """A header that has the fields by another delimiter only says which one is meant."""
    content = delimited(["one; two", "a,b", 'say "x"\nend'], delimiter)
    path = write(tmp_path / f"corpus.{suffix}", "\n" + content)
    assert read(path, id_field="id") == [
        ("one; two", "0"),
        ("a,b", "1"),
        ('say "x"\nend', "2"),
    ]


def test_the_usual_delimiter_comes_first(tmp_path: Path) -> None:
    """Where the fields are there by the usual delimiter, another one is part of a text."""
    path = write(tmp_path / "corpus.csv", "text,id;text\na;b,1\n")
    assert read(path) == [("a;b", None)]


def test_bytes_of_another_encoding(tmp_path: Path) -> None:
    """A reader that stops at a row that is not UTF-8 says what makes it so."""
    path = write(tmp_path / "corpus.csv", "text\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"line 2, field 'text': not UTF-8; .* --encoding cp1252"):
        read(path)


SPOKEN = ["café", 'naïve, or "not"', "10 €"]
SPOKEN_FILES = {
    "jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in SPOKEN),
    "json": json.dumps([{"text": text} for text in SPOKEN], ensure_ascii=False),
    "csv": delimited(SPOKEN, ","),
    "tsv": delimited(SPOKEN, "\t"),
    "txt": "".join(f"{text}\n" for text in SPOKEN),
}


@pytest.mark.parametrize(
    "encoding", ["utf-16", "UTF-16LE", "utf-8-sig", "cp1252", "gb18030", "utf7"]
)
@pytest.mark.parametrize("suffix", [*SPOKEN_FILES, "csv.gz"])
def test_another_encoding(tmp_path: Path, suffix: str, encoding: str) -> None:
    """A file of another encoding has the same rows, as a whole and from each place on."""
    data = SPOKEN_FILES[suffix.removesuffix(".gz")].encode(encoding)
    path = write(tmp_path / f"corpus.{suffix}", data)
    assert [text for text, _ in read(path, encoding=encoding)] == SPOKEN
    options = CorpusOptions(encoding=encoding)
    for rows in range(1, len(SPOKEN)):
        cursor = Cursor()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("embedfarm.readers.corpus.BATCH_ROWS_MAX", rows)
            next(read_corpus([str(path)], options, fail_on_bad_row, cursor=cursor))
        [rest] = read_corpus([str(path)], options, fail_on_bad_row, cursor=cursor)
        assert rest.texts == SPOKEN[rows:]


def test_bytes_that_the_encoding_lacks(tmp_path: Path) -> None:
    """A row with bytes that stand for nothing is bad, and the others are read."""
    path = write(tmp_path / "corpus.txt", b"\x80 is a euro\n\x81 is nothing\nend\n")
    bad: list[BadRow] = []
    [rows] = read_corpus([str(path)], CorpusOptions(encoding="cp1252"), bad.append)
    assert rows.texts == ["€ is a euro", "end"]
    assert [str(each) for each in bad] == [
        f"{path} line 2: not cp1252: invalid start byte",
    ]


@pytest.mark.parametrize("suffix", SPOKEN_FILES)
def test_bytes_that_the_encoding_lacks_and_utf_8_has(tmp_path: Path, suffix: str) -> None:
    """A row whose bytes stand for nothing is bad though they would be a letter in UTF-8."""
    rows = {
        "jsonl": b'{"text": "\xc1"}\n{"text": "\xd2\xae"}\n',
        "json": b'[{"text": "\xc1"}, {"text": "\xd2\xae"}]',
        "txt": b"\xc1\n\xd2\xae\n",
    }
    path = write(tmp_path / f"corpus.{suffix}", rows.get(suffix, b"text\n\xc1\n\xd2\xae\n"))
    texts, [bad] = read_bad(path, encoding="iso8859-7")
    assert texts == ["\N{GREEK CAPITAL LETTER ALPHA}"]
    assert "not iso8859-7" in bad


def test_documents_of_another_encoding(tmp_path: Path, tokenizer_file: str) -> None:
    """The documents of a directory have the encoding, and one that has not is a bad row."""
    folder = tmp_path / "notes"
    folder.mkdir()
    write(folder / "a.md", "café".encode("utf-16"))
    write(folder / "b.md", b"odd")
    bad: list[BadRow] = []
    options = CorpusOptions(tokenizer_file=tokenizer_file, encoding="utf-16")
    [rows] = read_corpus([str(folder)], options, bad.append)
    assert rows.texts == ["café"]
    assert [each.reason[:28] for each in bad] == ["not a readable utf-16 text: "]


@pytest.mark.parametrize("name", ["", "nonsense", "base64", "rot13", "idna", "undefined", "a\0b"])
def test_what_is_no_encoding(name: str) -> None:
    """What Python does not know, or is none of files, is refused by its name."""
    with pytest.raises(CorpusError, match="unknown encoding"):
        CorpusOptions(encoding=name)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no header row, the file is empty"),
        ("id,body\n", "no single column 'text'; it has id, body"),
        ("text,text\n", "no single column 'text'; it has text, text"),
        ('"text\n', "line 1: no header row: unexpected end of data"),
    ],
)
def test_bad_header(tmp_path: Path, content: str, problem: str) -> None:
    """A table without the column is refused by the names it has."""
    with pytest.raises(CorpusError, match=rf"corpus\.csv:? {problem}"):
        read(write(tmp_path / "corpus.csv", content))


# Parquet


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("id_kind", [pa.int64(), pa.uint8(), pa.string()], ids=str)
def test_parquet(tmp_path: Path, kind: pa.DataType, id_kind: pa.DataType) -> None:
    """Strings of every kind come out as they went in; ids may be strings or integers."""
    table = pa.table(
        {
            "other": [[1.0]] * len(TEXTS),
            "id": pa.array(range(len(TEXTS))).cast(id_kind),
            "text": pa.array(TEXTS).cast(kind),
        }
    )
    pq.write_table(table, tmp_path / "corpus.parquet", row_group_size=3)
    expected = [(text, str(number)) for number, text in enumerate(TEXTS)]
    assert read(tmp_path / "corpus.parquet", id_field="id") == expected
    assert read(tmp_path / "corpus.parquet") == [(text, None) for text in TEXTS]


def test_bad_parquet_rows(tmp_path: Path) -> None:
    """A null and bytes that are not UTF-8 are bad rows, named by row over all row groups."""
    texts = pa.array([b"a", None, b"\xff", b"d", b"e"], pa.binary()).view(pa.string())
    table = pa.table({"text": texts, "id": pa.array([1, 2, 3, None, 5])})
    pq.write_table(table, tmp_path / "corpus.parquet", row_group_size=2)
    good, bad = read_bad(tmp_path / "corpus.parquet", id_field="id")
    assert good == ["a", "e"]
    assert bad == [
        "corpus.parquet line 2, field 'text': null",
        "corpus.parquet line 3, field 'text': not UTF-8",
        "corpus.parquet line 4, field 'id': null",
    ]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"id": ["1"], "body": ["a"]}, "no single column 'text'; it has id, body"),
        ({"id": ["1"], "text": [1]}, "column 'text' is of type int64, which holds no text"),
        ({"id": ["1"], "text": [b"a"]}, "column 'text' is of type binary, which holds no text"),
        ({"id": [1.5], "text": ["a"]}, "column 'id' is of type double, which holds no text"),
    ],
)
def test_bad_parquet_columns(
    tmp_path: Path, columns: dict[str, list[object]], problem: str
) -> None:
    """A column that is missing or of another type is refused by name."""
    pq.write_table(pa.table(columns), tmp_path / "corpus.parquet")
    with pytest.raises(CorpusError, match=rf"corpus\.parquet: {problem}"):
        read(tmp_path / "corpus.parquet", id_field="id")


def test_parquet_column_that_is_not_utf8(tmp_path: Path) -> None:
    """A Parquet column whose name is not UTF-8 makes the file an error that names it."""
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["a"], "other": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"other", b"\xffther"))
    with pytest.raises(CorpusError, match=r"corpus\.parquet: .*utf-8"):
        read(path)


def test_truncated_parquet(tmp_path: Path) -> None:
    """A truncated Parquet file is refused by name."""
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorpusError, match=r"corpus\.parquet: "):
        read(path)


@pytest.mark.parametrize("name", ["corpus.parquet.gz", "-"])
def test_parquet_must_be_a_file(tmp_path: Path, name: str) -> None:
    """Parquet in a pipe or an archive is refused before it is read."""
    path = name if name == "-" else write(tmp_path / name, "")
    with pytest.raises(CorpusError, match="Parquet is read from a file as it is"):
        read(path, format="parquet")


# Plain text


def test_text_lines(tmp_path: Path) -> None:
    """The index of a chunk is its line: empty lines stay, and only line ends are taken off."""
    path = write(tmp_path / "corpus.txt", " a \n\n\r\nb\r\r\nc\vd\x85e\u2028f\n\0\ng\r")
    texts = [text for text, _ in read(path)]
    assert texts == [" a ", "", "", "b\r", "c\vd\x85e\u2028f", "\0", "g\r"]


def test_bad_text_line(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 cost their own line."""
    texts, bad = read_bad(write(tmp_path / "corpus.txt", b"a\n\xff\nb\n"))
    assert texts == ["a", "b"]
    assert bad == ["corpus.txt line 2: not UTF-8: invalid start byte"]


def test_text_has_no_ids(tmp_path: Path) -> None:
    """A request for ids of plain text is refused."""
    with pytest.raises(CorpusError, match=r"corpus\.txt: plain text has no field 'id'"):
        read(write(tmp_path / "corpus.txt", "a\n"), id_field="id")


# Directories


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    """The file of a tokenizer of words."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"?": 0}, unk_token="?"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_directory(tmp_path: Path, tokenizer_file: str) -> None:
    """Files are read in order of path, cut, and their chunks named by path and number."""
    root = tmp_path / "docs"
    write(root / "b.md", "one two three four five six")
    write(root / "a" / "deep" / "é.txt.gz", "\ufeffseven")
    write(root / "a.md", "eight")
    write(root / "empty.md", " \n")
    options = {"tokenizer_file": tokenizer_file, "chunk_tokens": 4, "chunk_overlap": 1}
    expected: Pairs = [
        ("eight", "a.md#0"),
        ("seven", "a/deep/é.txt.gz#0"),
        ("one two three four", "b.md#0"),
        ("four five six", "b.md#1"),
    ]
    assert read(root, **options) == expected
    assert read(f"{root}/", **options) == expected
    assert read(root, glob="*.md", **options) == [expected[0], *expected[2:]]
    assert read(root, glob="a/**", **options) == [expected[1]]
    for hidden in (".env", ".git/HEAD", "a/.notes.md"):
        write(root / hidden, "secret")
    assert read(root, **options) == expected
    assert read(root, glob="a/.*", **options) == [("secret", "a/.notes.md#0")]
    assert read(root, glob=".git/*", **options) == [("secret", ".git/HEAD#0")]


def test_bad_files_in_a_directory(
    tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file without readable text is a bad row, and links do not lead round in a ring."""
    monkeypatch.setattr(directory, "DOCUMENT_BYTES_MAX", 1 << 20)
    root = tmp_path / "docs"
    write(root / "binary", b"\x89PNG\xff")
    write(root / "good", "text")
    write(root / "large", "a" * (1 << 20) + "a")
    write(root / "truncated.gz", b"text").write_bytes(gzip.compress(b"text" * 100)[:-9])
    (root / "broken").symlink_to("nowhere")
    (root / "ring").symlink_to(root)
    (root / "link").symlink_to("good")
    os.mkfifo(root / "pipe")
    Path(os.fsdecode(bytes(root) + b"/name\xff")).write_text("text")
    texts, bad = read_bad(root, tokenizer_file=tokenizer_file)
    assert texts == ["text", "text"]
    assert [row.split(": ", 1)[0].removeprefix("docs/") for row in bad] == [
        "binary",
        "broken",
        "large",
        "name\\udcff",
        "pipe",
        "ring",
        "truncated.gz",
    ]
    assert bad[0].startswith("docs/binary: not a readable UTF-8 text: 'utf-8' codec can't decode")


def test_links_that_lead_nowhere_have_facts(tmp_path: Path) -> None:
    """A corpus with a broken link, or a ring of them, is seen to change when the link leads on."""
    write(tmp_path / "docs" / "good", "text")
    (tmp_path / "docs" / "broken").symlink_to(tmp_path / "later")
    (tmp_path / "docs" / "ring").symlink_to("ring")
    before = look_at([str(tmp_path / "docs")], CorpusOptions())
    assert look_at([str(tmp_path / "docs")], CorpusOptions()).digest == before.digest
    write(tmp_path / "later", "here")
    assert look_at([str(tmp_path / "docs")], CorpusOptions()).digest not in ("", before.digest)


def test_directory_needs_a_tokenizer(tmp_path: Path) -> None:
    """A directory without a tokenizer, or with a file that is none, is refused at the call."""
    with pytest.raises(CorpusError, match="needs a tokenizer"):
        read_corpus([str(tmp_path)], CorpusOptions(), fail_on_bad_row)
    options = CorpusOptions(tokenizer_file=str(tmp_path / "none.json"))
    with pytest.raises(CorpusError, match=r"none\.json: not a tokenizer"):
        read_corpus([str(tmp_path)], options, fail_on_bad_row)


# Sources


def test_order_of_sources(tmp_path: Path, tokenizer_file: str) -> None:
    """Sources are read in the order given, whatever their format."""
    write(tmp_path / "z.csv", "id,text\n1,a\n")
    write(tmp_path / "a.jsonl", '{"id": 2, "text": "b"}\n')
    write(tmp_path / "docs" / "c.txt", "c")
    sources = [str(tmp_path / name) for name in ("z.csv", "docs", "a.jsonl", "z.csv")]
    options = CorpusOptions(id_field="id", tokenizer_file=tokenizer_file)
    rows = pairs(read_corpus(sources, options, fail_on_bad_row))
    assert rows == [("a", "1"), ("c", "c.txt#0"), ("b", "2"), ("a", "1")]


def test_ids_of_all_or_none(tmp_path: Path) -> None:
    """Sources with ids and sources without ids cannot be mixed."""
    path = write(tmp_path / "a.jsonl", "")
    write(tmp_path / "docs" / "a.md", "")
    with pytest.raises(
        CorpusError, match=r"the chunks of .*docs have ids and those of .* have none"
    ):
        read_corpus([str(path), str(tmp_path / "docs")], CorpusOptions(), fail_on_bad_row)


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob stands for its matches in order; a file whose name looks like one is found first."""
    for name in ("b1.txt", "b0.txt", "deep/b2.txt", "[b]0.txt"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    assert [text for text, _ in read("b*.txt")] == ["b0.txt", "b1.txt"]
    assert [text for text, _ in read(tmp_path / "**" / "b?.txt")] == [
        "b0.txt",
        "b1.txt",
        "deep/b2.txt",
    ]
    assert [text for text, _ in read("[b]0.txt")] == ["[b]0.txt"]


@pytest.mark.parametrize("glob", ["rows/**", "rows/**/*", "rows/**/s*"])
def test_a_glob_of_directories_and_of_their_files(tmp_path: Path, glob: str) -> None:
    """A file comes once though a glob matches it and a directory that it is in."""
    for name in ("s0.jsonl", "sub/s1.jsonl", "sub/s2.jsonl"):
        write(tmp_path / "rows" / name, json_lines([name]))
    assert read(tmp_path / glob) == [
        ("s0.jsonl", None),
        ("sub/s1.jsonl", None),
        ("sub/s2.jsonl", None),
    ]


def test_url(tokenizer_file: str) -> None:
    """Files, globs and directories of any file system are read alike, and named by URL."""
    memory = fsspec.filesystem("memory")
    memory.pipe(
        {
            "/farm/a.jsonl.gz": gzip.compress(b'{"text": "a"}\n'),
            "/farm/b.jsonl": b'{"text": "b"}\n{}\n',
            "/farm/docs/deep/c.md": b"c",
        }
    )
    try:
        assert read("memory://farm/a.jsonl.gz") == [("a", None)]
        docs = read("memory://farm/docs", tokenizer_file=tokenizer_file)
        assert docs == [("c", "deep/c.md#0")]
        texts, bad = read_bad("memory://farm/*.jsonl*")
        assert texts == ["a", "b"]
        assert bad == [f"memory:///farm/b.jsonl line 2, field 'text': {NO_FIELDS}"]
    finally:
        memory.rm("/farm", recursive=True)


def test_stdin() -> None:
    """Standard input is JSON Lines unless said otherwise, is named, and stays open."""
    stdin = io.BytesIO(b'{"text": "a"}\n{}\n')
    bad: list[BadRow] = []
    batches = read_corpus(["-"], CorpusOptions(), bad.append, stdin)
    assert pairs(batches) == [("a", None)]
    assert bad == [BadRow("<stdin>", 2, "text", NO_FIELDS)]
    assert not stdin.closed
    lines = read_corpus(["-"], CorpusOptions(format="txt"), fail_on_bad_row, io.BytesIO(b"a\nb"))
    assert pairs(lines) == [("a", None), ("b", None)]


@pytest.mark.parametrize("glob", ["**/*", "**/*.parquet"])
def test_a_directory_of_files_of_rows(tmp_path: Path, glob: str) -> None:
    """A directory of Parquet parts is read as its files are, in order of path."""
    texts = {"part-1": ["b", "c"], "part-0": ["a"], "z/part-0": ["d"]}
    for name, column in texts.items():
        path = tmp_path / "parts" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": column}), path)
    write(tmp_path / "parts" / "_SUCCESS", "")
    write(tmp_path / "parts" / ".part.crc", "")
    if glob != "**/*":
        write(tmp_path / "parts" / "README.md", "what these are")
    assert read(tmp_path / "parts", glob=glob) == [(text, None) for text in "abcd"]


def test_a_directory_of_several_kinds_is_one_of_documents(tmp_path: Path) -> None:
    """A directory with rows and prose, or rows of two formats, is cut into chunks as before."""
    write(tmp_path / "docs" / "a.jsonl", "")
    write(tmp_path / "docs" / "b.csv", "")
    with pytest.raises(CorpusError, match="a directory is cut into chunks"):
        read(tmp_path / "docs")


WHICH = "and --text-field says which it is"


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array(tmp_path: Path, name: str, mark: str) -> None:
    """A file named .json is one array of objects; an object without a text is a bad row."""
    path = write(tmp_path / name, f'{mark} [{{"text": "a"}}, {{"id": 2}}, {{"text": "b"}}] ')
    assert read_bad(path) == (
        ["a", "b"],
        [f"{name} line 2, field 'text': missing; there are 'id', {WHICH}"],
    )


def test_lines_that_are_named_json(tmp_path: Path) -> None:
    """A file named .json may have an object a line; a damaged array is refused."""
    path = write(tmp_path / "a.json", '{"text": "a"}\n{"text": "b"}\n')
    assert read(path) == [("a", None), ("b", None)]
    with pytest.raises(CorpusError, match=r"a\.json: no array of JSON"):
        read(write(tmp_path / "a.json", '[{"text": "a"}, '))


def test_an_array_is_read_on_from_a_row(tmp_path: Path) -> None:
    """Reading goes on behind the rows of an array that come before the cursor."""
    path = write(tmp_path / "a.json", json.dumps([{"text": str(n)} for n in range(9)]))
    rows = read_corpus([str(path)], CorpusOptions(), fail_on_bad_row, cursor=Cursor(offset=7))
    assert [text for each in rows for text in each.texts] == ["7", "8"]


def test_an_array_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array, which is decoded whole, is refused when it is too large for that."""
    monkeypatch.setattr("embedfarm.readers.jsonl.ARRAY_BYTES_MAX", 20)
    with pytest.raises(CorpusError, match=r"one object a line \(\.jsonl\)"):
        read(write(tmp_path / "a.json", '[{"text": "a text that is long"}]'))


def test_fields_inside_others(tmp_path: Path) -> None:
    """A field with dots is one of that name, or one inside others; what is wrong is named."""
    path = write(
        tmp_path / "a.jsonl",
        '{"doc": {"text": "a", "meta": {"id": 1}}}\n{"doc": {"text": 2}}\n{"doc": 3}\n{}\n'
        '{"doc": {"text": "b", "meta": {"id": "x"}}, "more": []}\n',
    )
    assert read_bad(path, text_field="doc.text", id_field="doc.meta.id") == (
        ["a", "b"],
        [
            "a.jsonl line 2, field 'doc.text': string expected, not number",
            "a.jsonl line 3, field 'doc.text': missing; 'doc' holds no object",
            "a.jsonl line 4, field 'doc.text': missing; the row has no fields",
        ],
    )
    good = write(tmp_path / "b.jsonl", '{"doc": {"text": "a", "meta": {"id": 1}}}')
    assert read(good, text_field="doc.text", id_field="doc.meta.id") == [("a", "1")]
    flat = write(tmp_path / "c.jsonl", '\n{"doc.text": "a", "doc": {"text": "b"}}\n')
    assert read(flat, text_field="doc.text") == [("a", None)]


def test_each_object_is_read_by_itself(tmp_path: Path) -> None:
    """Where a field with dots lies does not depend on where the reading of a file began."""
    lines = [
        '{"none": 1}\n',
        '{"doc": {"text": "a"}}\n',
        '{"doc.text": "b", "doc": {"text": "c"}}\n',
    ]
    path = write(tmp_path / "a.jsonl", "".join(lines))
    assert read_bad(path, text_field="doc.text")[0] == ["a", "b"]
    options = CorpusOptions(text_field="doc.text")
    for first, rest in ((1, ["a", "b"]), (2, ["b"])):
        cursor = Cursor(offset=len("".join(lines[:first])), line=first)
        rows = read_corpus([str(path)], options, fail_on_bad_row, cursor=cursor)
        assert [text for each in rows for text in each.texts] == rest


def test_fields_of_a_struct(tmp_path: Path) -> None:
    """A column of Parquet with dots may be a field of a struct; a null above it is a bad row."""
    documents = [{"text": "a", "id": 1}, None, {"text": "b", "id": 2}]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"doc": documents, "number": [1, 2, 3]}), path)
    assert read_bad(path, text_field="doc.text", id_field="doc.id") == (
        ["a", "b"],
        ["a.parquet line 2, field 'doc.text': null"],
    )
    for field in ("doc.body", "number.text", "doc", "body"):
        with pytest.raises(CorpusError, match=field.partition(".")[0]):
            read(path, text_field=field)


def test_a_pipe(tmp_path: Path) -> None:
    """A named pipe, which can be read once, is refused with a word about standard input."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match="give it on standard input, as -"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.jsonl", "missing.jsonl: no such file or directory"),
        ("mis*.jsonl", r"mis\*.jsonl: no such file or directory"),
        ("", "'': no such file or directory"),
        ("memory://missing.jsonl", "memory://missing.jsonl: no such file or directory"),
        ("nothing://a.jsonl", "nothing://a.jsonl: Protocol not known: nothing"),
        ("nothing://me:secret@host/a", r"^nothing://\*\*\*@host/a: Protocol not known: nothing"),
    ],
)
def test_missing_source(name: str, problem: str) -> None:
    """A source that cannot be found is refused at the call, by name and without its password."""
    with pytest.raises(CorpusError, match=problem):
        read_corpus([name], CorpusOptions(), fail_on_bad_row)


class StoreError(Exception):
    """Raised by the library of a store in its own way."""


@pytest.mark.parametrize("call", ["exists", "_open"])
def test_a_store_out_of_reach(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What the library of a store raises becomes a sentence with the name of the source."""

    def fail(*_arguments: object, **_named: object) -> None:
        raise StoreError("no route to host")

    fsspec.filesystem("memory").pipe("/away.jsonl", b'{"text": "a"}')
    monkeypatch.setattr(MemoryFileSystem, call, fail)
    with pytest.raises(CorpusError, match=r"^memory://away\.jsonl: no route to host$"):
        list(read_corpus(["memory://away.jsonl"], CorpusOptions(), fail_on_bad_row))


@pytest.mark.parametrize("name", ["corpus.doc", "corpus", "corpus.gz"])
def test_unknown_format(tmp_path: Path, name: str) -> None:
    """A file of no known suffix is refused at the call, and read where the format is given."""
    path = write(tmp_path / name, "a\n")
    with pytest.raises(CorpusError, match=rf"{name}: unknown format; name one of jsonl, json, csv"):
        read_corpus([str(path)], CorpusOptions(), fail_on_bad_row)
    assert read(path, format="txt") == [("a", None)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"format": "xml"},
            "unknown format 'xml'; known: jsonl, json, csv, tsv, parquet, arrow, txt",
        ),
        ({"id_field": "text"}, "field 'text' cannot be text and id at once"),
        ({"chunk_tokens": 0}, "chunks of 0 tokens cannot overlap by 20"),
        ({"chunk_overlap": 101}, "chunks of 200 tokens cannot overlap by 101"),
        ({"chunk_overlap": -1}, "chunks of 200 tokens cannot overlap by -1"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], problem: str) -> None:
    """Options that make no sense are refused when they are made."""
    with pytest.raises(CorpusError, match=problem):
        CorpusOptions(**options)
