"""Memory of this host, as far as this process may use it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")


class AvailableMemory(NamedTuple):
    """Bytes of memory of a host or a device.

    Attributes:
        total: All that this process and others may use.
        free: Those of them that nobody uses, or only as a cache.
    """

    total: int
    free: int


def host_memory() -> AvailableMemory:
    """Return the memory of this host, or of the control group (v2) that has least left."""
    host = psutil.virtual_memory()
    found = [AvailableMemory(host.total, host.available), *_limits()]
    return AvailableMemory(min(each.total for each in found), min(each.free for each in found))


def _limits() -> Iterator[AvailableMemory]:
    """Yield the limits of the control groups that this process is in, if there are any."""
    for directory in _groups():
        try:
            limit = (directory / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((directory / "memory.current").read_text())
            lines = (directory / "memory.stat").read_text().splitlines()
        except FileNotFoundError:
            continue  # the root has no limit, and a host may have groups of another kind
        counts = dict(line.split() for line in lines)
        cached = int(counts.get("inactive_file", 0))
        yield AvailableMemory(int(limit), max(0, int(limit) - used + cached))


def _groups() -> Iterator[Path]:
    """Yield the directories of this process's control groups, its own one first."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except FileNotFoundError:
        return
    own = next((line.partition("0::")[2] for line in lines if line.startswith("0::")), None)
    if own is not None:
        group = GROUPS / own.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(GROUPS))
