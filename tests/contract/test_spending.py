"""Tests of what jobs take of devices and what that costs, as commits count it."""

import msgspec
import pytest
import redis

from embedfarm.contract.jobs import Job
from embedfarm.contract.spending import (
    Spent,
    counters_of,
    format_cost,
    format_device_hours,
    spent_from,
)
from tests.contract.little_job import embed, make_job


def commit(job: Job, worker: str, seconds: float, cost: float) -> str:
    """Commit the next block by a worker, with the devices' time that it took and its cost."""
    entry, result = embed(job.stream.read(worker, 1)[0])
    said = msgspec.structs.replace(result, worker=worker, seconds=seconds, cost=cost)
    return job.stream.commit([(entry, said)])[0]


def test_commits_add_up(client: redis.Redis) -> None:
    """Workers of two prices add up; what a worker commits twice, or late, counts once."""
    job = make_job(client, 4)
    assert job.status().spent == Spent(0, 0)
    assert commit(job, "cheap", 1800, 0.5) == "committed"
    late = embed(job.stream.read("dear", 1)[0])
    late[1].seconds, late[1].cost = 900, 8
    assert job.stream.commit([late, late]) == ["committed", "duplicate"]
    assert job.status().spent == Spent(0.75, 8.5)
    assert commit(job, "cheap", 1e-7, 1e-7) == "committed"
    assert job.status().spent == Spent(0.75, 8.5)


def test_counters_go_there_and_back() -> None:
    """What a manifest says was spent is what the record of its job says."""
    spent = Spent(1.25, 0.000_123)
    assert spent_from(**counters_of(spent)) == spent


@pytest.mark.parametrize(
    ("hours", "words"),
    [(0, "0 s"), (0.01, "36 s"), (1.5, "1 h 30 min"), (99.99, "99 h 59 min"), (1234.4, "1,234 h")],
)
def test_device_hours_in_words(hours: float, words: str) -> None:
    """Few hours are said as time, many as a number."""
    assert format_device_hours(hours) == words


@pytest.mark.parametrize(
    ("cost", "words"), [(0, "0.00"), (0.01, "0.01"), (1234.5, "1,234.50"), (0.00123, "0.0012")]
)
def test_costs_in_words(cost: float, words: str) -> None:
    """A small cost keeps two digits that say something."""
    assert format_cost(cost) == words


def test_spent_in_words() -> None:
    """A cost is said where there is a price."""
    assert Spent(0.01, 0).words == "36 s of devices' time"
    assert Spent(0.01, 0.5).words == "36 s of devices' time, cost 0.50"
