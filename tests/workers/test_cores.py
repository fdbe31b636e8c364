"""Tests of which cores a process may use, and of how workers share them."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.workers import cores


@given(st.integers(1, 300), st.integers(1, 300))
def test_core_groups_tile_the_cores(count: int, groups: int) -> None:
    """Groups cover the cores in order, differ by one at most, and are disjoint if cores suffice."""
    split = cores.split_cores(tuple(range(count)), groups)
    sizes = {len(group) for group in split}
    assert len(split) == groups
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    flat = [core for group in split for core in group]
    if groups <= count:
        assert flat == list(range(count))
    else:
        assert flat == sorted(flat)


def test_a_system_without_affinity_lends_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process has no affinity, it may use each core that there is."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cores, "cgroup_quota", lambda *_: math.inf)
    monkeypatch.delenv(cores.LENT_CORES, raising=False)
    assert sorted(cores.available_cores()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("count", "workers"), [(1, 1), (2, 2), (4, 2), (6, 2), (8, 2), (16, 4), (64, 16)]
)
def test_default_cpu_workers(count: int, workers: int) -> None:
    """The default is two workers on a small host, and one per four cores on a large one."""
    assert cores.cpu_workers_default(count) == workers


def test_quota_is_the_least_of_the_group_and_its_ancestors(tmp_path: Path) -> None:
    """A container of 1.5 cores under a slice of 4 has 1.5; "max" and missing files set no limit."""
    membership = tmp_path / "membership"
    group = tmp_path / "slice" / "box"
    group.mkdir(parents=True)
    assert cores.cgroup_quota(tmp_path, membership) == math.inf
    membership.write_text("3:cpu:/elsewhere\n0::/slice/box\n")
    assert cores.cgroup_quota(tmp_path, membership) == math.inf
    (group.parent / "cpu.max").write_text("400000 100000\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert cores.cgroup_quota(tmp_path, membership) == 4
    (group / "cpu.max").write_text("150000 100000\n")
    assert cores.cgroup_quota(tmp_path, membership) == 1.5


@pytest.mark.parametrize(("quota", "expected"), [(2.9, 2), (0.5, 1), (64, 8)])
def test_cores_respect_the_quota(
    quota: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota below the affinity cuts the cores, down to one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 18)), raising=False)
    monkeypatch.setattr(cores, "cgroup_quota", lambda _root, _membership: quota)
    assert len(cores.available_cores()) == expected


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with the cores 0 to 3 and 8 on one node, and 4 to 7 and 9 on another."""
    for node, listed in ((0, "0-3,8\n"), (1, "4-7,9\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed)
    monkeypatch.setattr(cores, "NODES", tmp_path)
    monkeypatch.setattr(cores, "cgroup_quota", lambda _root, _membership: math.inf)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)), raising=False)


@pytest.mark.usefixtures("two_nodes")
def test_cores_of_a_node_follow_each_other() -> None:
    """Workers on no device of their own have cores of one node, where that can be."""
    assert cores.share_cores([-1, -1]) == [(0, 1, 2, 3, 8), (4, 5, 6, 7, 9)]


@pytest.mark.usefixtures("two_nodes")
def test_devices_have_the_cores_of_their_node() -> None:
    """Devices on a node share its cores, but one of them alone has the cores of both."""
    assert cores.share_cores([1, 0, 1]) == [(4, 5), (0, 1, 2, 3, 8), (6, 7, 9)]
    assert cores.share_cores([1]) == [(0, 1, 2, 3, 8, 4, 5, 6, 7, 9)]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("own", "bound"),
    [((4, 5), {4, 5, 6, 7, 9}), ((8, 4), set(range(10))), ((), None), ((77,), None)],
)
def test_a_process_is_bound_to_the_nodes_of_its_cores(
    own: tuple[int, ...], bound: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may use all cores of its nodes, and those of no other one."""
    made = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, near: made.append(near), raising=False)
    cores.bind(own)
    assert made == ([] if bound is None else [bound])


def test_a_host_with_one_node_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without nodes, or with one, leaves processes where they are."""
    monkeypatch.setattr(cores, "core_nodes", lambda: {0: 0, 1: 0})
    monkeypatch.setattr(os, "sched_setaffinity", None, raising=False)
    cores.bind([0])


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(("quota", "lent"), [(4.0, ""), (math.inf, "4"), (6.5, "4")])
def test_a_part_of_a_host_binds_nothing(
    quota: float, lent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that have a number of cores, by a quota or as they are lent, are bound to no node."""
    monkeypatch.setattr(cores, "cgroup_quota", lambda _root, _membership: quota)
    monkeypatch.setenv(cores.LENT_CORES, lent)
    monkeypatch.setattr(os, "sched_setaffinity", None, raising=False)
    assert len(cores.available_cores()) == 4
    cores.bind([0, 1])
