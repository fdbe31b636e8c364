"""Tests of single passes: which jobs can be worked on, and which goes before which."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.scheduling_terms import PRIORITIES
from embedfarm.contract.sizing import FarmRoom
from embedfarm.scheduler.ledger import Service
from embedfarm.scheduler.passes.defer import Defer
from embedfarm.scheduler.passes.order import FirstCome, Priority, ShortestFirst
from embedfarm.scheduler.state import JobState
from tests.scheduler.support import SETTINGS, draft, farm, job, names, order

AGEING = SETTINGS.ageing_seconds
FULL = SETTINGS.results_bytes_max


def waited(name: str, seconds: float, priority: int = 0, deadline_ms: int = 0) -> JobState:
    """Return a job that got nothing for some time."""
    service = Service(waited_seconds=seconds)
    return job(name, waiting=1, service=service, priority=priority, deadline_ms=deadline_ms)


def aged(one: JobState, created_ms: int) -> JobState:
    """Return a copy of a job that was created at another time."""
    return replace(one, status=replace(one.status, created_ms=created_ms))


# Deadlines.


def test_a_deadline_that_cannot_be_met_is_seen() -> None:
    """A job is late if its rest, and all before it, take until after its deadline."""
    jobs = [
        job("early", waiting=10, deadline_ms=1_020_000),
        job("tight", waiting=10, deadline_ms=1_050_000),
        job("lost", waiting=10, deadline_ms=1_055_000),
        job("none", waiting=10),
    ]
    state = replace(farm(jobs, {"one": 30.0, "two": 20.0}), now=1_000.0)  # 20 s for each of them
    ordered = Priority(SETTINGS)(draft(state))
    assert ordered.late == pytest.approx({"lost": 5.0})
    assert ("priority", "lost is normal, and misses its deadline by 5 s", "") in ordered.notes
    alone = Priority(SETTINGS)(draft(replace(state, jobs=tuple(jobs[2:]))))
    assert not alone.late
    done = job("done", blocks_in=10, blocks_done=10, chunk_count=80, deadline_ms=1)
    assert not Priority(SETTINGS)(draft(replace(state, jobs=(done,)))).late
    unknown = Priority(SETTINGS)(draft(replace(farm(jobs, {"one": None}), now=1_000.0)))
    assert not unknown.late


# Defer.


@pytest.mark.parametrize(
    ("deferred", "reason"),
    [
        (job("b", waiting=1, state="paused"), "b deferred: paused"),
        (job("b", waiting=1, state="cancelled"), "b deferred: cancelled"),
        (
            job("b", waiting=1, result_bytes=SETTINGS.results_bytes_max),
            "b deferred: results are not collected",
        ),
    ],
)
def test_a_job_that_must_wait_is_deferred(deferred: JobState, reason: str) -> None:
    """A paused, cancelled or uncollected job is left out, and the notes say why."""
    kept = job("a", waiting=1, state="open")
    made = Defer(SETTINGS)(draft(farm([kept, deferred], {})))
    assert made.tiers == ((kept,),)
    assert made.notes == (("defer", reason, ""),)


def test_what_a_collector_may_wait_for_is_not_deferred() -> None:
    """A job with full results is kept if blocks were sent again, or their holder is gone."""
    again = job("a", waiting=1, result_bytes=FULL, refilled_upto=8)
    held = job("b", waiting=1, result_bytes=FULL, leases=[("gone", 1)])
    alive = job("c", waiting=1, result_bytes=FULL, leases=[("one", 1)])
    made = Defer(SETTINGS)(draft(farm([again, held, alive], {"one": 30.0})))
    assert made.tiers == ((again, held),)


def test_results_of_all_jobs_are_shared() -> None:
    """A job over its fair share is deferred once all results fill 1.5 times the farm's window."""
    most = 12 << 20
    jobs = [
        job("hog", waiting=1, tenant="a", result_bytes=most // 2),
        job("small", waiting=1, tenant="b", result_bytes=most // 4),
        job("new", waiting=1, tenant="c", result_bytes=0),
    ]
    room = FarmRoom(most, most, most, share=most // 3, shares={"a": most // 3, "b": most // 3})
    state = replace(farm(jobs, {}), room=room)
    assert Defer(SETTINGS)(draft(state)).tiers == (tuple(jobs),)
    state = replace(state, room=replace(room, result_bytes=most * 3 // 2))
    assert Defer(SETTINGS)(draft(state)).tiers == (tuple(jobs[1:]),)


def test_nothing_is_explained_unasked() -> None:
    """A pass makes no notes unless the decision is to be explained."""
    paused = job(waiting=1, state="paused")
    made = Defer(SETTINGS)(draft(farm([paused], {}), explain=False))
    assert made.tiers == ()
    assert made.notes == ()


# Order.


@given(st.lists(st.integers(0, 3), max_size=6))
def test_older_jobs_come_first(created: list[int]) -> None:
    """Jobs are ordered by age, those of the same age by name, and none is lost."""
    jobs = [job(f"job-{place}", created_ms=each) for place, each in enumerate(created)]
    made = FirstCome()(draft(farm(jobs, {})))
    assert [(each.status.created_ms, each.job) for each in made.jobs] == sorted(
        (each.status.created_ms, each.job) for each in jobs
    )


@given(st.lists(st.integers(1, 9), max_size=6))
def test_shorter_jobs_come_first(blocks: list[int]) -> None:
    """Jobs are ordered by what is left of them, leased or not, and none is lost."""
    jobs = [
        job(f"job-{place}", waiting=count // 2, leases=[("worker", count - count // 2)])
        for place, count in enumerate(blocks)
    ]
    made = ShortestFirst()(draft(farm(jobs, {})))
    assert [(each.tokens_left, each.job) for each in made.jobs] == sorted(
        (each.tokens_left, each.job) for each in jobs
    )


def test_what_is_done_makes_a_job_shorter() -> None:
    """A large job that is nearly done goes before a small one that has more left."""
    large = job("large", waiting=100, tokens_done=9_900)
    small = job("small", waiting=50)
    made = ShortestFirst()(draft(farm([small, large], {})))
    assert order(made) == [["large"], ["small"]]


def test_urgent_goes_before_high_before_normal() -> None:
    """Each priority is a tier, within which jobs keep their order."""
    jobs = [waited(f"{name}-{n}", 0, level) for n in (1, 2) for name, level in PRIORITIES.items()]
    made = Priority(SETTINGS)(draft(farm(jobs, {})))
    assert order(made) == [["urgent-1", "urgent-2"], ["high-1", "high-2"], ["normal-1", "normal-2"]]


def test_the_earliest_deadline_goes_first_within_a_level() -> None:
    """Deadlines order the jobs of a level, but lift none of them over a higher level."""
    jobs = [
        waited("none", 0),
        waited("late", 0, deadline_ms=2000),
        waited("soon", 0, deadline_ms=1000),
        waited("high", 0, priority=1),
    ]
    made = Priority(SETTINGS)(draft(farm(jobs, {})))
    assert order(made) == [["high"], ["soon"], ["late"], ["none"]]


@pytest.mark.parametrize(
    ("seconds", "beside"),
    [
        (0.0, "normal"),
        (math.nextafter(AGEING, 0), "normal"),
        (AGEING, "high"),
        (math.nextafter(2 * AGEING, 0), "high"),
        (2 * AGEING, "urgent"),
        (20 * AGEING, "urgent"),
    ],
)
def test_waiting_lifts_a_job(seconds: float, beside: str) -> None:
    """A job that waits goes up a level after each `ageing_seconds`, ahead of the jobs there."""
    levels = [waited(name, 0, level) for name, level in PRIORITIES.items()]
    made = Priority(SETTINGS)(draft(farm([*levels, waited("old", seconds)], {})))
    tiers = [set(tier) for tier in order(made)]
    if seconds < AGEING:
        assert {"old", beside} in tiers
    else:
        assert tiers[tiers.index({"old"}) + 1] == {beside}


def test_the_reason_of_a_level_is_told() -> None:
    """The notes name each job's level, and the waiting that lifted it."""
    jobs = [waited("old", 65), waited("new", 5), waited("first", 500, priority=2)]
    made = Priority(SETTINGS)(draft(farm(jobs, {})))
    assert [note.words for note in made.notes] == [
        "first is urgent",
        "old is high after 65 s without service",
        "new is normal",
    ]


def test_a_later_order_keeps_to_the_earlier_one() -> None:
    """A pass that orders splits tiers: an old job does not overtake a more urgent one."""
    jobs = [
        aged(waited("old", 0), 1),
        aged(waited("new-urgent", 0, 2), 9),
        aged(waited("old-urgent", 0, 2), 5),
    ]
    made = FirstCome()(Priority(SETTINGS)(draft(farm(jobs, {}))))
    assert order(made) == [["old-urgent"], ["new-urgent"], ["old"]]
    made = Priority(SETTINGS)(FirstCome()(draft(farm(jobs, {}))))
    assert names(list(made.jobs)) == ["old", "old-urgent", "new-urgent"]
