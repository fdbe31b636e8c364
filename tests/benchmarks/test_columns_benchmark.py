"""Test of the benchmark of columns that are kept."""

import sys

import pytest

from benchmarks import columns


def test_columns_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run embeds without and with columns, and compares all of them."""
    words = ["--chunks", "3000", "--rounds", "1", "--dimensions", "16"]
    monkeypatch.setattr(sys, "argv", ["columns", *words])
    columns.main()
    said = capsys.readouterr().out
    assert "all columns of 3,000 rows are equal" in said
    assert "of the time" in said
