"""What `up`, `work` and `ingest` do while their child processes do the work."""

import threading
from collections.abc import Callable, Collection

from embedfarm.contract.broker import UNAVAILABLE, host_name
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import ChildError

WATCH_SECONDS = 0.5


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


def all_beat(farm: FarmClient, pids: Collection[int]) -> bool:
    """Tell whether all these processes of this host are workers that have sent a heartbeat."""
    alive = {beat.pid for beat in farm.workers() if beat.host == host_name()}
    return bool(pids) and alive.issuperset(pids)
