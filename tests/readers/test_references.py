"""Tests of texts by reference: what a corpus says of its places is what is read there again."""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from embedfarm.contract.records import Block, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.source_places import SourceReference
from embedfarm.producer.blocks import Blocker
from embedfarm.readers import CorpusError, CorpusOptions, fail_on_bad_row, read_corpus
from embedfarm.readers.references import references, texts_of

ROW_GROUP_ROWS = 7

Row = dict[str, Any]


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    """Write JSON Lines with a byte order mark, empty lines and both ends of lines."""
    lines = [
        json.dumps(row, ensure_ascii=False) + ("\n\n" if place % 5 else "\r\n")
        for place, row in enumerate(rows)
    ]
    path = path.with_suffix(".jsonl")
    path.write_text("\ufeff" + "".join(lines), encoding="utf-8", newline="")
    return path


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a table of strings, in which what is missing is null."""
    names = ("text", "title", "id")
    texts = {name: [row.get(name) for row in rows] for name in names}
    return pa.table(texts, schema=pa.schema([(name, pa.string()) for name in names]))


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    """Write Parquet in small row groups."""
    path = path.with_suffix(".parquet")
    pq.write_table(table_of(rows), path, row_group_size=ROW_GROUP_ROWS)
    return path


def write_arrow(path: Path, rows: Sequence[Row]) -> Path:
    """Write an Arrow file of small batches."""
    path, table = path.with_suffix(".arrow"), table_of(rows)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=ROW_GROUP_ROWS)
    return path


def write_stream(path: Path, rows: Sequence[Row]) -> Path:
    """Write an Arrow stream of small batches."""
    path, table = path.with_suffix(".arrows"), table_of(rows)
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=ROW_GROUP_ROWS)
    return path


Write = Callable[[Path, Sequence[Row]], Path]
OPTIONS = [
    CorpusOptions(id_field=field, template=template)
    for field in (None, "id")
    for template in (None, "{title}: {text}", "<{text}>")
]
WRITERS: list[Write] = [write_jsonl, write_parquet, write_arrow, write_stream]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
good_rows = st.fixed_dictionaries({"text": texts, "title": texts, "id": texts})
bad_rows = st.fixed_dictionaries({"title": texts})
files_of_rows = st.lists(
    st.lists(st.one_of(good_rows, good_rows, bad_rows), max_size=30), max_size=3
)


def cut_from(
    row: int, paths: Sequence[Path], options: CorpusOptions, tokens_target: float
) -> list[Block]:
    """Return the blocks of the end of a corpus, as a run sends them that goes on there."""
    names = [str(path) for path in paths]
    blocker = Blocker(row, Settings(block_chunks_min=1), files=references(names, options))
    blocker.tokens_target = tokens_target
    blocks: list[Block] = []
    count = 0
    for rows in read_corpus(names, options, lambda _: None, placed=True):
        blocks += blocker.add(rows.piece(max(0, row - count), len(rows.texts)))
        count += len(rows.texts)
    return [*blocks, *blocker.flush()]


def cut(
    paths: Sequence[Path], options: CorpusOptions, tokens_target: float
) -> tuple[list[Block], list[str]]:
    """Return the blocks of a corpus that refer to it, and its texts."""
    names = [str(path) for path in paths]
    blocker = Blocker(0, Settings(block_chunks_min=1), files=references(names, options))
    blocker.tokens_target = tokens_target
    blocks: list[Block] = []
    read: list[str] = []
    for rows in read_corpus(names, options, lambda _: None, placed=True):
        read += rows.texts
        for first in range(0, len(rows.texts), 11):  # rows come in pieces of any size
            blocks += blocker.add(rows.piece(first, first + 11))
    return [*blocks, *blocker.flush()], read


def reference_of(block: Block) -> SourceReference:
    """Return the reference that a block has in place of texts and ids."""
    assert block.reference is not None
    assert (block.texts, block.ids, block.tokens) == ([], None, None)
    return block.reference


@pytest.mark.parametrize("write", WRITERS)
@settings(deadline=None, max_examples=40)
@given(
    corpus=files_of_rows,
    tokens_target=st.integers(1, 60),
    options=st.sampled_from(OPTIONS),
)
def test_what_blocks_refer_to_is_what_was_read(
    tmp_path_factory: pytest.TempPathFactory,
    write: Write,
    corpus: list[list[Row]],
    tokens_target: int,
    options: CorpusOptions,
) -> None:
    """Blocks tile a corpus of several files with bad rows, and their texts are found again."""
    directory = tmp_path_factory.mktemp("corpus")
    paths = [write(directory / f"{number}", rows) for number, rows in enumerate(corpus)]
    blocks, read = cut(paths, options, tokens_target)
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks)][: len(blocks)]
    found = list(texts_of(map(reference_of, blocks)))
    assert [text for some in found for text in some] == read
    for block, own in zip(blocks, found, strict=True):
        assert (block.count, block.to_embed) == (len(own), len(own))
        assert reference_of(block).checksum == zlib.crc32(text_checksums(own))
    middle = len(read) // 2
    end = texts_of(map(reference_of, cut_from(middle, paths, options, tokens_target)))
    assert [text for some in end for text in some] == read[middle:]
    # In any order, as other workers take some of them.
    backwards = list(texts_of(reference_of(block) for block in reversed(blocks)))
    assert backwards == found[::-1]


def test_known_rows_are_in_no_checksum(tmp_path: Path) -> None:
    """A block says which of its rows are known, and its checksum is of the others."""
    path = write_jsonl(tmp_path / "c", [{"text": each} for each in "abcd"])
    options = CorpusOptions()
    (rows,) = read_corpus([str(path)], options, fail_on_bad_row, placed=True)
    blocker = Blocker(0, Settings(), files=references([str(path)], options))
    blocks = list(blocker.add(rows._replace(known=b"\0\1\1\0")))
    (block,) = [*blocks, *blocker.flush()]
    assert (block.count, block.to_embed, block.known) == (4, 2, b"\0\1\1\0")
    assert reference_of(block).checksum == zlib.crc32(text_checksums(["a", "d"]))


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_that_was_changed(tmp_path: Path, write: Write) -> None:
    """A file with fewer rows, or a bad one, gives fewer; one that is gone is an error."""
    rows = [{"text": str(number)} for number in range(20)]
    path = write(tmp_path / "c", rows)
    blocks, _ = cut([path], CorpusOptions(), 12)
    last = reference_of(blocks[-1])
    write(tmp_path / "c", rows[:-1])
    (found,) = texts_of([last])
    assert len(found) == last.rows - 1
    write(tmp_path / "c", [*rows[:-2], {"title": "no text"}, rows[-1]])
    (found,) = texts_of([last])
    assert len(found) == last.rows - 2
    path.unlink()
    with pytest.raises(CorpusError) as refused:
        list(texts_of([last]))
    assert isinstance(refused.value.__cause__, FileNotFoundError)


def test_a_column_that_is_gone(tmp_path: Path) -> None:
    """A table without the column is refused, and its name is said."""
    path = write_parquet(tmp_path / "c", [{"text": "a"}])
    (reference,) = references([str(path)], CorpusOptions())
    with pytest.raises(CorpusError, match="no single column 'body'"):
        list(texts_of([replace(reference, text_field="body", rows=1)]))


def test_what_nobody_can_refer_to(tmp_path: Path) -> None:
    """Packed files, other formats, encodings, documents and pipes are refused by name."""
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    table = tmp_path / "c.csv"
    table.write_text("text\na\n")
    lines = write_jsonl(tmp_path / "c", [{"text": "a"}])
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text("a")
    usual = CorpusOptions()
    for source, options in (
        (str(packed), usual),
        (str(table), usual),
        (str(lines), CorpusOptions(encoding="cp1252")),
        (str(documents), usual),
        ("-", usual),
    ):
        with pytest.raises(CorpusError, match="jsonl, parquet, arrow"):
            references([source], options)


def test_a_directory_of_rows_is_its_files(tmp_path: Path) -> None:
    """A directory of files of rows gives one reference for each of them, in order."""
    for name in "ba":
        write_parquet(tmp_path / name, [{"text": name}])
    found = references([str(tmp_path)], CorpusOptions(text_field="text"))
    assert [each.file for each in found] == [str(tmp_path / f"{name}.parquet") for name in "ab"]
    assert {each.format for each in found} == {"parquet"}
