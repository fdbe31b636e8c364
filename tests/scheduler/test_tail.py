"""Tests of what idle workers repeat when nothing is left to lease."""

from dataclasses import replace

import msgspec
import pytest

from embedfarm.contract.records import JobShare
from embedfarm.scheduler.passes import decide
from embedfarm.scheduler.passes.size import Size
from embedfarm.scheduler.passes.tail import Tail
from embedfarm.scheduler.speculative_copies import SpeculativeCopies
from embedfarm.scheduler.state import FarmState, JobState
from tests.scheduler.support import SETTINGS, draft, farm, job, passes, shares


def tail(state: FarmState) -> dict[str, list[str]]:
    """Return the copies by worker, of those workers that were given any."""
    return {worker: share.copies for worker, share in shares(state).items() if share.copies}


def test_an_idle_worker_repeats_what_would_end_last() -> None:
    """The newest blocks of the slow worker are copied, as many as the idle one ends first."""
    made = tail(farm([job(leases=[("slow", 10)])], {"slow": 100, "idle": 1000}))
    assert made["idle"][0] == "73-0"  # the newest of 10 blocks of 8 chunks
    assert 7 <= len(made["idle"]) <= 9


def test_idle_workers_share_what_is_late() -> None:
    """Two idle workers divide the late blocks by speed, and none is given to both."""
    made = tail(farm([job(leases=[("slow", 40)])], {"slow": 50, "one": 1000, "two": 500}))
    assert not set(made["one"]) & set(made["two"])
    assert len(made["one"]) == pytest.approx(2 * len(made["two"]), abs=2)


def test_who_may_not_lease_a_job_takes_no_copy_from_others() -> None:
    """A worker that refused a job leaves its late blocks to the next one."""
    state = farm([job(leases=[("slow", 1)])], {"slow": 10.0, "refuser": 9000.0, "idle": 1000.0})
    refused = frozenset({"job"})
    workers = [
        replace(each, refused=refused) if each.name == "refuser" else each for each in state.workers
    ]
    found = decide(replace(state, workers=tuple(workers)), passes()).shares
    assert found["refuser"] == ()
    assert [share.copies for share in found["idle"]] == [["1-0"]]


def test_who_is_idle_first_leaves_copies_to_those_who_soon_will_be() -> None:
    """An idle worker repeats half of 40 late blocks if an equal one is idle in a tenth second."""
    late = job(leases=[("slow", 40)])
    soon = job("other", leases=[("soon", 1)])
    state = farm([late, soon], {"slow": 10.0, "idle": 1000.0, "soon": 1000.0})
    assert len(tail(state)["idle"]) == pytest.approx(20, abs=2)


@pytest.mark.parametrize("speeds", [{"one": 1000.0, "two": 9000.0}, {"two": 9000.0, "one": 1.0}])
def test_a_block_that_is_repeated_is_given_to_nobody_else(speeds: dict[str, float]) -> None:
    """A repeated block stays with its copier, even when a faster worker is idle."""
    late = replace(job(leases=[("slow", 1)]), copies={"1-0": "one"})
    assert tail(farm([late], {"slow": 10.0, **speeds})) == {"one": ["1-0"]}


def test_a_block_that_a_busy_worker_repeats_is_left_to_it() -> None:
    """A block is not copied again while its copier holds other leases."""
    late = replace(job(leases=[("slow", 1), ("one", 1)]), copies={"1-0": "one"})
    state = farm([late], {"slow": 10.0, "one": 1000.0, "two": 1000.0}, held_seconds={"one": 0.1})
    assert not tail(state)


