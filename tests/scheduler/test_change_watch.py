"""Tests of what the scheduler tells the timeline: workers that come and go, and first vectors."""

import dataclasses
from collections.abc import Collection

import msgspec

from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.change_watch import ChangeWatch
from embedfarm.scheduler.state import JobState
from tests.contract.little_job import heartbeat

ONE = heartbeat("one")
AGAIN = heartbeat("one", "2")


def look(
    watch: ChangeWatch,
    *beats: Heartbeat,
    lost: Collection[str] = (),
    jobs: Collection[JobState] = (),
) -> list[str]:
    """Let a watch look, and return what it tells in words."""
    found = watch.look({beat.worker: beat for beat in beats}, set(lost), jobs)
    assert all(isinstance(event, FarmEvent) for event in found)
    return [event.sentence() for event in found]


def test_the_first_look_tells_nothing() -> None:
    """What a scheduler finds when it takes over has happened before."""
    watch = ChangeWatch()
    assert look(watch, msgspec.structs.replace(ONE, refused=["j"])) == []


def test_workers_that_come_and_go() -> None:
    """A worker that leaves, one that is lost, one that comes back and one that is started again."""
    watch = ChangeWatch()
    assert look(watch) == []
    assert look(watch, ONE) == ["worker one joined the farm: process 1, cpu-0"]
    assert look(watch, ONE) == []
    assert look(watch) == ["worker one left the farm"]
    assert look(watch, AGAIN) == ["worker one joined the farm: process 1, cpu-0"]
    assert look(watch, lost=["one"]) == ["worker one is lost"]
    assert look(watch, lost=["one"]) == []
    assert look(watch, AGAIN) == ["worker one is heard of again"]
    assert look(watch, lost=["one"]) == ["worker one is lost"]
    assert look(watch, ONE) == ["worker one was started again: process 1, cpu-0"]
    assert look(watch, AGAIN) == ["worker one was started again: process 1, cpu-0"]
    assert look(watch, lost=["one"]) == ["worker one is lost"]
    assert look(watch) == []  # forgotten after an hour
    assert look(watch, AGAIN) == ["worker one joined the farm: process 1, cpu-0"]


def test_models_and_refusals() -> None:
    """A model is told when it is loaded, and a job that a worker cannot embed when it says so."""
    watch = ChangeWatch()
    models = [ModelState(model="a/b|auto|0", state="ready", since=1.0, load_seconds=3.21)]
    loaded = msgspec.structs.replace(ONE, models=models)
    refusing = msgspec.structs.replace(loaded, refused=["odd"])
    assert look(watch, ONE) == []
    assert look(watch, loaded) == ["worker one loaded a model: a/b in 3.2 s"]
    assert look(watch, refusing) == ["worker one cannot embed job odd"]
    assert look(watch, refusing) == []
    both = msgspec.structs.replace(AGAIN, models=models)
    assert look(watch, both) == [
        "worker one was started again: process 1, cpu-0",
        "worker one loaded a model: a/b in 3.2 s",
    ]
    coming = ModelState(model="c|auto|0", state="loading", since=2.0)
    assert look(watch, msgspec.structs.replace(AGAIN, models=[*models, coming])) == []
    come = ModelState(model="c|auto|0", state="ready", since=3.0, load_seconds=1.0)
    beside = msgspec.structs.replace(AGAIN, models=[*models, come])
    assert look(watch, beside) == ["worker one loaded a model: c in 1.0 s"]
    assert (
        look(
            watch,
            both,
        )
        == []
    )
    assert look(watch, beside) == ["worker one loaded a model: c in 1.0 s"], "it was unloaded"


def test_first_vectors() -> None:
    """The first block of a job that is done is told once, of each of its lives."""
    watch = ChangeWatch()
    fresh = JobState("j", "m", JobStatus(state="open"), 1)
    begun = dataclasses.replace(fresh, status=JobStatus(state="open", blocks_done=1))
    assert look(watch, jobs=[begun]) == []  # it began before this scheduler
    assert look(watch, jobs=[fresh]) == []
    assert look(watch, jobs=[begun]) == ["job j has its first vectors"]
    assert look(watch, jobs=[begun]) == []
