"""Tests of models whose weights wait in the host's memory: what is kept there, and how it returns.

That weights move to a real GPU and back is tried in `test_cuda.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.model_orders import ModelOrder
from embedfarm.contract.settings import Settings
from embedfarm.workers import model_store, parked_models
from embedfarm.workers.engines.engine import Engine, NoRoom, OutOfMemory
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.host_memory import AvailableMemory
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.parked_models import ParkedModels
from embedfarm.workers.resident_models import ResidentModel
from embedfarm.workers.watchdog import Watchdog
from tests.workers.support import let_models_take, null_vectors
from tests.workers.tiny_models import build

SIZE = 10  # bytes that a model is said to take here
Make = Callable[..., "Shelf"]


class MovableEngine(NullEngine):
    """A null engine whose weights move between a device and the host."""

    apart = True
    parked = False
    full = False  # whether its device has no memory

    def park(self) -> None:
        """Move the weights to the host."""
        self.parked = True

    def unpark(self) -> None:
        """Move the weights back."""
        assert self.parked
        if MovableEngine.full:
            raise OutOfMemory("it is full")
        self.parked = False


@dataclass
class Shelf:
    """A worker's models, of which two fit on its device.

    Attributes:
        store: The models.
        opened: Names of those that were loaded from their files, in order.
    """

    store: ModelStore
    opened: list[str]

    def use(self, *numbers: int) -> None:
        """Have models used in turn, as a worker has."""
        for number in numbers:
            spec = spec_of(number)
            assert self.store.resident.use(engine_key(spec)) or self.store.load(spec)

    @property
    def parked(self) -> list[str]:
        """Names of the models that are parked, those first that have been for longest."""
        return [each.spec.model for each in self.store.room.parked]


def spec_of(number: int, **terms: Any) -> JobSpec:  # noqa: ANN401 # any term of a job
    """The spec of one of many models."""
    return JobSpec(model=f"null:{number}", **terms)


@pytest.fixture
def make(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a shelf with some settings."""
    let_models_take(monkeypatch, SIZE)
    monkeypatch.setattr(MovableEngine, "full", False)
    opened: list[str] = []

    def open_movable(spec: JobSpec, *_: object) -> Engine:
        opened.append(spec.model)
        return MovableEngine.open(spec)

    monkeypatch.setattr(model_store, "open_engine", open_movable)

    def shelf(**limits: Any) -> Shelf:  # noqa: ANN401 # any setting
        settings = Settings(models_bytes_max=2 * SIZE, **limits)
        store = ModelStore(FarmClient(client), "w", "cpu", settings, Watchdog(settings))
        return Shelf(store, opened)

    return shelf


def test_a_model_that_made_room_comes_back_without_its_files(make: Make) -> None:
    """A model that goes for another one is parked, and is not opened a second time."""
    shelf = make()
    shelf.use(1, 2, 3)
    assert shelf.parked == ["null:1"]
    states = {each.model: each for each in shelf.store.states()}
    state = states[model_key(spec_of(1))]
    assert (state.state, state.bytes, state.load_seconds) == ("parked", SIZE, 0.0)
    shelf.use(1)
    assert shelf.opened == ["null:1", "null:2", "null:3"]
    assert shelf.parked == ["null:2"]
    owner = shelf.store.resident.owner(engine_key(spec_of(1)))
    assert owner is not None
    assert not getattr(owner.engine, "parked", True)
    vectors = owner.engine.forward(owner.engine.tokenise(["a"]), np.arange(1))
    assert np.array_equal(vectors, null_vectors(["a"], "null:1"))
    assert owner.came_seconds < 1
    assert owner.load_seconds > 0
    assert shelf.store.resident.bytes == 2 * SIZE


def test_a_parked_model_whose_files_have_changed_is_forgotten(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has other files now is loaded from those when it comes back."""
    shelf = make()
    shelf.use(1, 2, 3)
    monkeypatch.setattr(ResidentModel, "is_outdated", lambda *_: True)
    shelf.use(1)
    assert shelf.opened.count("null:1") == 2
    assert shelf.parked == ["null:2"]


def test_a_parked_model_serves_other_jobs(make: Make) -> None:
    """A job with another prompt gets its own engine on the weights that were parked."""
    shelf = make()
    shelf.use(1, 2, 3)
    other = spec_of(1, prompt="query: ")
    engine = shelf.store.load(other)
    assert engine is not None
    assert engine is shelf.store.resident.find(engine_key(other))
    assert engine is not shelf.store.resident.find(engine_key(spec_of(1)))
    assert shelf.opened.count("null:1") == 1


def test_parked_models_are_limited(make: Make) -> None:
    """What was parked first goes where the limit would be passed; 0 parks nothing."""
    shelf = make(models_parked_bytes_max=2 * SIZE)
    shelf.use(1, 2, 3, 4, 5)
    assert shelf.parked == ["null:2", "null:3"]
    shelf = make(models_parked_bytes_max=SIZE - 1)
    shelf.use(1, 2, 3)
    assert not shelf.parked
    shelf = make(models_parked_bytes_max=0)
    shelf.use(1, 2, 3)
    assert not shelf.parked


def test_the_host_keeps_memory_for_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model takes half of what the host has free at most; what is parked goes for it first."""
    memory = AvailableMemory(1000, 2 * SIZE)
    monkeypatch.setattr(parked_models, "host_memory", lambda: memory)
    shelf = make()
    shelf.use(1, 2, 3)
    assert shelf.parked == ["null:1"]
    memory = AvailableMemory(1000, SIZE)  # what is left
    shelf.use(4)
    assert shelf.parked == ["null:2"]
    memory = AvailableMemory(1000, SIZE - 1)
    shelf.use(5)
    assert not shelf.parked


def test_parked_models_are_forgotten(make: Make) -> None:
    """A parked model goes when nobody has used it for a while, and when people want it to go."""
    shelf = make(model_idle_seconds=1e-9)
    shelf.use(1, 2, 3)
    shelf.store.room.unload_idle()
    assert not shelf.parked
    shelf = make()
    shelf.use(1, 2, 3, 4)
    assert shelf.parked == ["null:1", "null:2"]
    shelf.store.room.unload_idle()
    shelf.store.room.follow({"null:1": ModelOrder(unload_at=1.0)})
    assert shelf.parked == ["null:2"]
    assert [each.spec.model for each in shelf.store.resident] == ["null:3", "null:4"]


def test_a_full_device_costs_no_more_than_a_load(make: Make) -> None:
    """A parked model that does not fit on its device any more is loaded from its files later."""
    shelf = make()
    shelf.use(1, 2, 3)
    MovableEngine.full = True
    with pytest.raises(NoRoom, match="it is full"):
        shelf.store.load(spec_of(1))
    MovableEngine.full = False
    assert not any(each.spec.model == "null:1" for each in shelf.store.room.parked)
    shelf.use(1)
    assert shelf.opened == ["null:1", "null:2", "null:3", "null:1"]


def test_models_on_a_cpu_are_not_parked(tmp_path: Path) -> None:
    """Weights that are in the host's memory already have nowhere to go."""
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="torch")
    engine = SentenceTransformerEngine.open(spec, "cpu", None)
    parked = ParkedModels(Settings())
    assert not parked.park(ResidentModel(spec, "torch", engine, SIZE, 1.0))
    assert not list(parked)
