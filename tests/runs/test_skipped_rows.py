"""Tests of the list of rows that were left out."""

from pathlib import Path

from embedfarm.producer.readers import BadRow
from embedfarm.runs.skipped_rows import SkippedFile


def test_without_bad_rows_nothing_is_written(tmp_path: Path) -> None:
    """A corpus without bad rows gets no list, and an unfinished old one is removed."""
    record = SkippedFile(tmp_path / "skipped.jsonl")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "skipped.partial").write_text("cut off")
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_take_their_place_together(tmp_path: Path) -> None:
    """The list of skipped rows appears only when it is complete."""
    record = SkippedFile(tmp_path / "skipped.jsonl")
    for row in (3, 5):
        record.add(BadRow("corpus.jsonl", row, "text", "is missing"))
    assert record.count == 2
    assert not (tmp_path / "skipped.jsonl").exists()
    record.close()
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 1
