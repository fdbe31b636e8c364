"""Many clients at once, against a farm as `embedfarm up` starts it."""

from pathlib import Path

import pytest

from benchmarks.clients import GROWTH_ALLOWED, Report, measure
from benchmarks.corpora import MODEL


def check(report: Report) -> None:
    """Everybody got vectors, and no error but 429."""
    assert report.errors == 0, report.statuses
    assert len(report.latencies) > report.clients


@pytest.mark.alone
def test_many_clients(tmp_path: Path) -> None:
    """For some seconds, all but the model; more of them than redis-py has connections by itself."""
    check(measure(tmp_path, "null:384", 1, 120, 8))


@pytest.mark.slow
@pytest.mark.alone
def test_two_hundred_clients(tmp_path: Path) -> None:
    """For a minute, with a real model: no error but 429, and the memory of `serve` stays flat."""
    report = measure(tmp_path, MODEL, 1, 200, 60)
    check(report)
    assert report.growth < GROWTH_ALLOWED


def test_growth_is_of_medians() -> None:
    """From the first third to the last: a single peak is no growth, a slope is."""
    assert Report(1, rss_bytes=[100] * 5 + [900] + [100] * 6).growth == 0
    assert Report(1, rss_bytes=list(range(100, 190))).growth == pytest.approx(60 / 114.5)
