"""Tests of marked parts of documents, which commands write."""

from pathlib import Path

import pytest

from benchmarks.marked import write_marked


def test_a_part_is_written_between_its_marks(tmp_path: Path) -> None:
    """A marked part is replaced and the rest stays; a document without marks is refused."""
    path = tmp_path / "document.md"
    path.write_text("before\n<!-- one -->\nold\n<!-- end of one -->\nafter\n")
    write_marked(path, "one", "new\n")
    expected = "before\n<!-- one -->\n\nnew\n\n<!-- end of one -->\nafter\n"
    assert path.read_text() == expected
    path.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        write_marked(path, "one", "new")
