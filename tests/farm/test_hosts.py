"""Tests of a farm on several hosts, with clocks of their own, on a network that fails."""

from pathlib import Path

import pytest

from benchmarks.hosts import Course, run

pytestmark = pytest.mark.system


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["server", "command", "worker"])
def test_a_host_that_is_cut_off_costs_nothing_but_time(tmp_path: Path, victim: int) -> None:
    """Lost packets, a host that is cut off for longer than a lease, and clocks hours apart.

    Every vector is compared at the end.
    """
    rates = run(tmp_path, Course(seconds=2.0, cut=12.0, victim=victim, speed=20_000.0))
    assert rates.clean > 0
