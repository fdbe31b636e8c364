"""Tests of the count of loads that end the process they run in."""

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.load_attempts import LoadAttempts, LoadLedger

MINUTES = 60.0


@pytest.fixture
def loads(client: redis.Redis) -> LoadLedger:
    """The loads of a farm."""
    return FarmClient(client).loads


def test_the_fourth_load_has_to_wait(loads: LoadLedger) -> None:
    """Three loads without an end may begin; then the model is left alone by that worker only."""
    assert [loads.begin("one", "m") for _ in range(3)] == [None] * 3
    found = loads.begin("one", "m")
    assert found is not None
    assert found.count == 3
    assert "3 times in a row the worker's process ended" in found.sentence()
    assert loads.begin("two", "m") is None
    assert loads.begin("one", "other") is None


def test_an_end_is_the_end(loads: LoadLedger) -> None:
    """A load that came to an end, and all before it, count no more."""
    for _ in range(9):
        assert loads.begin("one", "m") is None
        loads.end("one", "m")
    assert loads.attempts("one", "m").count == 0


def test_a_load_that_hangs_is_not_begun_again(loads: LoadLedger) -> None:
    """A first load that took too long is enough, and the reason is told."""
    assert loads.begin("one", "m") is None
    loads.quarantine("one", "m", "it did not finish within 9 s")
    found = loads.begin("one", "m")
    assert found is not None
    assert found.sentence().startswith("it did not finish within 9 s; it is tried again at ")


@pytest.mark.parametrize(
    ("count", "minutes"), [(1, 0), (2, 0), (3, 5), (4, 10), (5, 20), (6, 40), (7, 60), (2000, 60)]
)
def test_the_wait_grows(count: int, minutes: int) -> None:
    """The wait doubles with each load, to an hour; a clock that was set back ends it."""
    attempts = LoadAttempts(count=count, at=1000.0)
    assert attempts.wait_seconds == minutes * MINUTES
    assert attempts.quarantined(1000.0) is (minutes > 0)
    assert not attempts.quarantined(1000.0 + minutes * MINUTES)
    assert not attempts.quarantined(999.0)


def test_the_wait_ends(loads: LoadLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """One load may begin once the wait is over, and the next wait is longer."""
    now = 1000.0
    monkeypatch.setattr("embedfarm.contract.load_attempts.time.time", lambda: now)
    for _ in range(3):
        loads.begin("one", "m")
    now += 5 * MINUTES
    assert loads.begin("one", "m") is None
    now += 9 * MINUTES
    assert loads.begin("one", "m") is not None


def test_what_cannot_be_read_counts_as_nothing(loads: LoadLedger, client: redis.Redis) -> None:
    """A record of another version, or of another program, keeps no model from being loaded."""
    client.set(wire.load_key("one", "m"), b"\xff odd")
    assert loads.begin("one", "m") is None
    assert loads.attempts("one", "m").count == 1
