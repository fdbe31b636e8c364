"""Tests of what `embedfarm up` waits for before it says that a farm is ready."""

import threading

import msgspec
import redis

from embedfarm.cli.up import WarmUp
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.lane import Lane
from embedfarm.contract.records import LaneAnswer
from embedfarm.contract.settings import Settings
from tests.contract.little_job import heartbeat
from tests.support import LiveServer, wait_until

SPEC = JobSpec(model="null:2")
TTL_SECONDS = 60.0


def test_a_model_is_loaded_once_everybody_sees_it(server: LiveServer, client: redis.Redis) -> None:
    """A model counts as loaded once a heartbeat names it, and not as soon as a worker answers."""
    farm, lane = FarmClient(client), Lane(client)
    farm.beat(heartbeat("w"), TTL_SECONDS)
    warm_up = WarmUp(farm, server.url, SPEC.model, Settings())
    assert not warm_up.is_done()
    engine = engine_key(SPEC)
    wait_until(lambda: lane.waiting(engine))
    [asking] = [each for each in threading.enumerate() if each.name == "warm"]
    [taken] = lane.take(engine, "w", 1)
    vector = LaneAnswer(place=0, dimensions=2, vectors=bytes(8), token_count=1)
    lane.answer(engine, [(taken.entry, taken.id, vector)])
    asking.join(TTL_SECONDS)
    assert not warm_up.is_done()
    named = msgspec.structs.replace(heartbeat("w"), model=model_key(SPEC))
    farm.beat(named, TTL_SECONDS)
    assert warm_up.is_done()
