"""Tests of which worker tries which job first: shares, and memory."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from embedfarm.scheduler.passes import decide
from embedfarm.scheduler.passes.order import FirstCome
from embedfarm.scheduler.passes.share import Fair, Memory
from embedfarm.scheduler.state import Draft, FarmState, JobState, WorkerState
from tests.scheduler.support import SETTINGS, draft, equals, farm, job, names, order, passes, served

FULL = SETTINGS.micro_batch_seconds_max


def firsts(made: Draft) -> Counter[str]:
    """Return how many workers each job comes first for."""
    return Counter(made.queue(worker.name)[0].job for worker in made.state.asking)


# Fair.


def test_the_least_served_job_comes_first() -> None:
    """A worker that asks alone gets the job that had least, and the next least after it."""
    jobs = [served("more", 3.0), served("least", 1.0), served("less", 2.0)]
    made = Fair(SETTINGS)(draft(farm(jobs, equals(1))))
    assert names(made.queue("worker-0")) == ["least", "less", "more"]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 40))
def test_workers_that_ask_together_are_spread_by_weight(weights: list[int], count: int) -> None:
    """Turns per weight differ between two jobs by no more than one turn of each.

    This is the bound of start-time fair queueing (Goyal, Vin and Cheng 1996, theorem 1).
    """
    jobs = [served(f"job-{place}", 0.0, weight=weight) for place, weight in enumerate(weights)]
    found = firsts(Fair(SETTINGS)(draft(farm(jobs, equals(count)))))
    turns = [(found[each.job] / each.status.weight, 1 / each.status.weight) for each in jobs]
    for (one, bound), (other, more) in itertools.combinations(turns, 2):
        assert abs(one - other) <= bound + more + 1e-9


def test_tenants_share_whatever_the_number_of_their_jobs() -> None:
    """A tenant with nine jobs gets as many workers as one with one, and its jobs share those."""
    jobs = [served(f"many-{place}", 0.0, tenant="many") for place in range(9)]
    found = firsts(
        Fair(SETTINGS)(draft(farm([*jobs, served("one", 0.0, tenant="one")], equals(18))))
    )
    assert found.pop("one") == 9
    assert set(found.values()) == {1}


def test_a_tenant_of_three_times_the_weight_gets_three_times_the_workers() -> None:
    """Tenants get workers by their own weight, which is 1 by default, whatever their jobs'."""
    settings = SETTINGS.model_copy(update={"tenant_weights": {"large": 3}})
    jobs = [served("large", 0.0, tenant="large"), served("usual", 0.0, tenant="usual", weight=9)]
    found = firsts(Fair(settings)(draft(farm(jobs, equals(12)))))
    assert found == {"large": 9, "usual": 3}


def test_a_tenant_that_is_behind_is_served_first() -> None:
    """The tenant's service decides who is next, and not the job's."""
    behind = served("behind", 50.0, tenant="a", tenant_seconds=10.0)
    ahead = served("ahead", 0.0, tenant="b", tenant_seconds=10.0 + FULL)
    made = Fair(SETTINGS)(draft(farm([ahead, behind], equals(2))))
    assert firsts(made) == {"behind": 2}


def test_a_job_far_behind_gets_every_worker() -> None:
    """A job that is behind by more than what all workers lease at a time gets every worker."""
    jobs = [served("ahead", 1 + FULL), served("behind", 0.0)]
    assert firsts(Fair(SETTINGS)(draft(farm(jobs, equals(8))))) == {"behind": 8}


def test_fairness_ends_at_the_tier() -> None:
    """A job of a later tier comes first for nobody, however little it had, but stays in reach."""
    jobs = [served("normal", 0.0), served("urgent", 99.0), served("urgent-too", 99.0)]
    tiers = (tuple(jobs[1:]), (jobs[0],))
    made = Fair(SETTINGS)(replace(draft(farm(jobs, equals(4))), tiers=tiers))
    assert firsts(made) == {"urgent": 2, "urgent-too": 2}
    assert all(queue[-1].job == "normal" for queue in made.queues.values())


def test_jobs_with_nothing_to_lease_have_no_turn() -> None:
    """A job of which all is leased stands in nobody's way."""
    leased = job("leased", leases=[("worker-0", 5)])
    jobs = [leased, served("more", 9.0), served("less", 1.0)]
    made = Fair(SETTINGS)(draft(farm(jobs, equals(2))))
    assert firsts(made)["leased"] == 0
    assert order(made) == [["leased", "more", "less"]]


def test_shares_are_explained() -> None:
    """The notes tell what each job and its tenant have had."""
    jobs = [served("a", 1.0, tenant="t", tenant_seconds=4.0), served("b", 2.5)]
    made = Fair(SETTINGS)(draft(farm(jobs, equals(1))))
    assert made.notes == (
        ("fair", "b had 2.5 s of the farm, its tenant (none) 0.0 s, by their weights", ""),
        ("fair", "a had 1.0 s of the farm, its tenant t 4.0 s, by their weights", ""),
    )


