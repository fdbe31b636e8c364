"""One child process for each device, each pinned by its environment before it starts."""

import logging
import signal
import threading
from collections.abc import Callable
from typing import Final

from embedfarm.contract.broker import UNAVAILABLE, closing_client, name_process, name_worker
from embedfarm.contract.farm_timeline import FarmEvent, Timeline
from embedfarm.contract.processes import RUN_ROLE, Child, Exit
from embedfarm.contract.settings import Settings
from embedfarm.workers.devices import Device

WORKER: Final = "worker-"  # begins the name of each

log = logging.getLogger(__name__)


def children(devices: list[Device], settings: Settings) -> list[Child]:
    """Return the worker processes of these devices; the server is `settings.redis_url`."""
    return [
        Child(
            name=f"{WORKER}{device.label}",
            command=[
                *(*RUN_ROLE, "embedfarm.workers.main", "--device", device.label),
                *("--cores", ",".join(map(str, device.cores))),
            ],
            environment=settings.environment() | device.environment(),
        )
        for device in devices
    ]


def tell_exits(url: str) -> Callable[[Exit], None]:
    """Return a function that tells the farm's timeline of processes that ended unasked.

    It is for a supervisor, and returns at once: a server that is away delays no new start.
    """
    return lambda ended: threading.Thread(target=_tell, args=(url, ended), daemon=True).start()


def _tell(url: str, ended: Exit) -> None:
    """Add the end of a process that starts again to the timeline."""
    if not ended.restarted:
        return
    is_worker = ended.name.startswith(WORKER)
    name = name_worker(ended.name.removeprefix(WORKER))
    process = name if is_worker else name_process(ended.name)
    note = f"{describe_exit(ended.status)}; it is started again (restart {ended.count})"
    event = FarmEvent(kind="ended", worker=process, note=note)
    try:
        with closing_client(url) as client:
            Timeline(client).add(event)
    except UNAVAILABLE as error:
        log.warning("%s; the timeline does not say so, server away: %s", event.sentence(), error)


def describe_exit(status: int) -> str:
    """Return how a process ended, by its exit status, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