@pytest.mark.parametrize("copier", ["gone", "refuser"])
def test_who_cannot_repeat_a_block_leaves_it_to_others(copier: str) -> None:
    """A block whose copier died or refused the job is copied by another worker."""
    late = replace(job(leases=[("slow", 1)]), copies={"1-0": copier})
    state = farm([late], {"slow": 10.0, "refuser": 1000.0, "two": 1000.0})
    refused = [replace(each, refused=frozenset({"job"})) for each in state.workers[1:2]]
    state = replace(state, workers=(state.workers[0], *refused, state.workers[2]))
    made = decide(state, passes()).shares
    assert {name: each[0].copies for name, each in made.items() if each} == {
        "slow": [],
        "two": ["1-0"],
    }


@pytest.mark.parametrize(("passed", "copier"), [(0.3, "one"), (1.0, "two")])
def test_who_hangs_in_a_copy_is_overtaken(passed: float, copier: str) -> None:
    """A copier that takes far longer than it should is overtaken, and gets nothing else."""
    late = replace(job(leases=[("slow", 1)]), copies={"1-0": "one"})
    speeds = {"slow": 10.0, "one": 1000.0, "two": 900.0}
    assert tail(farm([late], speeds, held_seconds={"one": passed})) == {copier: ["1-0"]}


def test_who_repeats_something_gets_the_next_when_that_is_done() -> None:
    """A copier keeps its block, leaves the others to who came since, and drops finished blocks."""
    late = replace(job(leases=[("slow", 3)]), copies={"1-0": "one", "999-0": "one"})
    state = farm([late], {"slow": 10.0, "one": 9000.0})
    assert tail(state) == {"one": ["1-0"]}
    state = farm([late], {"slow": 10.0, "one": 9000.0, "two": 1000.0})
    assert tail(state) == {"one": ["1-0"], "two": ["17-0", "9-0"]}


def test_what_a_worker_was_told_is_remembered() -> None:
    """Copies are remembered until the worker completes something after that plan, or dies."""
    copies = SpeculativeCopies()
    share = JobShare(job="job", tokens=0, blocks=1, copies=["1-0"])
    copies.told({"one": (share,), "other": (msgspec.structs.replace(share, copies=[]),)})
    copies.completed("one")  # of something before that plan
    assert copies.look(["job"], {"one", "other"}) == ({"job": {"1-0": "one"}}, {"job": {}})
    copies.told({"one": ()})
    assert copies.look(["job"], {"one", "other"}) == ({"job": {"1-0": "one"}}, {"job": {}})
    copies.completed("other")
    assert copies.look(["job"], {"one"}) == ({"job": {"1-0": "one"}}, {"job": {}})
    copies.completed("one")
    assert copies.look(["job"], {"one"}) == ({"job": {}}, {"job": {}})
    copies.told({"one": (share,)})
    assert copies.look(["job"], {"other"}) == ({"job": {}}, {"job": {"1-0": 1}})
    seen = copies.look(["job"], {"one"})
    copies.told({"one": (share,)})
    assert copies.look(["job"], {"one"}, {"one"}) == ({"job": {}}, {"job": {"1-0": 2}})
    assert seen == ({"job": {}}, {"job": {"1-0": 1}}), "what was seen before stays as it was"
    assert copies.look([], {"one"}) == ({}, {})


def test_what_brings_its_copiers_down_is_copied_no_more() -> None:
    """Two workers may end while they repeat a block; a third one is not given it."""
    late = replace(job(leases=[("hung", 2)]), copies_lost={"1-0": 2, "9-0": 1})
    state = farm([late], {"hung": 10.0, "idle": 1000.0}, held_seconds={"hung": 20})
    assert tail(state) == {"idle": ["9-0"]}


def test_a_copy_that_would_lose_is_not_made() -> None:
    """A block that its owner has begun is not copied by a worker of the same speed."""
    leases = [("busy", 2)]
    assert not tail(
        farm([job(leases=leases)], {"busy": 1000, "idle": 1000}, held_seconds={"busy": 0.1})
    )


@pytest.mark.parametrize("speed", [1000.0, None])
def test_an_owner_that_hangs_is_overtaken(speed: float | None) -> None:
    """The blocks of a worker that is overdue are copied, even if its speed is unknown."""
    state = farm(
        [job(leases=[("hung", 1)])], {"hung": speed, "idle": 1000}, held_seconds={"hung": 20}
    )
    assert tail(state) == {"idle": ["1-0"]}


