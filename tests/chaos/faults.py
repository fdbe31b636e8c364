"""Faults of a run: each does its harm, and returns when the harm is over."""

import contextlib
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import redis

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from tests.chaos.changes import change_read, change_stopped, make_anew
from tests.chaos.children import freeze_child, signal_child, wait_for_child
from tests.chaos.disks import full
from tests.chaos.roles import EMBED_DISK, INGEST_DISK
from tests.chaos.scene import FREEZE_SECONDS, Scene

HANG_SECONDS: Final = (1.0, 8.0)  # of a server, within and beyond what connections wait for
FULL_SECONDS: Final = (2.0, 6.0)
FAILING_SECONDS: Final = (2.0, 6.0)
SWITCHED_SECONDS: Final = (3.0, 8.0)
LOST_SECONDS: Final = (0.2, 2.0)
FAILOVER: Final = "failover with loss"
SHORT: Final = 0.25  # of these times in the short form


Fault = Callable[[Scene], None]


def kill(scene: Scene, kind: str) -> None:
    """Kill a process of a role."""
    scene.pick(kind).kill()


def restart(scene: Scene, kind: str) -> None:
    """Terminate a process of a role, and start a new one when it has drained."""
    scene.pick(kind).restart()


def freeze(scene: Scene, kind: str) -> None:
    """Stop a process of a role, as by SIGSTOP, and let it go on later."""
    role = scene.pick(kind)
    role.signal(signal.SIGSTOP)
    scene.last(FREEZE_SECONDS)
    role.signal(signal.SIGCONT)


def signal_job(scene: Scene, number: signal.Signals) -> None:
    """Signal the command that embeds, which is then typed again."""
    scene.pick_job().signal(number)


def freeze_job(scene: Scene) -> None:
    """Stop the command that embeds, as by SIGSTOP, and let it go on later."""
    job = scene.pick_job()
    job.signal(signal.SIGSTOP)
    scene.last(FREEZE_SECONDS)
    job.signal(signal.SIGCONT)


def kill_server(scene: Scene) -> None:
    """Kill the server; its log is whole, since the system keeps what was not yet synced."""
    scene.world.servers.kill()


def pause_server(scene: Scene) -> None:
    """Stop the server's clients by CLIENT PAUSE for some seconds."""
    with closing_client(scene.world.servers.url) as client:
        client.client_pause(int(1000 * scene.random.uniform(*HANG_SECONDS) * scene.stretch))
        _wait_for_answer(client)


def block_server(scene: Scene) -> None:
    """Block the server by DEBUG SLEEP, so that it answers nobody."""
    with closing_client(scene.world.servers.url) as client:
        seconds = scene.random.uniform(*HANG_SECONDS) * scene.stretch
        with contextlib.suppress(*UNAVAILABLE):
            client.execute_command("DEBUG", "SLEEP", seconds)
        _wait_for_answer(client)


def _wait_for_answer(client: redis.Redis) -> None:
    """Wait until the server writes again."""
    with contextlib.suppress(*UNAVAILABLE):
        client.delete("chaos")


def fill_sink(scene: Scene) -> None:
    """Fill the disk of the output for some time."""
    scene.pick_job()
    with full(scene.sink):
        scene.last(FULL_SECONDS)


def fail_disk(scene: Scene, name: str) -> None:
    """Make syncs and writes of a command fail, and with them the command, for some time."""
    if name == EMBED_DISK:
        scene.pick_job()
    else:
        wait_for_child(scene, "command")
        scene.pick("ingest")
    switch = scene.world.switches / name
    with scene.world.failing.one():
        switch.touch()
        scene.last(FAILING_SECONDS)
        switch.unlink()


def fill_log(scene: Scene) -> None:
    """Fill the disk of the server's log, so that it refuses writes, for some time."""
    with full(scene.log):
        scene.last(FULL_SECONDS)


def fill_memory(scene: Scene) -> None:
    """Set `maxmemory` to half of what is used, for some time."""
    with closing_client(scene.world.servers.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        scene.last(FULL_SECONDS)
        client.config_set("maxmemory", scene.world.settings.redis_bytes_max)


def switch(scene: Scene, name: str) -> None:
    """Make the model fail in one way, for some time."""
    path = scene.world.switches / name
    path.touch()
    scene.last(SWITCHED_SECONDS)
    path.unlink()


def fail_over(scene: Scene) -> None:
    """Put a replica that has not heard of the last writes in the server's place."""
    scene.world.servers.fail_over(scene.random.uniform(*LOST_SECONDS))


def at(kind: str, verb: Callable[[Scene, str], None], scene: Scene) -> None:
    """Do a fault to one role."""
    verb(scene, kind)


def of_each(verb: Callable[[Scene, str], None], word: str, *kinds: str) -> dict[str, Fault]:
    """Return a fault for each of several roles, by name."""
    return {f"{word} {kind}": partial(at, kind, verb) for kind in kinds}


CHEAP: Final[Mapping[str, Fault]] = {
    **of_each(kill, "SIGKILL", "worker", "scheduler"),
    **of_each(freeze, "SIGSTOP", "worker"),
    **of_each(restart, "SIGTERM", "worker"),
    "SIGKILL embed": partial(signal_job, number=signal.SIGKILL),
    "SIGTERM embed": partial(signal_job, number=signal.SIGTERM),
    "corpus changed, embed stopped": change_stopped,
    "job failed and made anew, worker asleep": make_anew,
    "disk fails, embed": partial(fail_disk, name=EMBED_DISK),
    "SIGKILL command of ingest": partial(signal_child, "command", number=signal.SIGKILL),
    "SIGKILL server": kill_server,
    "CLIENT PAUSE": pause_server,
    "DEBUG SLEEP": block_server,
    "maxmemory": fill_memory,
    "model out of memory": partial(switch, name="memory"),
    FAILOVER: fail_over,
}
ALL: Final[Mapping[str, Fault]] = {
    **CHEAP,
    "corpus changed, embed reading": change_read,
    "SIGINT embed": partial(signal_job, number=signal.SIGINT),
    **of_each(kill, "SIGKILL", "ingest", "web"),
    **of_each(freeze, "SIGSTOP", "scheduler", "ingest", "web"),
    **of_each(restart, "SIGTERM", "scheduler", "ingest", "web"),
    **{
        f"{number.name} {which} of ingest": partial(signal_child, which, number=number)
        for which in ("command", "job process")
        for number in (signal.SIGKILL, signal.SIGTERM)
    },
    "SIGSTOP command of ingest": partial(freeze_child, "command"),
    "SIGSTOP job process of ingest": partial(freeze_child, "job process"),
    "disk fails, ingest": partial(fail_disk, name=INGEST_DISK),
    "SIGSTOP embed": freeze_job,
    "disk full, sink": fill_sink,
    "disk full, log": fill_log,
    "model gives NaN": partial(switch, name="nan"),
}
