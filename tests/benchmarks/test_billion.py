"""Tests of what a billion chunks are reckoned to take."""

from dataclasses import replace

import pytest

from benchmarks.billion import BILLION, Took, cost_of, describe

SMALL = Took(
    chunks=100,
    chunks_per_second=50.0,
    server_seconds=3.0,
    server_bytes=20_000_000,
    command_bytes=40_000_000,
    manifest_bytes=1_200,
    digest_bytes=1_600,
)
LARGE = replace(SMALL, chunks=300, server_seconds=5.0, manifest_bytes=1_600, digest_bytes=4_800)


def test_costs_are_the_line_through_two_jobs() -> None:
    """What the larger job took more is what chunks cost; what did not grow costs nothing."""
    cost = cost_of(SMALL, LARGE, "server_seconds")
    assert cost.each == pytest.approx(0.01)
    assert cost.fixed == pytest.approx(2.0)
    assert cost.of(BILLION) == pytest.approx(10_000_002)
    assert cost_of(SMALL, LARGE, "command_bytes").of(BILLION) == SMALL.command_bytes


def test_what_is_said_of_a_billion() -> None:
    """Tables and sizes are those of the two jobs, drawn out to a billion."""
    said = describe({"inline": (SMALL, LARGE), "stored": (SMALL, LARGE)})
    assert "take 16 GB on the disk, and the manifest 2,000 MB" in said
    hours = f"{BILLION / 50 / 3600:.1f}"
    assert f"| stored | 50 | {hours} | 2777.8 | 20 MB | 0.2 TB | 40 and 40 MB |" in said
    assert f"| inline | 50 | {hours} | 2777.8 | 20 MB | 1.7 TB | 40 and 40 MB |" in said
