"""Tests of texts that workers read where they lie."""

import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from embedfarm.contract.records import Block, text_checksums
from embedfarm.contract.source_places import SourceReference
from embedfarm.contract.stored_results import StorageRefused
from embedfarm.workers import source_texts
from embedfarm.workers.engines.engine import ModelUnavailable
from embedfarm.workers.source_texts import SourceRefused, with_texts

TEXTS = ["one", "two", "three", "four"]
LINES = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)


def block_of(file: str, texts: Sequence[str] = TEXTS, known: bytes = b"") -> Block:
    """A block that refers to the beginning of a file of `TEXTS`."""
    wanted = [
        text
        for text, is_known in zip(texts, known or bytes(len(texts)), strict=True)
        if not is_known
    ]
    reference = SourceReference(
        file=file, format="jsonl", text_field="text", length=len(LINES), rows=len(texts),
        checksum=zlib.crc32(text_checksums(wanted)),
    )  # fmt: skip
    return Block(start=10, texts=[], known=known, reference=reference)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file of `TEXTS`."""
    path = tmp_path / "c.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture
def stop() -> threading.Event:
    """An event that nobody sets."""
    return threading.Event()


def test_blocks_get_their_texts(corpus: Path, stop: threading.Event) -> None:
    """A block has the texts that it refers to, of known rows none; others stay as they are."""
    plain = Block(start=0, texts=["here"])
    some = block_of(str(corpus), known=b"\0\1\1\0")
    read = with_texts([plain, block_of(str(corpus)), some], [str(corpus.parent)], stop)
    assert [block.texts for block in read] == [["here"], TEXTS, ["one", "four"]]
    assert read[0] is plain
    assert [block.reference for block in read] == [None] * 3
    assert (read[2].count, read[2].to_embed, read[2].indices()) == (4, 2, [10, 13])


@pytest.mark.parametrize(
    "lines", [LINES.replace("two", "2"), LINES.replace('{"text": "four"}\n', "")]
)
def test_other_rows_are_refused(corpus: Path, stop: threading.Event, lines: str) -> None:
    """A row with another text, or one that is missing, is found before anything is embedded."""
    block = block_of(str(corpus))
    corpus.write_text(lines)
    with pytest.raises(SourceRefused, match="has other rows 10 to 13 than when they were sent"):
        with_texts([block], ["/"], stop)


def test_other_rows_that_are_known_are_nobodys_matter(corpus: Path, stop: threading.Event) -> None:
    """A row whose vector is known is not compared here: whoever collects has its text."""
    block = block_of(str(corpus), known=b"\0\1\0\0")
    corpus.write_text(LINES.replace("two", "TWO"))
    (read,) = with_texts([block], ["/"], stop)
    assert read.texts == ["one", "three", "four"]


def test_a_file_that_is_not_there(tmp_path: Path, stop: threading.Event) -> None:
    """A worker that has not mounted the corpus says so at once."""
    with pytest.raises(SourceRefused, match=r"gone\.jsonl"):
        with_texts([block_of(str(tmp_path / "gone.jsonl"))], [str(tmp_path)], stop)


def test_files_elsewhere_are_not_read(corpus: Path, tmp_path: Path, stop: threading.Event) -> None:
    """Only files below a root are read; a link does not lead elsewhere, and no dots do."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.jsonl").symlink_to(corpus)
    for file in (corpus, inside / "link.jsonl", inside / ".." / corpus.name):
        with pytest.raises(StorageRefused, match="source"):
            with_texts([block_of(str(file))], [str(inside)], stop)
    with pytest.raises(StorageRefused, match=r"not below one of source_roots \(empty\)"):
        with_texts([block_of(str(corpus))], [], stop)


class Away(MemoryFileSystem):  # type: ignore[misc] # it is untyped
    """A store that fails a number of times before it opens a file."""

    protocol = "away"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 -- its base's
    failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("away://").lstrip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read a file, unless this fails once more."""
        if Away.failures:
            Away.failures -= 1
            raise ConnectionError("503 slow down")
        data: bytes = super().cat_file(path, start, end)
        return data


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a file of `TEXTS` on a store that can be away for a moment."""
    fsspec.register_implementation("away", Away, clobber=True)
    monkeypatch.setattr(source_texts, "PAUSES_SECONDS", (0.001, 0.001))
    Away.failures = 0
    Away().pipe_file("/c.jsonl", LINES.encode())
    yield "away:///c.jsonl"
    Away.failures = 0


def test_a_store_that_is_away_is_waited_for(away: str, stop: threading.Event) -> None:
    """What fails twice is read the third time; what fails longer may pass later."""
    block = block_of(away)
    Away.failures = 2
    (read,) = with_texts([block], ["away:///"], stop)
    assert read == replace(block, texts=TEXTS, reference=None)
    Away.failures = 3
    with pytest.raises(ModelUnavailable, match="503 slow down"):
        with_texts([block], ["away:///"], stop)


def test_who_stops_waits_no_longer(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stopped does not go on trying."""
    monkeypatch.setattr(source_texts, "PAUSES_SECONDS", (60.0,))
    Away.failures = 1
    stop = threading.Event()
    stop.set()
    with pytest.raises(ModelUnavailable):
        with_texts([block_of(away)], ["away:///"], stop)
