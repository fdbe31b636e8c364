"""Tests that memory stays bounded, whatever the corpus, without a model."""

import json
from pathlib import Path

import pytest

from benchmarks.processes import Usage
from benchmarks.transport import MEBIBYTE, run, to_json


def is_flat(usage: Usage) -> bool:
    """Tell whether the last third of a run peaked at most 15 % above the middle third."""
    third = len(usage.rss_bytes) // 3
    middle, last = usage.rss_bytes[third : 2 * third], usage.rss_bytes[2 * third :]
    return max(last) <= 1.15 * max(middle)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """The server stays under 200 MB and every process is flat over 200,000 chunks."""
    report = run(tmp_path, 200_000, 2)
    assert report.usage["server"].rss_bytes_max < 200e6
    long_lived = {name: each for name, each in report.usage.items() if len(each.rss_bytes) > 10}
    assert not [name for name, each in long_lived.items() if not is_flat(each)]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """A short run of the benchmark embeds all chunks, with a bounded server."""
    report = run(tmp_path, 20_000, 2)
    assert report.chunks == 20_000
    assert 0 < report.usage["server"].rss_bytes_max < 200 * MEBIBYTE
    assert json.loads(to_json(report))["usage"].keys() == report.usage.keys()
