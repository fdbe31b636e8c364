"""Test of the benchmark of the vector cache."""

import sys

import pytest

from benchmarks import vector_cache


def test_what_is_cached_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that follow each other find half of a corpus, then all, and compare each vector."""
    words = ["--corpus", "mixed", "--chunks", "300", "--model", "null:16"]
    monkeypatch.setattr(sys, "argv", ["vector_cache", *words])
    vector_cache.main()
    said = capsys.readouterr().out
    assert "half: 200 chunks, 100 cached" in said
    assert "all: 200 chunks, 200 cached" in said
    assert said.count("least cosine with a full run 1.000000") == 2


def test_rates_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few vectors are enough to see that all of them are found."""
    words = ["--rates", "--entries", "100", "--dimensions", "16"]
    monkeypatch.setattr(sys, "argv", ["vector_cache", *words])
    vector_cache.main()
    assert "8,192 vectors of 16 dimensions" in capsys.readouterr().out
