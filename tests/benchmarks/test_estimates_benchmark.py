"""Test of the benchmark of estimates."""

import sys

import pytest

from benchmarks import estimates


def test_estimates_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run prints the estimate and the truth of a corpus, whatever the bar says of them."""
    monkeypatch.setattr(sys, "argv", ["estimates", "--only", "mixed, null", "--scale", "0.02"])
    monkeypatch.setattr(estimates, "BAR", 9.0)
    estimates.main()
    assert "| mixed, null | " in capsys.readouterr().out
