"""Processes below `ingest` that do an RQ job: the one that RQ forks, and the command."""

import signal
from contextlib import suppress
from typing import Final, Literal

import psutil

from embedfarm.contract.processes import RUN_MODULE
from tests.chaos.scene import FREEZE_SECONDS, Scene
from tests.support import wait_until

Which = Literal["command", "job process"]
WORDS: Final = (*RUN_MODULE[1:], "embedfarm", "embed")
CATCH_SECONDS: Final = 60.0  # until a job runs


def find_child(role: int, which: Which) -> psutil.Process | None:
    """Return the process below a role that does an RQ job now, None without one."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        for each in psutil.Process(role).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if tuple(each.cmdline()[1 : 1 + len(WORDS)]) == WORDS:
                    return each if which == "command" else each.parent()
    return None


def wait_for_child(scene: Scene, which: Which) -> psutil.Process:
    """Return the process that does an RQ job, as soon as there is one.

    Raises:
        TimeoutError: There is none within a minute.
    """
    found = list[psutil.Process]()

    def look() -> bool:
        child = find_child(scene.roles["ingest"].pid, which)
        found[:] = [] if child is None else [child]
        return bool(found)

    wait_until(look, CATCH_SECONDS)
    return found[0]


def signal_child(which: Which, scene: Scene, number: signal.Signals) -> None:
    """Signal the process that does an RQ job, which is then resumed."""
    child = wait_for_child(scene, which)
    scene.pick("ingest")
    with suppress(psutil.NoSuchProcess):  # it may have come to its end by itself
        child.send_signal(number)


def freeze_child(which: Which, scene: Scene) -> None:
    """Stop the process that does an RQ job, as by SIGSTOP, and let it go on later."""
    child = wait_for_child(scene, which)
    scene.pick("ingest")
    with suppress(psutil.NoSuchProcess):
        child.suspend()
        scene.last(FREEZE_SECONDS)
        child.resume()
