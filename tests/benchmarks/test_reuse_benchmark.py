"""Test of the benchmark of a corpus that changes."""

import sys

import pytest

from benchmarks import reuse


def test_what_is_taken_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run with the null engine compares every vector, after a kill too."""
    words = ["--corpus", "mixed", "--chunks", "200", "--kills", "1", "--model", "null:16"]
    monkeypatch.setattr(sys, "argv", ["reuse", *words])
    reuse.main()
    said = capsys.readouterr().out
    assert "200 texts, then 196, 10 of them new, 10 embedded" in said
    assert said.count("least cosine with a full run 1.000000") == 2


def test_what_repeats_is_embedded_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run with the null engine compares the output with one that embedded all."""
    words = ["--duplicates", "--corpus", "mixed", "--chunks", "200", "--model", "null:16"]
    monkeypatch.setattr(sys, "argv", ["reuse", *words])
    reuse.main()
    said = capsys.readouterr().out
    assert "200 texts, each twice" in said
    assert "least cosine with a full run 1.000000" in said
    assert "of forward passes" in said
