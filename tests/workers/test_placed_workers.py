"""Tests of the workers of an actor, without a cluster: real ones, on a real server."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import redis

from embedfarm.contract.broker import host_name
from embedfarm.contract.farm_client import FarmClient
from embedfarm.workers.placed_workers import PlacedWorkers, PlacedWorkersError
from tests.support import LiveServer, wait_until


@pytest.fixture
def environment(server: LiveServer) -> dict[str, str]:
    """Settings, as they come with an actor's first call."""
    return {"EMBEDFARM_REDIS_URL": server.url, "EMBEDFARM_DRAIN_SECONDS": "10"}


@pytest.fixture
def workers() -> Iterator[PlacedWorkers]:
    """Workers that drain at the end."""
    found = PlacedWorkers("a1", [])
    yield found
    found.drain()


def test_workers_begin_and_drain(
    workers: PlacedWorkers, environment: dict[str, str], client: redis.Redis
) -> None:
    """Workers are named by host and actor, say when they have begun, and leave nothing."""
    farm = FarmClient(client)
    with pytest.raises(PlacedWorkersError):
        workers.look()
    workers.begin(environment, 1)
    wait_until(lambda: workers.look().begun, 60)
    assert [beat.worker for beat in farm.workers()] == [f"{host_name()}.a1:cpu-0"]
    assert Path(workers.look().logs).is_dir()
    workers.drain()
    assert farm.call_roll() == ([], {})
    assert not Path(workers.look().logs).exists()


def test_workers_that_cannot_begin_say_why(
    workers: PlacedWorkers, environment: dict[str, str]
) -> None:
    """The reason has the end of the log, without the server's password."""
    workers.begin(environment | {"EMBEDFARM_REDIS_URL": "redis://:hidden@host:none/0"}, 1)
    wait_until(lambda: workers.look().failed, 30)
    assert "URL" in workers.look().failed
    assert "hidden" not in workers.look().failed


def test_workers_whose_gpu_is_not_there_say_so(environment: dict[str, str]) -> None:
    """Workers that are placed on a GPU begin on no other device, however many cores they get."""
    workers = PlacedWorkers("a3", ["999"])
    workers.begin(environment, 0)
    try:
        wait_until(lambda: workers.look().failed, 30)
        assert "GPU" in workers.look().failed
    finally:
        workers.drain()


def _hold(environment: dict[str, str], pipe: Connection) -> None:
    """Begin workers in a process of their own, and wait for its end."""
    PlacedWorkers("a2", []).begin(environment, 1)
    pipe.recv()


def test_workers_drain_when_their_actor_is_killed(
    environment: dict[str, str], client: redis.Redis
) -> None:
    """An actor, and the process that it has started, may be killed: the workers end by themselves.

    They hand back what they had, so that nobody misses them.
    """
    farm = FarmClient(client)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    actor = context.Process(target=_hold, args=(environment, theirs))
    actor.start()
    wait_until(farm.workers, 60)
    started = psutil.Process(actor.pid).children()
    for each in [psutil.Process(actor.pid), *started]:
        each.kill()
    actor.join()
    wait_until(lambda: not farm.workers(), 30)
    assert farm.call_roll() == ([], {})
    ours.close()
