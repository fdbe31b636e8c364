"""Tests of when it is said that a worker will have a model."""

import msgspec
import pytest

from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.load_forecast import UNKNOWN_SECONDS, seconds_until_loaded
from embedfarm.contract.model_states import ModelState, StateOfModel
from embedfarm.contract.records import Heartbeat
from tests.contract.little_job import heartbeat

NOW = 1000.0
SPEC = JobSpec(model="wanted")


def state(model: str, state: StateOfModel, since: float = 0.0, seconds: float = 0.0) -> ModelState:
    """Return the state of a model on a worker."""
    key = model_key(JobSpec(model=model))
    return ModelState(model=key, state=state, since=since, load_seconds=seconds)


def worker(*states: ModelState, yields: float = 10.0, says: str = "busy") -> Heartbeat:
    """Return the heartbeat of a worker."""
    return msgspec.structs.replace(
        heartbeat("w"), models=list(states), yields_in_seconds=yields, state=says
    )


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([], UNKNOWN_SECONDS),
        ([worker(state("wanted", "ready", seconds=4.0))], 1.0),
        ([worker(state("other", "ready", seconds=4.0))], 14.0),
        ([worker(state("other", "ready", seconds=4.0), yields=25.0)], 29.0),
        ([worker(state("other", "ready", seconds=4.0)), worker(yields=3.0)], 7.0),
        (
            [
                worker(state("other", "ready", seconds=6.0)),
                worker(state("wanted", "loading", since=NOW - 2.0)),
            ],
            4.0,
        ),
        ([worker(state("wanted", "loading", since=NOW - 2.0))], UNKNOWN_SECONDS - 2.0),
        ([worker(state("wanted", "loading", since=NOW - 500.0))], 1.0),
        ([worker(state("wanted", "failed"))], UNKNOWN_SECONDS),
        ([worker(state("wanted", "parked"))], 11.0),
        ([worker(state("wanted", "ready", seconds=4.0), says="draining")], UNKNOWN_SECONDS),
    ],
)
def test_forecast(beats: list[Heartbeat], expected: float) -> None:
    """The forecast is that of the worker which has the model first, by what all have loaded."""
    assert seconds_until_loaded(beats, SPEC, NOW) == expected
