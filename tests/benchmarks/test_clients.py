"""Many clients at once, against a farm as `embedfarm up` starts it."""

from pathlib import Path

import pytest

from benchmarks.clients import GROWTH_ALLOWED, Report, measure
from benchmarks.corpora import MODEL


def check(report: Report) -> None:
    """No error but 429, and memory that stays where it was."""
    assert report.errors == 0, report.statuses
    assert len(report.latencies) > report.clients
    assert report.growth < GROWTH_ALLOWED


@pytest.mark.alone
def test_fifty_clients(tmp_path: Path) -> None:
    """For some seconds, everything but the model: all get vectors, or are asked to come again."""
    check(measure(tmp_path, "null:384", 1, 50, 8))


@pytest.mark.slow
@pytest.mark.alone
def test_two_hundred_clients(tmp_path: Path) -> None:
    """For a minute, with a real model: no error but 429, and the memory of `serve` stays flat."""
    check(measure(tmp_path, MODEL, 1, 200, 60))


def test_growth_is_of_medians() -> None:
    """From the first third to the last: a single peak is no growth, a slope is."""
    assert Report(1, rss_bytes=[100] * 5 + [900] + [100] * 6).growth == 0
    assert Report(1, rss_bytes=list(range(100, 190))).growth == pytest.approx(60 / 114.5)
