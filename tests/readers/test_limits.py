"""Tests of corpora that are larger than allowed, however small they are on the disk."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedfarm.readers import CorpusError, CorpusOptions, fail_on_bad_row, read_corpus
from embedfarm.readers.limits import Limits

MEBIBYTE = 1 << 20


def count_rows(path: Path, limits: Limits) -> int:
    """The number of rows that are read within limits."""
    batches = read_corpus([str(path)], CorpusOptions(), fail_on_bad_row, limits=limits)
    return sum(len(rows.texts) for rows in batches)


def packed(path: Path, content: bytes) -> Path:
    """A file that is compressed as its suffix says."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    return path


def test_rows_are_counted(tmp_path: Path) -> None:
    """A corpus of as many rows as allowed is read; one more is refused by the limit's name."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 100)
    assert count_rows(path, Limits(chunks_max=100)) == 100
    with pytest.raises(CorpusError, match="more chunks than job_chunks_max allows, 99"):
        count_rows(path, Limits(chunks_max=99))
    with pytest.raises(CorpusError, match="more chunks than job_chunks_max allows, 100"):
        count_rows(path, Limits(chunks_max=100, chunks_before=1))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz"])
@pytest.mark.parametrize("line", [b"\n", b'{"text": "a"}\n'])
def test_a_compressed_file_counts_unpacked(tmp_path: Path, name: str, line: bytes) -> None:
    """A compressed file is limited by its unpacked size, also where no row comes of it."""
    head = b"text\n" if ".csv" in name else b""
    path = packed(tmp_path / name, head + line * (MEBIBYTE // len(line)))
    assert path.stat().st_size < MEBIBYTE // 8
    with pytest.raises(CorpusError, match=f"{name}: it unpacks to more than corpus_bytes_max"):
        count_rows(path, Limits(bytes_max=MEBIBYTE // 4))
    if b"text" in line and not head:
        small = packed(tmp_path / f"b{path.name}", line * 1000)
        assert count_rows(small, Limits(bytes_max=len(line) * 1000)) == 1000


def test_parquet_counts_by_its_texts(tmp_path: Path) -> None:
    """A Parquet file is limited by the characters of its texts, since its columns are packed."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["word " * 200] * 4096}), path)
    assert path.stat().st_size < MEBIBYTE // 8
    assert count_rows(path, Limits()) == 4096
    with pytest.raises(CorpusError, match="more characters of text than corpus_bytes_max allows"):
        count_rows(path, Limits(bytes_max=MEBIBYTE // 4))
