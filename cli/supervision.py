"""What `up`, `work` and `ingest` do while their child processes do the work."""

import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from embedfarm.contract.broker import UNAVAILABLE, host_name, name_worker, persist
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import ChildError
from embedfarm.contract.settings import Settings

WATCH_SECONDS = 0.5
LOOK_SECONDS = 0.1


class NameTaken(EmbedfarmError, RuntimeError):
    """Raised when a worker lives that has the name of one that is to start."""

    exit_status = 2


def keep(
    stop: threading.Event,
    failed: Callable[[], ChildError | None],
    is_ready: Callable[[], bool],
    tick: Callable[[], object],
    each: Callable[[], object] = lambda: None,
) -> None:
    """Watch over children until `stop`.

    Args:
        stop: Event that a signal sets.
        failed: Gives the error for which the children cannot go on, if there is one.
        is_ready: Tells whether the children have begun to work; asked until they have, and may
            raise what a server raises that is away.
        tick: Called in each round once the children are ready.
        each: Called in each round.

    Raises:
        ChildError: `failed` gave it.
    """
    ready = False
    while not stop.wait(WATCH_SECONDS):
        error = failed()
        if error is not None:
            raise error
        each()
        try:
            ready = ready or is_ready()
        except UNAVAILABLE:
            continue  # nobody is ready without a server
        if ready:
            tick()


def refuse_namesakes(
    farm: FarmClient, devices: Collection[str], settings: Settings, stop: threading.Event
) -> None:
    """Refuse to start workers whose names others have that live.

    A worker that died is on record until its last heartbeat lapses, and one that drains hands its
    name on; neither is in the way.

    Args:
        farm: The farm to work for.
        devices: Labels of the devices to work on.
        settings: The farm's limits: a worker that lives sends a heartbeat within two intervals,
            and a server that is away is waited for.
        stop: Event that ends the looking.

    Raises:
        NameTaken: A worker of one of these names has sent a heartbeat while it was looked at.
        One of `UNAVAILABLE`: The server stayed away, or `stop` was set while it was.
    """
    ask = partial(persist, stop=stop, seconds_max=settings.reconnect_seconds_max)
    names = {name_worker(device) for device in devices}
    found = [beat for beat in ask(farm.workers) if beat.worker in names]
    beats = {beat.worker: beat for beat in found if beat.state != "draining"}
    looks = {name: partial(farm.heartbeat_left_ms, name) for name in beats}
    left = {name: ask(look) for name, look in looks.items()}
    until = time.monotonic() + 2 * settings.heartbeat_seconds
    while beats and time.monotonic() < until and not stop.wait(LOOK_SECONDS):
        for name, beat in beats.items():
            before, left[name] = left[name], ask(looks[name])
            if left[name] > before:
                raise NameTaken(
                    f"{name} works for this farm already, as process {beat.pid}: if that is "
                    "another `embedfarm work` on this machine, stop it, or let the two have other "
                    "devices (--devices), or one of them all workers (--workers); if another "
                    f"machine is named {beat.host} too, rename one"
                )


def all_beat(farm: FarmClient, pids: Collection[int]) -> bool:
    """Tell whether all these processes of this host are workers that have sent a heartbeat."""
    alive = {beat.pid for beat in farm.workers() if beat.host == host_name()}
    return bool(pids) and alive.issuperset(pids)
