"""Tests of the standard library's docstrings as a corpus."""

import csv
import json
import logging
import subprocess
import sys
import sysconfig
from inspect import cleandoc
from pathlib import Path

import pytest

from embedfarm.producer.docstrings import docstrings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str]]:
    """All docstrings of the standard library, read once."""
    return list(docstrings())


def test_many(rows: list[tuple[str, str]]) -> None:
    """The corpus has thousands of texts, none of them very short or long.

    The number depends on how much of the library is installed (Debian has idlelib and others in
    packages): one text for two triple quotes, most of which are of docstrings; 8,476 for 15,970 in
    Python 3.11.7.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [
        path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts)
    ]
    quotes = sum(path.read_bytes().count(b'"""') for path in files)
    assert quotes > 10_000
    assert len(rows) > 0.501 * quotes
    assert all(10 <= len(text) <= 2_000 for _, text in rows)


def test_names(rows: list[tuple[str, str]]) -> None:
    """Modules, packages, classes and functions go by their dotted names, each once."""
    corpus = dict(rows)
    assert len(corpus) == len(rows)
    assert corpus["csv.Sniffer.sniff"] == cleandoc(csv.Sniffer.sniff.__doc__ or "")
    assert corpus["logging"] == cleandoc(logging.__doc__ or "")


def test_left_out(rows: list[tuple[str, str]]) -> None:
    """Tests and installed packages are not in the corpus."""
    parts = {part for name, _ in rows for part in name.split(".")}
    assert parts.isdisjoint({"site-packages", "idle_test", "pytest"})
    assert not any(
        name.startswith(("test.", "unittest.test.", "lib2to3.tests")) for name, _ in rows
    )


def test_nothing_imported(rows: list[tuple[str, str]]) -> None:
    """A module is read without being imported: this one would open a browser."""
    assert rows
    assert "antigravity" not in sys.modules


def test_command(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    """The command writes it all, each text under its name, says how many, and warns of nothing."""
    path = tmp_path / "corpus.jsonl"
    command = [sys.executable, "-W", "always", "-m", "embedfarm.producer.docstrings", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"{len(rows):,} docstrings written to {path}\n"
    assert not done.stderr
    written = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert written == [{"id": name, "text": f"{name}: {text}"} for name, text in rows]


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that do not parse are passed over; warnings about escapes in others stay unheard."""
    (tmp_path / "old.py").write_text("print 'Python 2'\n")
    (tmp_path / "binary.py").write_bytes(b"\0\xff")
    (tmp_path / "good.py").write_text(
        '"""Good \\d module."""\nif True:\n async def f():\n  """A function."""\n'
    )
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(docstrings()) == [("good", "Good \\d module."), ("good.f", "A function.")]
