"""Tests of what a scheduler sees of jobs that end while it looks."""

import math
import time
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest
import redis

from embedfarm.contract.backlog import Backlog, read_backlogs
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.model_states import ModelState, StateOfModel
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from embedfarm.scheduler import observer as module
from embedfarm.scheduler.history import History
from embedfarm.scheduler.ledger import Ledger
from embedfarm.scheduler.observer import Observer
from tests.scheduler.live import SPEC, beat, completion, fill


def test_a_job_that_ends_during_a_look(
    farm: FarmClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is deleted after its backlog was read has no leases; the next look has no job."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    job = fill(farm, 1)
    beat(farm, "worker")
    assert job.stream.read("worker", 1)
    (seen,) = observer.look().jobs
    assert [lease.worker for lease in seen.leases] == ["worker"]

    def read_late(server: redis.Redis, jobs: Sequence[str]) -> list[Backlog]:
        found = read_backlogs(server, jobs)
        job.delete()
        return found

    monkeypatch.setattr(module, "read_backlogs", read_late)
    (seen,) = observer.look().jobs
    assert seen.leases == ()
    assert observer.look().jobs == ()


@pytest.mark.parametrize("known", [True, False])
def test_a_job_that_ends_before_more_of_it_is_read(
    known: bool,  # noqa: FBT001 # whether its model is known
    farm: FarmClient,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deleted job without room for results is not stranded, and one of no known model is none."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    monkeypatch.setattr(module, "results_free", lambda _settings, _room: 0)
    job = fill(farm, 1)
    assert job.stream.read("worker", 1)
    if known:
        observer.look()

    def read_late(server: redis.Redis, jobs: Sequence[str]) -> list[Backlog]:
        found = read_backlogs(server, jobs)
        job.delete()
        return found

    monkeypatch.setattr(module, "read_backlogs", read_late)
    assert [each.stranded for each in observer.look().jobs] == [False] * known


def test_leases_that_cannot_be_read(
    farm: FarmClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that does not say that the job is gone is not taken for its end."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    job = fill(farm, 1)
    assert job.stream.read("worker", 1)

    def read_late(server: redis.Redis, jobs: Sequence[str]) -> list[Backlog]:
        found = read_backlogs(server, jobs)
        server.set(job.keys.blocks, "of another program")
        return found

    monkeypatch.setattr(module, "read_backlogs", read_late)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        observer.look()


def test_a_job_without_blocks_is_idle(
    farm: FarmClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is idle since its blocks last waited or were leased, and for ever if it had none."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    clock = Mock(wraps=time, monotonic=Mock(return_value=100.0))
    monkeypatch.setattr(module, "time", clock)
    farm.job("empty").create(SPEC, 0)
    grown = fill(farm, 1)

    def idle() -> dict[str, float]:
        return {each.job: each.idle_seconds for each in observer.look().jobs}

    assert idle() == {"empty": math.inf, grown.id: 0.0}
    rows = cast("list[Any]", client.xrange(grown.keys.blocks))
    client.xdel(grown.keys.blocks, rows[0][0])
    clock.monotonic.return_value = 103.5
    assert idle() == {"empty": math.inf, grown.id: 3.5}


def test_a_lease_that_a_live_worker_hands_back(farm: FarmClient, client: redis.Redis) -> None:
    """A job beyond its room for results is worked on if nobody renews one of its leases.

    That may be the lease of the block that whoever collects waits for.
    """
    settings = Settings()
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, settings))
    beat(farm, "w")
    job = fill(farm, 2)
    (entry,) = job.stream.read("w", 1)
    client.hset(job.keys.meta, "result_bytes", settings.results_bytes_max)
    assert observer.look().orphaned == set()
    job.stream.release(entry.stream, "w", [entry.id])
    assert observer.look().orphaned == {job.id}
    client.hset(job.keys.meta, "result_bytes", 0)
    assert observer.look().orphaned == set()


def test_memory_of_models(farm: FarmClient, client: redis.Redis) -> None:
    """What a model takes on a device is learned from the workers that have loaded it."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    for model_bytes, known in ((0, {}), (1 << 30, {"m": 1 << 30})):
        loaded = ModelState(model="m", state="ready", since=1.0, bytes=model_bytes)
        beat(farm, "worker", models=[loaded])
        observer.look()
        assert observer.model_bytes == known


def test_when_a_worker_loaded_a_model(
    farm: FarmClient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time since a worker's last load is the scheduler's own, and none while it loads."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    first, second = (ModelState(model=name, state="ready", since=1e12) for name in ("m", "n"))
    coming = ModelState(model="n", state="loading", since=1e12)
    seen = []
    looks = [[first], [first, coming], [first, second], [first, second], [second], [second, first]]
    for second_of_run, models in enumerate(looks):
        monkeypatch.setattr(time, "monotonic", lambda at=second_of_run: 1000.0 + at)
        beat(farm, "worker", models=models)
        (worker,) = observer.look().workers
        seen.append(worker.loaded_seconds)
    assert seen == [math.inf, 0.0, 1.0, 2.0, 3.0, 0.0]


def test_a_parked_model_is_not_resident(farm: FarmClient, client: redis.Redis) -> None:
    """A worker has the models that are loaded or are being loaded, and none that is parked."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    states: dict[str, StateOfModel] = {"a": "ready", "b": "loading", "c": "parked", "d": "failed"}
    models = [ModelState(model=name, state=state, since=1e12) for name, state in states.items()]
    beat(farm, "worker", models=models)
    (worker,) = observer.look().workers
    assert worker.resident == {"a", "b"}


def test_rates_say_the_kind_of_their_worker(farm: FarmClient, client: redis.Redis) -> None:
    """What is remembered of a worker says its kind and price, also from after it is gone."""
    observer = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    fill(farm, 1)
    beat(farm, "worker", kind="spot", devices=2, device_cost_per_hour=1.5)
    observer.look()
    observer.learn([completion("worker", 1000, 1.0), completion("stranger", 1000, 1.0)])
    known, _ = observer.take_rates(1.0)
    kinds = {key.partition("|")[0]: (rate.kind, rate.cost_per_hour) for key, rate in known.items()}
    assert kinds == {"worker": ("spot", 3.0), "stranger": ("", 0.0)}
    farm.statistics.remember(known, [])
    # The next scheduler learns of what the worker did last, and never sees it.
    farm.leave("worker")
    later = Observer(farm, History(60.0), Ledger({}), FarmWindow(client, Settings()))
    later.history.recall(farm.statistics.history())
    later.look()
    later.learn([completion("worker", 2000, 1.0)])
    (rate,) = later.take_rates(2.0)[0].values()
    assert (rate.kind, rate.cost_per_hour, rate.samples) == ("spot", 3.0, 2)