# Memory.


def small_and_large(jobs: Sequence[JobState]) -> FarmState:
    """Return a farm where the model "large" fits two of three devices, one of them unlimited."""
    workers = (
        WorkerState("small", memory_bytes=8 << 30),
        WorkerState("large", memory_bytes=16 << 30),
        WorkerState("processor"),
    )
    state = farm(jobs, {worker.name: 1000.0 for worker in workers})
    return replace(state, workers=workers, model_bytes={"large": 12 << 30})


def test_a_model_too_large_for_a_device_is_kept_away() -> None:
    """A job whose model does not fit a device goes to the others, and this one takes the next."""
    jobs = [replace(served("huge", 0.0), model="large"), served("usual", 9.0)]
    made = Memory()(Fair(SETTINGS)(draft(small_and_large(jobs))))
    assert names(made.queue("small")) == ["usual"]
    assert made.queue("large")[0].job == made.queue("processor")[0].job == "huge"
    assert made.notes[-1] == ("memory", "small cannot take huge", "small")


def few_can_take(sizes: Sequence[int], jobs: Sequence[JobState]) -> FarmState:
    """Return a farm of devices of so many GiB, where the model "large" takes 12."""
    workers = tuple(
        WorkerState(f"worker-{place}", memory_bytes=size << 30) for place, size in enumerate(sizes)
    )
    state = farm(jobs, {worker.name: 1000.0 for worker in workers})
    return replace(state, workers=workers, model_bytes={"large": 12 << 30})


def test_small_devices_share_what_they_can_take() -> None:
    """Workers that cannot take the job that is behind are spread over those that they can take."""
    jobs = [
        replace(served("huge", 0.0), model="large"), served("one", 50.0), served("two", 50.0),
    ]  # fmt: skip
    made = decide(few_can_take([8, 8, 8, 8], jobs), passes())
    assert Counter(share[0].job for share in made.shares.values()) == {"one": 2, "two": 2}


def test_small_devices_are_fair_in_a_later_tier() -> None:
    """Where no job of the first tier fits, workers are spread over those of the next that do."""
    jobs = [replace(served("huge", 0.0), model="large"), served("more", 9.0), served("less", 1.0)]
    state = few_can_take([8, 16, 8], jobs)
    made = Fair(SETTINGS)(replace(draft(state), tiers=((jobs[0],), tuple(jobs[1:]))))
    made = Memory()(made)
    assert [made.queue(f"worker-{place}")[0].job for place in range(3)] == ["less", "huge", "less"]


def test_all_workers_charge_the_same_account() -> None:
    """Turns that small devices take of a job count when large ones choose, and the other way."""
    jobs = [replace(served("huge", 0.0), model="large"), served("usual", 0.0)]
    made = decide(few_can_take([8, 8, 16, 16], jobs), passes())
    firsts = [made.shares[f"worker-{place}"][0].job for place in range(4)]
    assert firsts == ["usual", "usual", "huge", "huge"]


def test_a_worker_too_small_for_all_gets_an_empty_plan() -> None:
    """A worker whose device is too small for every model gets an empty plan."""
    made = decide(small_and_large([replace(served("huge", 0.0), model="large")]), passes())
    assert made.shares["small"] == ()
    assert made.shares["large"]


def test_large_jobs_do_not_hide_small_ones() -> None:
    """A job that fits is found behind any number of jobs that do not."""
    jobs = [replace(served(f"huge-{place:02}", 0.0), model="large") for place in range(20)]
    made = Memory()(FirstCome()(draft(small_and_large([*jobs, served("usual", 9.0)]))))
    assert names(made.queue("small")) == ["usual"]


def test_who_refused_a_job_is_not_asked_again() -> None:
    """A worker that refused a job gets the next one, and the others work on the refused one."""
    state = farm([served("first", 0.0), served("second", 9.0)], {"willing": 1000.0})
    refusing = WorkerState("refusing", refused=frozenset({"first"}))
    made = decide(replace(state, workers=(*state.workers, refusing)), passes())
    assert [share.job for share in made.shares["refusing"]] == ["second"]
    assert "first" in [share.job for share in made.shares["willing"]]


def test_unknown_sizes_fit() -> None:
    """A model whose size nobody has seen is tried anywhere."""
    jobs = [replace(served("new", 0.0), model="new"), served("usual", 9.0)]
    made = Memory()(Fair(SETTINGS)(draft(small_and_large(jobs))))
    assert made.queue("small")[0].job == "new"


def test_no_worker_rescues_what_does_not_fit() -> None:
    """Blocks of the dead go only to workers whose device has room for the model."""
    orphan = replace(job("huge", leases=[("dead", 3)]), model="large")
    made = decide(small_and_large([orphan]), passes()).shares
    assert [share.job for share in made["large"]] == ["huge"]
    assert made["small"] == ()
