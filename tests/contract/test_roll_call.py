"""Tests of a roll call: it reads few heartbeats, and misses none."""

import msgspec
import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.roll_call import RollCall
from tests.contract import little_job
from tests.support import wait_until

LONG_SECONDS = 3600.0


def heartbeat(worker: str, state: str) -> Heartbeat:
    """Return a heartbeat of a worker in a state."""
    return msgspec.structs.replace(little_job.heartbeat(worker), state=state)


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm of two workers, in the millisecond after their heartbeats."""
    farm = FarmClient(client)
    for name in ("a", "b"):
        assert farm.beat(heartbeat(name, "idle"), LONG_SECONDS)
    came = server_ms(client)
    wait_until(lambda: server_ms(client) > came + 1, 10)
    return farm


def server_ms(client: redis.Redis) -> int:
    """Return the server's time in Unix milliseconds."""
    seconds, microseconds = client.time()
    return int(seconds * 1000 + microseconds // 1000)


def reads(client: redis.Redis) -> int:
    """Return how many heartbeats have been read so far."""
    figures = client.info("commandstats").get("cmdstat_hget", {})
    return int(figures.get("calls", 0))


def test_a_heartbeat_is_read_once(farm: FarmClient) -> None:
    """The next call reads nothing again, and has the same records."""
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    first, _ = roll.call()
    before = reads(farm.client)
    second, lost_seconds = roll.call()
    assert reads(farm.client) == before
    assert [each.worker for each in second] == ["a", "b"]
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert lost_seconds == {}


def test_a_new_heartbeat_is_read_at_once(farm: FarmClient) -> None:
    """A worker that has sent another one is read again, within the same second as well."""
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    first, _ = roll.call()
    for state in ("busy", "draining"):
        assert farm.beat(heartbeat("b", state), LONG_SECONDS)
        beats, _ = roll.call()
        assert [each.state for each in beats] == ["idle", state]
        assert beats[0] is first[0]


@pytest.mark.parametrize("early_ms", [0, 250])
def test_two_heartbeats_may_have_one_time(farm: FarmClient, early_ms: int) -> None:
    """A heartbeat is read again while its millisecond, or its second, has not gone by.

    Workers of an earlier release note whole seconds.
    """
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    second = farm.client.time()[0] + 1
    at = second + early_ms / 1000
    for state in ("idle", "busy", "draining"):
        farm.client.zadd(wire.WORKERS, {"b": at})
        farm.client.hset(wire.worker_key("b"), "heartbeat", encode(heartbeat("b", state)))
        assert [each.state for each in roll.call()[0]] == ["idle", state]


def test_a_second_that_has_gone_by_is_believed(farm: FarmClient) -> None:
    """A heartbeat of an earlier release is not read for ever either."""
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    farm.client.zadd(wire.WORKERS, {"b": farm.client.time()[0] - 1})
    roll.call()
    before = reads(farm.client)
    roll.call()
    assert reads(farm.client) == before


def test_an_old_heartbeat_is_no_new_one(farm: FarmClient) -> None:
    """A heartbeat that is read again, since it may have lapsed, is the same record as before."""
    roll = RollCall(farm.client)
    first, _ = roll.call()
    before = reads(farm.client)
    second, _ = roll.call()
    assert reads(farm.client) == before + 2
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_a_lost_worker_is_missed(farm: FarmClient) -> None:
    """A heartbeat that has lapsed is believed no longer than was said."""
    roll = RollCall(farm.client, fresh_seconds=0.2)
    roll.call()
    farm.client.delete(wire.worker_key("a"))
    wait_until(lambda: list(roll.call()[1]) == ["a"], 10)
    assert [each.worker for each in roll.call()[0]] == ["b"]


def test_a_lost_worker_is_asked_for_once(farm: FarmClient) -> None:
    """A worker that was lost is read again when it has sent another heartbeat, and not before."""
    farm.client.delete(wire.worker_key("a"))
    roll = RollCall(farm.client)
    assert list(roll.call()[1]) == ["a"]
    before = reads(farm.client)
    assert list(roll.call()[1]) == ["a"]
    assert reads(farm.client) == before + 1  # the live one, which may have lapsed
    assert farm.beat(heartbeat("a", "busy"), LONG_SECONDS)
    beats, lost_seconds = roll.call()
    assert ([each.state for each in beats], lost_seconds) == (["busy", "idle"], {})


def test_a_lost_worker_is_missed_after_a_jump_of_the_clock(farm: FarmClient) -> None:
    """A heartbeat that came later than it is now, by the server, is not believed."""
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    (second, _) = farm.client.time()
    farm.client.zadd(wire.WORKERS, {"a": second + LONG_SECONDS / 2 + 0.5})
    roll.call()
    farm.client.delete(wire.worker_key("a"))
    assert roll.call()[1] == {"a": 0.0}


def test_a_worker_that_left_is_not_missed(farm: FarmClient) -> None:
    """A worker that left is neither alive nor lost at the next call, and may come again."""
    roll = RollCall(farm.client, fresh_seconds=LONG_SECONDS)
    roll.call()
    farm.leave("a")
    beats, lost_seconds = roll.call()
    assert ([each.worker for each in beats], lost_seconds) == (["b"], {})
    assert farm.beat(heartbeat("a", "busy"), LONG_SECONDS)
    assert [each.state for each in roll.call()[0]] == ["busy", "idle"]


def test_what_cannot_be_read_is_told(farm: FarmClient) -> None:
    """A heartbeat of odd bytes counts as neither alive nor lost, and is told each time."""
    told: list[str] = []
    roll = RollCall(farm.client, lambda place, _why: told.append(place), LONG_SECONDS)
    roll.call()
    odd = msgspec.msgpack.encode(["odd"])
    farm.client.hset(wire.worker_key("b"), "heartbeat", odd)
    farm.client.zadd(wire.WORKERS, {"b": farm.client.time()[0] + 0.25})
    for _ in range(2):
        beats, lost_seconds = roll.call()
        assert ([each.worker for each in beats], lost_seconds) == (["a"], {})
    assert told == 2 * [wire.worker_key("b")]
