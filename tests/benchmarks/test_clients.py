"""Tests of many clients at once, against a farm as `embedfarm up` starts it."""

from pathlib import Path

import pytest

from benchmarks.clients import GROWTH_ALLOWED, Report, measure
from benchmarks.corpora import MODEL


def check(report: Report) -> None:
    """Assert that everybody got vectors, and no error but 429."""
    assert report.errors == 0, report.statuses
    assert len(report.latencies) > report.clients


def test_many_clients(tmp_path: Path) -> None:
    """More clients than redis-py has connections by default get vectors from the null model."""
    check(measure(tmp_path, "null:384", 1, 120, 4))


@pytest.mark.slow
@pytest.mark.alone
def test_two_hundred_clients(tmp_path: Path) -> None:
    """A minute of 200 clients gives no error but 429, and the memory of `serve` stays flat."""
    report = measure(tmp_path, MODEL, 1, 200, 60)
    check(report)
    assert report.growth < GROWTH_ALLOWED


def test_growth_is_of_medians() -> None:
    """Growth compares the medians of first and last third: a single peak is none, a slope is."""
    assert Report(1, rss_bytes=[100] * 5 + [900] + [100] * 6).growth == 0
    assert Report(1, rss_bytes=list(range(100, 190))).growth == pytest.approx(60 / 114.5)
