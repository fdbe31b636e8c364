"""The faults: each does its harm, and returns when the harm is over."""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import redis

from embedfarm.broker import UNAVAILABLE, closing_client
from embedfarm.settings import Settings
from tests.chaos.disks import full
from tests.chaos.roles import Deaths, Job, Role
from tests.chaos.servers import Servers
from tests.chaos.victims import Proof, Witness, nothing_to_show

HANG_SECONDS: Final = (1.0, 8.0)  # of a server, within and beyond what connections wait for
FREEZE_SECONDS: Final = (2.0, 20.0)  # of a process, within and beyond its lease
FULL_SECONDS: Final = (2.0, 6.0)
SWITCHED_SECONDS: Final = (3.0, 8.0)
LOST_SECONDS: Final = (0.2, 2.0)
FAILOVER: Final = "failover with loss"
SHORT: Final = 0.25  # of these times in the short form


@dataclass
class Scene:
    """What there is to shoot at.

    Attributes:
        servers: The server.
        roles: Processes by name.
        deaths: Is told of ends that are ours.
        job: The command that embeds; it changes.
        sink: The disk of its output.
        log: The disk of the server's log.
        switches: Directory of the switches of models.
        settings: The farm's.
        random: Decides.
        witness: Knows when a process is at work again.
        stretch: Factor of all times.
        proof: That what was hit last is at work again.
    """

    servers: Servers
    roles: dict[str, Role]
    deaths: Deaths
    job: Job
    sink: Path
    log: Path
    switches: Path
    settings: Settings
    random: random.Random
    witness: Witness
    stretch: float = 1.0
    proof: Proof = nothing_to_show

    def last(self, seconds: tuple[float, float]) -> None:
        """Let the harm last for some time."""
        threading.Event().wait(self.random.uniform(*seconds) * self.stretch)

    def pick(self, kind: str) -> Role:
        """A role by name, or any worker, which is hit next."""
        role = self.random.choice([r for name, r in self.roles.items() if name.startswith(kind)])
        self.proof = self.witness.proof(role.name, lambda: role.pid)
        return role

    def pick_job(self) -> Job:
        """The command that embeds, which is hit next."""
        self.proof = self.witness.proof("embed")
        return self.job


Fault = Callable[[Scene], None]


def kill(scene: Scene, kind: str) -> None:
    """SIGKILL."""
    scene.pick(kind).kill()


def restart(scene: Scene, kind: str) -> None:
    """SIGTERM, and a new process when it has drained."""
    scene.pick(kind).restart()


def freeze(scene: Scene, kind: str) -> None:
    """SIGSTOP, and later SIGCONT."""
    role = scene.pick(kind)
    role.signal(signal.SIGSTOP)
    scene.last(FREEZE_SECONDS)
    role.signal(signal.SIGCONT)


def signal_job(scene: Scene, number: signal.Signals) -> None:
    """SIGKILL or SIGTERM of the command that embeds; the same is typed again."""
    scene.pick_job().signal(number, scene.deaths)


def freeze_job(scene: Scene) -> None:
    """SIGSTOP and SIGCONT of the command that embeds."""
    job = scene.pick_job()
    job.signal(signal.SIGSTOP, scene.deaths)
    scene.last(FREEZE_SECONDS)
    job.signal(signal.SIGCONT, scene.deaths)


def kill_server(scene: Scene) -> None:
    """`kill -9`; its log is whole, since the system keeps what was written and not yet synced."""
    scene.servers.kill()


def pause_server(scene: Scene) -> None:
    """CLIENT PAUSE."""
    with closing_client(scene.servers.url) as client:
        client.client_pause(int(1000 * scene.random.uniform(*HANG_SECONDS) * scene.stretch))
        _wait_for_answer(client)


def block_server(scene: Scene) -> None:
    """DEBUG SLEEP: it answers nobody, and beats no heart."""
    with closing_client(scene.servers.url) as client:
        seconds = scene.random.uniform(*HANG_SECONDS) * scene.stretch
        with contextlib.suppress(*UNAVAILABLE):
            client.execute_command("DEBUG", "SLEEP", seconds)
        _wait_for_answer(client)


def _wait_for_answer(client: redis.Redis) -> None:
    """Returns when the server writes again."""
    with contextlib.suppress(*UNAVAILABLE):
        client.delete("chaos")


def fill_sink(scene: Scene) -> None:
    """No space is left on the disk of the output."""
    scene.pick_job()
    with full(scene.sink):
        scene.last(FULL_SECONDS)


def fill_log(scene: Scene) -> None:
    """No space is left for the server's log, so that it refuses writes."""
    with full(scene.log):
        scene.last(FULL_SECONDS)


def fill_memory(scene: Scene) -> None:
    """`maxmemory` is reached."""
    with closing_client(scene.servers.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        scene.last(FULL_SECONDS)
        client.config_set("maxmemory", scene.settings.redis_bytes_max)


def switch(scene: Scene, name: str) -> None:
    """A model that fails in one way."""
    path = scene.switches / name
    path.touch()
    scene.last(SWITCHED_SECONDS)
    path.unlink()


def fail_over(scene: Scene) -> None:
    """A replica that has not heard of the last writes takes the server's place."""
    scene.servers.fail_over(scene.random.uniform(*LOST_SECONDS))


def at(kind: str, verb: Callable[[Scene, str], None], scene: Scene) -> None:
    """A fault of one role."""
    verb(scene, kind)


def of_each(verb: Callable[[Scene, str], None], word: str, *kinds: str) -> dict[str, Fault]:
    """A fault of several roles, by name."""
    return {f"{word} {kind}": partial(at, kind, verb) for kind in kinds}


CHEAP: Final[Mapping[str, Fault]] = {
    **of_each(kill, "SIGKILL", "worker", "scheduler"),
    **of_each(freeze, "SIGSTOP", "worker"),
    **of_each(restart, "SIGTERM", "worker"),
    "SIGKILL embed": partial(signal_job, number=signal.SIGKILL),
    "SIGTERM embed": partial(signal_job, number=signal.SIGTERM),
    "SIGKILL server": kill_server,
    "CLIENT PAUSE": pause_server,
    "DEBUG SLEEP": block_server,
    "maxmemory": fill_memory,
    "model out of memory": partial(switch, name="memory"),
    FAILOVER: fail_over,
}
ALL: Final[Mapping[str, Fault]] = {
    **CHEAP,
    **of_each(kill, "SIGKILL", "ingest", "web"),
    **of_each(freeze, "SIGSTOP", "scheduler", "ingest", "web"),
    **of_each(restart, "SIGTERM", "scheduler", "ingest", "web"),
    "SIGSTOP embed": freeze_job,
    "disk full, sink": fill_sink,
    "disk full, log": fill_log,
    "model gives NaN": partial(switch, name="nan"),
}