def test_blocks_of_the_dead_are_left_to_the_rescue() -> None:
    """Blocks of a holder without a heartbeat are not copied: only the rescue counts deliveries."""
    assert not tail(farm([job(leases=[("dead", 5)])], {"idle": 1000}))


def test_a_suspect_block_is_not_copied() -> None:
    """A block on its last delivery is not copied."""
    suspect = job(leases=[("slow", 5)], deliveries=SETTINGS.deliveries_max)
    assert not tail(farm([suspect], {"slow": 1, "idle": 1000}))


def test_nothing_is_copied_while_something_waits() -> None:
    """Nothing is copied while a block waits in any job, or while the job is still open."""
    late = job(leases=[("slow", 5)])
    speeds = {"slow": 10.0, "idle": 1000.0}
    assert tail(farm([late], speeds))
    assert not tail(farm([late, job("other", waiting=1)], speeds))
    assert not tail(farm([job(leases=[("slow", 5)], state="open")], speeds))


@pytest.mark.parametrize(
    "deferred",
    [
        job("other", waiting=9, state="paused"),
        job("other", waiting=9, result_bytes=SETTINGS.results_bytes_max),
    ],
)
def test_blocks_that_nobody_may_lease_do_not_count_as_waiting(deferred: JobState) -> None:
    """Blocks of a deferred job do not keep stragglers of others from being copied."""
    assert tail(farm([job(leases=[("slow", 5)]), deferred], {"slow": 10.0, "idle": 1000.0}))


def test_a_worker_busy_with_another_job_copies_nothing() -> None:
    """A worker that holds a lease of any job is not idle, and copies nothing."""
    jobs = [job(leases=[("slow", 5)]), job("other", leases=[("busy", 5)], state="open")]
    assert not tail(farm(jobs, {"slow": 10, "busy": 1000}))


def test_copies_stay_below_a_full_micro_batch() -> None:
    """A copying worker takes no more than the cap, in time and in bytes."""
    state = farm([job(leases=[("slow", 200)])], {"slow": 1, "idle": 1000})
    assert len(tail(state)["idle"]) == 1000 * SETTINGS.micro_batch_seconds_max / 100
    lean = SETTINGS.model_copy(update={"micro_batch_bytes_max": 5 * 400})
    made = decide(state, [Size(lean), Tail(lean)]).shares
    assert len(made["idle"][0].copies) == 5


def test_copies_are_told() -> None:
    """The notes say who repeats how many blocks of which job."""
    made = Size(SETTINGS)(
        draft(
            farm(
                [job(leases=[("hung", 1)])], {"hung": None, "idle": 1000}, held_seconds={"hung": 20}
            )
        )
    )
    assert ("tail", "idle repeats 1 blocks of job", "idle") in Tail(SETTINGS)(made).notes


def test_finished_jobs_do_not_keep_a_worker_from_stragglers() -> None:
    """Jobs that only wait for their collector take no place in a plan."""
    finished = [
        job(f"done-{place}", blocks_in=5, blocks_done=5, chunk_count=40) for place in range(4)
    ]
    late = job("late", leases=[("hung", 1)])
    state = farm([*finished, late], {"idle": 1000, "hung": 1000}, held_seconds={"hung": 20})
    made = decide(state, passes()).shares
    assert [share.copies for share in made["idle"] if share.copies] == [["1-0"]]


def test_leases_of_the_dead_are_looked_after_first() -> None:
    """A single worker finds the blocks of a dead one, behind any number of open, empty jobs."""
    empty = [job(f"open-{place}", state="open") for place in range(4)]
    state = farm([*empty, job("orphan", leases=[("dead", 1)])], {"worker": 1000})
    assert "orphan" in [share.job for share in decide(state, passes()).shares["worker"]]
