"""Tests of the URLs of stores, of the names of rows, and of stores that packages bring."""

import sys
from pathlib import Path

import pytest

from embedfarm.collector.manifest import OutputError
from embedfarm.collector.store_journal import (
    ConfirmedWhole,
    ExportHead,
    JournalEntry,
    StoreJournal,
)
from embedfarm.collector.stores import open_store, store_names
from embedfarm.collector.stores.address import parse_address
from embedfarm.collector.stores.qdrant import point_id
from embedfarm.collector.stores.store import StoreError

SECRET = "c4nary"  # noqa: S105 -- what is looked for
MODULE = """
class Shelf:
    elements = ("float32",)

    def __init__(self, address):
        self.address = address
"""


def test_an_address_has_the_parts_of_its_url() -> None:
    """A URL says where the collection is; whoever asks, and by what options, it is the same one."""
    found = parse_address(f"postgresql://me:{SECRET}%2F@Host:99/db?sslmode=require#my%20docs")
    assert (found.kind, found.host, found.port, found.path) == ("postgresql", "host", 99, "/db")
    assert (found.user, found.password, found.collection) == ("me", f"{SECRET}/", "my docs")
    assert found.options == {"sslmode": "require"}
    assert SECRET not in found.shown
    assert found.shown.endswith("#my docs")
    assert found.digest == parse_address("postgresql://host:99/db#my%20docs").digest
    assert found.digest != parse_address("postgresql://host:99/db#others").digest
    assert parse_address("qdrant+https://host#a").secure


@pytest.mark.parametrize(
    "url", ["", "host", "qdrant:", "qdrant+ftp://host#a", "qdrant://host", "qdrant://host:x#a"]
)
def test_what_is_no_url_of_a_store(url: str) -> None:
    """A text that is no URL, or that names no collection, is refused with a sentence."""
    with pytest.raises(OutputError, match=r"URL|names no collection"):
        parse_address(url)


def test_qdrant_takes_the_ids_that_it_can() -> None:
    """Numbers and UUIDs are ids of points as they are; what else there is makes a UUID."""
    uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    assert [point_id(name) for name in ("0", "42", str((1 << 64) - 1), uuid)] == [
        0, 42, (1 << 64) - 1, uuid
    ]  # fmt: skip
    made = [point_id(n) for n in ("042", "-1", "٤", str(1 << 64), uuid.upper(), "a", "")]
    assert all(isinstance(each, str) and len(each) == 36 for each in made)
    assert len(set(made)) == len(made)
    assert point_id("a") == "2c3c7482-55f2-5d83-8160-2a36cbe436f9"


def test_a_package_brings_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of an installed package is found by its name; one that does not load is named."""
    (tmp_path / "shelf.py").write_text(MODULE)
    facts = tmp_path / "shelf-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[embedfarm.stores]\nshelf = shelf:Shelf\nbroken = shelf:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert store_names()[-2:] == ("broken", "shelf")
    assert type(open_store(parse_address("shelf://a#b"))).__name__ == "Shelf"
    with pytest.raises(StoreError, match="'broken' of shelf:Nothing does not load"):
        open_store(parse_address("broken://a#b"))


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose client is missing says what to install."""
    monkeypatch.setitem(sys.modules, "lancedb", None)
    monkeypatch.delitem(sys.modules, "embedfarm.collector.stores.lancedb", raising=False)
    with pytest.raises(StoreError, match=r"pip install 'embedfarm\[lancedb\]'"):
        open_store(parse_address("lancedb:///a#b"))


def test_a_journal_outlives_a_torn_line(tmp_path: Path) -> None:
    """The last line of a journal may be torn, and counts for nothing then; another one is named."""
    journal = StoreJournal(tmp_path)
    journal.begin(ExportHead(store="s", job="j", exact=True))
    journal.add(JournalEntry(whole=ConfirmedWhole(rows=3, exact=True)))
    path = tmp_path / "confirmed.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    torn = StoreJournal(tmp_path)
    assert torn.head == journal.head
    assert torn.whole is None
    torn.renew()
    torn.add(JournalEntry(whole=ConfirmedWhole(rows=4, exact=True)))
    assert StoreJournal(tmp_path).whole == ConfirmedWhole(rows=4, exact=True)
    path.write_bytes(b"{torn\n" + whole)
    with pytest.raises(StoreError, match=r"confirmed\.jsonl is damaged: remove it"):
        StoreJournal(tmp_path)
