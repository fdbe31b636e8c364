"""A Ray cluster of several nodes on this machine, each with processes of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

STORE_BYTES: Final = 80_000_000  # of a node, the least that Ray takes
NODE: Final = {"object_store_memory": STORE_BYTES}
QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0"}


class RayNodes:
    """A Ray cluster: a head without CPUs, and nodes that may be killed.

    Attributes:
        address: Where programs join it, as `RAY_ADDRESS`.
    """

    def __init__(self, nodes: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 -- only `make ray` has it

        head = NODE | {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}
        for _ in range(nodes):
            self.add(cpus)
        self.address = str(self._cluster.address)

    def add(self, cpus: int) -> str:
        """Add a node, and return its id."""
        node = self._cluster.add_node(num_cpus=cpus, **NODE)
        self.nodes[node.node_id] = node
        return str(node.node_id)

    @property
    def logs(self) -> Path:
        """The directory of all that Ray has written."""
        return Path(self._cluster.head_node.get_session_dir_path())

    def processes(self, node: str) -> list[psutil.Process]:
        """Return all processes of a node, with those that its actors have started."""
        found = []
        for kept in self.nodes[node].all_processes.values():
            for each in kept:
                with contextlib.suppress(psutil.NoSuchProcess):
                    own = psutil.Process(each.process.pid)
                    found += [own, *own.children(recursive=True)]
        return found

    def command_lines(self) -> list[str]:
        """Return what a list of processes shows of all nodes, and what they have started."""
        found = []
        for each in (process for node in self.nodes for process in self.processes(node)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none either
                found.append(" ".join(each.cmdline()))
        assert any("embedfarm.workers.main" in line for line in found)
        return found

    def of_process(self, pid: int) -> str:
        """Return the id of the node that a process is of; "" for none."""
        own = (n for n in self.nodes if pid in {each.pid for each in self.processes(n)})
        return next(own, "")

    def kill(self, node: str) -> None:
        """Kill all of a node at once, as a host dies."""
        for each in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._cluster.remove_node(self.nodes.pop(node), allow_graceful=False)

    def announce_end(self, node: str, seconds: int) -> None:
        """Tell Ray that a node will be gone in some seconds, as a preempted one says."""
        words = ["ray", "drain-node", "--address", self.address, "--node-id", node]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        words += ["--deadline-remaining-seconds", str(seconds)]
        words[0] = str(Path(sys.executable).parent / "ray")
        subprocess.run(words, check=True)

    def stop(self) -> None:
        """End all processes of the cluster."""
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(nodes: int, cpus: int) -> Iterator[RayNodes]:
    """Run a Ray cluster for the block."""
    os.environ.update(QUIET)
    cluster = RayNodes(nodes, cpus)
    try:
        yield cluster
    finally:
        cluster.stop()
