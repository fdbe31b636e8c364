"""Tests of readers with any input: rows come, or an error that names the file."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedfarm.contract.records import text_checksums
from embedfarm.readers import BadRow, CorpusError, CorpusOptions, read_corpus

ROWS = [
    ("a", "plain"),
    ("b", 'quoted "and", cut\nin two'),
    ("c", "中文 \u2028"),
    ("d", "x" * 300),
]
FUZZED = [
    "jsonl", "csv", "tsv", "txt", "parquet-plain", "parquet-packed", "arrow-plain", "arrow-packed",
    "arrow-stream",
]  # fmt: skip
MANGLED = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
HOSTILE = st.sampled_from(
    [b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r", b"\r\n", b'"', b"\\ud800",
     b"\xed\xa0\x80", b"[" * 2000, b'{"text":' * 2000, b"1e999", b"9" * 5000, b",", b"\t", b"NaN",
     b"\x1a", b"\x85"]
)  # fmt: skip


def valid(name: str) -> bytes:
    """A small corpus of a format."""
    if name.startswith("parquet"):
        file = io.BytesIO()
        ids, texts = zip(*ROWS, strict=True)
        table = pa.table({"id": ids * 40, "text": texts * 40, "other": [[1.5], None] * 80})
        compression, dictionary = ("none", False) if name == "parquet-plain" else ("snappy", True)
        pq.write_table(table, file, 50, compression=compression, use_dictionary=dictionary)
        return file.getvalue()
    if name.startswith("arrow"):
        file = io.BytesIO()
        ids, texts = zip(*ROWS, strict=True)
        kinds = pa.array(["k", None] * 80).dictionary_encode()
        table = pa.table({"id": ids * 40, "text": texts * 40, "kind": kinds})
        new = pa.ipc.new_stream if name == "arrow-stream" else pa.ipc.new_file
        packed = pa.ipc.IpcWriteOptions(compression="zstd" if name == "arrow-packed" else None)
        with new(file, table.schema, options=packed) as writer:
            writer.write_table(table, 50)
        return file.getvalue()
    if name == "jsonl":
        return b"".join(json.dumps({"id": i, "text": t}).encode() + b"\n" for i, t in ROWS)
    if name == "txt":
        return "\n".join(text for _, text in ROWS).encode()
    table = io.StringIO(newline="")
    csv.writer(table, delimiter="," if name == "csv" else "\t").writerows([("id", "text"), *ROWS])
    return table.getvalue().encode()


@st.composite
def mangled(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file that is cut, extended or repeated up to eight times, or sometimes random bytes."""
    data = draw(st.binary(max_size=200)) if draw(st.integers(0, 9)) == 0 else whole
    for _ in range(draw(st.integers(1, 8))):
        first, second = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        new = draw(st.just(b"") | st.binary(max_size=8) | HOSTILE | st.just(data[first:second] * 2))
        data = data[:first] + new + data[second if draw(st.booleans()) else first :]
    return data


def read(path: Path, name: str, field: str | None) -> None:
    """Read all there is: rows that can be embedded, bad rows that are named, or an error."""
    bad: list[BadRow] = []
    options = CorpusOptions(id_field=field, format=name)
    try:
        for rows in read_corpus([str(path)], options, bad.append):
            text_checksums(rows.texts)
            assert rows.ids is None or len(rows.ids) == len(rows.texts)
    except CorpusError as error:
        assert str(path) in str(error)  # noqa: PT017 -- it may be readable
    for row in bad:
        assert str(row).startswith(f"{path} line {row.line}")
        assert row.reason
        str(row).encode()


@pytest.mark.parametrize("name", FUZZED)
@MANGLED
@given(data=st.data())
def test_mangled_files(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """A damaged file gives its rows, or an error that names the file, and the line of a bad row."""
    form = name.partition("-")[0]
    path = tmp_path / f"corpus.{form}"
    path.write_bytes(data.draw(mangled(valid(name))))
    read(path, form, data.draw(st.none() | st.just("id")) if form != "txt" else None)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@MANGLED
@given(data=st.data())
def test_mangled_archives(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    """A damaged archive gives its rows, or an error that names the file."""
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    path = tmp_path / f"corpus.jsonl{suffix}"
    path.write_bytes(data.draw(mangled(pack(valid("jsonl") * 20))))
    read(path, "jsonl", None)


OTHER_TYPES = [
    pa.int64(),
    pa.float32(),
    pa.bool_(),
    pa.binary(),
    pa.null(),
    pa.list_(pa.string()),
    pa.struct([("text", pa.string())]),
    pa.timestamp("ns"),
    pa.decimal128(5, 2),
    pa.dictionary(pa.int8(), pa.int64()),
]


@pytest.mark.parametrize("kind", OTHER_TYPES, ids=str)
def test_columns_of_other_types(tmp_path: Path, kind: pa.DataType) -> None:
    """A column that holds no text is refused by file, name and type."""
    path = tmp_path / "corpus.parquet"
    values = pa.array([None, None], kind)
    pq.write_table(pa.table({"text": values}), path)
    with pytest.raises(CorpusError, match=rf"{path}: column 'text' is of type .* holds no text"):
        list(read_corpus([str(path)], CorpusOptions(), print))
