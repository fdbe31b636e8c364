"""Tests of what people want of models: written, read, and never without limit."""

import pytest
import redis

from embedfarm.contract import model_orders, wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.model_orders import ModelOrder, TooManyOrders


def test_orders_are_one_for_each_model(client: redis.Redis) -> None:
    """What was wanted before stays wanted, until the model is to be unloaded."""
    farm = FarmClient(client)
    at = farm.models.load("a")
    farm.models.pin("a", pinned=True)
    farm.models.pin("b", pinned=True)
    assert farm.models.all() == {
        "a": ModelOrder(pinned=True, load_at=at),
        "b": ModelOrder(pinned=True),
    }
    assert farm.models.all()["a"].loaded
    farm.models.unload("a")
    farm.models.pin("b", pinned=False)
    assert not any(order.loaded or order.pinned for order in farm.models.all().values())


def test_an_order_that_cannot_be_read_is_none(client: redis.Redis) -> None:
    """A damaged order keeps nobody from the others."""
    farm = FarmClient(client, lambda _place, _reason: None)
    farm.models.pin("a", pinned=True)
    client.hset(wire.MODELS, "b", b"\xff odd")
    assert list(farm.models.all()) == ["a"]


def test_orders_are_limited(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that want nothing any more make room for a new one; without any it is refused."""
    monkeypatch.setattr(model_orders, "ORDERS_MAX", 2)
    farm = FarmClient(client)
    farm.models.pin("a", pinned=True)
    farm.models.unload("b")
    farm.models.load("c")
    assert set(farm.models.all()) == {"a", "c"}
    farm.models.pin("c", pinned=True)
    with pytest.raises(TooManyOrders, match="2 models are pinned or wanted"):
        farm.models.load("d")
    assert set(farm.models.all()) == {"a", "c"}
