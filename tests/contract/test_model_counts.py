"""Tests of the counters of models: they add up, and are not without number."""

import pytest
import redis

from embedfarm.contract import model_counts, wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.model_counts import OTHERS, ModelCounts


def test_counts_of_all_workers_add_up(client: redis.Redis) -> None:
    """What is counted twice, by whomever, is there twice; what is not counted is 0."""
    for _ in range(2):
        FarmClient(client).model_counts.add("a model", {"loads": 1, "load_ms": 1500})
    FarmClient(client).model_counts.add("b", {"requests": 3})
    counts = FarmClient(client).model_counts.all()
    assert counts == {"a model": ModelCounts(loads=2, load_ms=3000), "b": ModelCounts(requests=3)}
    assert counts["a model"].load_seconds == 3.0


def test_models_are_not_without_number(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A farm that sees ever more models counts the later ones together."""
    monkeypatch.setattr(model_counts, "COUNTED_MAX", 2)
    counters = FarmClient(client).model_counts
    for name in ("a", "b", "c", "d", "a"):
        counters.add(name, {"loads": 1})
    loads = {name: each.loads for name, each in counters.all().items()}
    assert loads == {"a": 2, "b": 1, OTHERS: 2}


def test_what_is_no_counter_is_left_out(client: redis.Redis) -> None:
    """Fields of a later release, and damaged ones, are not shown."""
    counters = FarmClient(client).model_counts
    counters.add("a", {"loads": 1})
    client.hset(wire.MODEL_COUNTS, mapping={"moons a": 4, "loads b": "many"})
    assert counters.all() == {"a": ModelCounts(loads=1)}
