"""The processor's cores: which of them this process may use, and which worker gets which."""

import math
import os
import platform
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

CPU_FACTS: Final = Path("/proc/cpuinfo")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP: Final = Path("/proc/self/cgroup")
NODES: Final = Path("/sys/devices/system/node")
LENT_CORES: Final = "EMBEDFARM_LENT_CORES"
"""Names a number of cores that workers may use, where a cluster lends them a part of a host."""


def available_cores() -> tuple[int, ...]:
    """Return the cores this process may use: its affinity, cut to the CPU quota of its cgroup.

    `EMBEDFARM_LENT_CORES` cuts them further. Those of a NUMA node follow each other.
    """
    cores = _permitted_cores()
    nodes = core_nodes()
    cores.sort(key=lambda core: nodes.get(core, 0))
    quota = cgroup_quota(CGROUP_ROOT, CGROUP_MEMBERSHIP)
    lent = int(os.environ.get(LENT_CORES) or len(cores))
    return tuple(cores[: max(1, math.floor(min(quota, lent, len(cores))))])


def _permitted_cores() -> list[int]:
    """Return the cores of this process's affinity, in order; all, where there is no such thing."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_nodes() -> dict[int, int]:
    """Return the NUMA node of each core; none where the system names no nodes."""
    return {
        core: int(folder.name.removeprefix("node"))
        for folder in NODES.glob("node[0-9]*")
        for core in _numbers((folder / "cpulist").read_text())
    }


def _numbers(listed: str) -> list[int]:
    """Read a list of numbers as the kernel writes it, such as "0-7,16"."""
    spans = [part.partition("-") for part in listed.strip().split(",") if part]
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def share_cores(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Share the available cores out among workers, one share for each.

    Args:
        nodes: The NUMA node of each worker's device, -1 for one that is on none. Workers on a node
            share the cores of that node, where each node has workers; otherwise all cores are
            shared by all.
    """
    cores, known = available_cores(), core_nodes()
    by_node: dict[int, list[int]] = {}
    for core in cores:
        by_node.setdefault(known.get(core, -1), []).append(core)
    if set(nodes) != set(by_node):
        return split_cores(cores, len(nodes))
    shares = {
        node: iter(split_cores(tuple(own), nodes.count(node))) for node, own in by_node.items()
    }
    return [next(shares[node]) for node in nodes]


def bind(cores: Sequence[int]) -> None:
    """Bind this process to all of the available cores on the NUMA nodes of some of them.

    A host with one node has nothing to bind. Where only a number of the cores is ours, such as by a
    quota, all who share the host would be bound to the same ones; there the kernel chooses.
    """
    nodes = core_nodes()
    available = available_cores()
    wanted = {nodes.get(core) for core in cores}
    near = {core for core in available if nodes.get(core) in wanted}
    whole = len(available) == len(_permitted_cores())
    if whole and len(set(nodes.values())) > 1 and near:
        os.sched_setaffinity(0, near)


def cgroup_quota(root: Path, membership: Path) -> float:
    """Return the cores that cgroup v2 grants in CPU time: the least of a group and those above.

    Args:
        root: Where cgroup v2 is mounted.
        membership: The process's `/proc/<pid>/cgroup`.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folders = [root / own, *(root / parent for parent in Path(own).parents)]
    limits = [folder / "cpu.max" for folder in folders]
    return min((_quota(limit.read_text()) for limit in limits if limit.exists()), default=math.inf)


def cpu_workers_default(cores: int) -> int:
    """Return the usual number of CPU workers: one for four cores, but two on a small host.

    Two workers hide each other's waits. There are no more workers than cores.
    """
    return min(cores, max(2, cores // 4))


def split_cores(cores: tuple[int, ...], groups: int) -> list[tuple[int, ...]]:
    """Split cores into contiguous groups, equal to within one; disjoint if cores are enough."""
    edges = [group * len(cores) // groups for group in range(groups + 1)] if groups else []
    return [cores[first : max(last, first + 1)] for first, last in pairwise(edges)]


def _quota(cpu_max: str) -> float:
    """Read the cores in a `cpu.max` line: "<quota> <period>" in microseconds, or "max <period>"."""
    quota, period = cpu_max.split()
    return math.inf if quota == "max" else int(quota) / int(period)


def cpu_name() -> str:
    """Return the processor's product name as the kernel knows it, else its architecture."""
    lines = CPU_FACTS.read_text().splitlines() if CPU_FACTS.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
