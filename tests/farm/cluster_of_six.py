"""A cluster of three primaries, with a replica each, on loopback."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from embedfarm.contract.settings import Settings
from tests.support import LiveServer, free_port, wait_until

PRIMARIES: Final = 3
NODE_TIMEOUT_MS: Final = 4000  # a primary that is only starved must not be taken for a dead one


class ClusterOfSix:
    """Six servers; the first three are primaries at first."""

    def __init__(self, directory: Path, kind: str) -> None:
        ports = [free_port() for _ in range(2 * PRIMARIES)]
        self.ports = dict(enumerate(ports))
        self._bus = {port: free_port() for port in ports}
        self._ids = [secrets.token_hex(20) for _ in ports]
        homes = [directory / f"node-{port}" for port in ports]
        self._files = [home / "nodes.conf" for home in homes]
        self.servers = [self._server(*each, kind) for each in zip(homes, ports, strict=True)]

    @property
    def url(self) -> str:
        """URL that names two of the six."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{self.ports[n]}" for n in (0, 1))

    def node(self, number: int) -> redis.Redis:
        """Return a client of one server alone."""
        return redis.Redis(port=self.ports[number], decode_responses=True)

    def owner(self, job: str) -> int:
        """Return the number of the server that is the primary of a job."""
        slot = key_slot(job.encode())
        for first, last, (_, port, *_), *_ in self._ask(0, "CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(n for n, each in self.ports.items() if each == port)
        raise LookupError(job)

    def move(self, job: str, target: int) -> None:
        """Move the slot of a job from its primary to another one, key by key, as operators do."""
        slot, source = key_slot(job.encode()), self.begin_move(job, target)
        while keys := self._ask(source, "CLUSTER GETKEYSINSLOT", slot, 1):
            self._ask(
                source, "MIGRATE", "127.0.0.1", self.ports[target], "", 0, 5000, "KEYS", *keys
            )
        name = self._ask(target, "CLUSTER MYID")
        for each in (target, source):
            self._ask(each, "CLUSTER SETSLOT", slot, "NODE", name)

    def begin_move(self, job: str, target: int) -> int:
        """Tell both primaries that the slot of a job is about to move; return the one it is on."""
        slot, source = key_slot(job.encode()), self.owner(job)
        ids = {n: self._ask(n, "CLUSTER MYID") for n in (source, target)}
        self._ask(target, "CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        self._ask(source, "CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        return source

    def cancel_move(self, job: str, *primaries: int) -> None:
        """Tell both primaries that the slot of a job stays where it is."""
        for each in primaries:
            self._ask(each, "CLUSTER SETSLOT", key_slot(job.encode()), "STABLE")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run all servers, and yield once each slot has its primary and replica."""
        with contextlib.ExitStack() as stack:
            for number, server in enumerate(self.servers):
                stack.callback(server.stop)
                self._write_nodes(number)
                server.start()
            wait_until(self.is_ready, 60)
            yield

    def is_ready(self) -> bool:
        """Tell whether every server takes part, and each slot has a primary and a replica."""
        return all(map(self._is_in_step, self.ports))

    def _write_nodes(self, number: int) -> None:
        """Write what a server knows of the cluster, as one that was in it; meeting takes long."""
        lines = []
        for other, port in self.ports.items():
            shard = other % PRIMARIES
            first, behind = (n * REDIS_CLUSTER_HASH_SLOTS // PRIMARIES for n in (shard, shard + 1))
            role, slots = f"slave {self._ids[shard]}", ""
            if other == shard:
                role, slots = "master -", f" {first}-{behind - 1}"
            myself = "myself," if other == number else ""
            where = f"{self._ids[other]} 127.0.0.1:{port}@{self._bus[port]}"
            lines.append(f"{where} {myself}{role} 0 0 {1 + shard} connected{slots}")
        lines.append(f"vars currentEpoch {PRIMARIES} lastVoteEpoch 0")
        self._files[number].parent.mkdir(parents=True, exist_ok=True)
        self._files[number].write_text("".join(f"{line}\n" for line in lines))

    def _server(self, directory: Path, port: int, kind: str) -> LiveServer:
        words = {
            "port": port,
            "bind": "127.0.0.1",
            "cluster-enabled": "yes",
            "cluster-port": self._bus[port],
            "cluster-config-file": directory / "nodes.conf",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            "repl-diskless-sync-delay": 0,
            "repl-ping-replica-period": 1,  # a replica that has heard nothing yet is not shown
        }
        options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        return LiveServer(directory, kind, Settings(), f"redis://127.0.0.1:{port}", options)

    def _ask(self, number: int, *words: object) -> Any:  # noqa: ANN401 # whatever it answers
        with self.node(number) as client:
            return client.execute_command(*words)

    def _is_in_step(self, number: int) -> bool:
        ranges = self._ask(number, "CLUSTER SLOTS")
        whole = sorted(len(nodes) for _, _, *nodes in ranges) == [2] * PRIMARIES
        with self.node(number) as client:
            facts = client.info("replication")
            takes_writes = client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
        in_step = facts["role"] == "master" or facts["master_link_status"] == "up"
        return whole and in_step and takes_writes
