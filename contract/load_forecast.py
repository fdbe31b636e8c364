"""Forecast of when a worker will have a model that a request waits for in vain."""

import statistics
from collections.abc import Collection, Iterator
from typing import Final

from embedfarm.contract.job_spec import JobSpec, weights_key, weights_of
from embedfarm.contract.model_states import ready
from embedfarm.contract.records import Heartbeat

SOON_SECONDS: Final = 1.0
UNKNOWN_SECONDS: Final = 30.0  # of a loading, where no model has been loaded yet


def seconds_until_loaded(beats: Collection[Heartbeat], spec: JobSpec, now: float) -> float:
    """Return the seconds after which it is worth to ask again for a model, at least one.

    Args:
        beats: Heartbeats of the live workers.
        spec: What the request asked for.
        now: Unix time of the workers' clocks.
    """
    known = [state.load_seconds for beat in beats for state in ready(beat.models)]
    usual = statistics.median(known) if known else UNKNOWN_SECONDS
    found = (each for beat in beats for each in _seconds(beat, weights_key(spec), usual, now))
    return max(SOON_SECONDS, min(found, default=UNKNOWN_SECONDS))


def _seconds(beat: Heartbeat, weights: str, usual: float, now: float) -> Iterator[float]:
    """Yield the time after which a worker may have a model; nothing if it is to leave."""
    if beat.state == "draining":
        return
    states = {weights_of(each.model): each for each in beat.models}
    state = states.get(weights)
    if state is None or state.state == "parked":
        yield beat.yields_in_seconds + (usual if state is None else SOON_SECONDS)
    elif state.state == "ready":
        yield SOON_SECONDS
    elif state.state == "loading":
        yield usual - (now - state.since)
