"""Tests of how much a worker leases: the figures of the rule."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.records import JobShare
from embedfarm.scheduler.passes import decide
from embedfarm.scheduler.passes.size import (
    CAP_FACTOR_MAX,
    CONFIRMED_SECONDS,
    FACTOR,
    RESCUES_MAX,
    Size,
)
from embedfarm.scheduler.state import SHARES_MAX, SHARES_MIN, FarmState
from tests.scheduler.support import SETTINGS, draft, farm, job, passes, shares

CAP = SETTINGS.micro_batch_seconds_max


def tokens(made: Mapping[str, JobShare]) -> dict[str, int]:
    """Return the tokens of each worker's share."""
    return {worker: share.tokens for worker, share in made.items()}


def having(state: FarmState, **models: str) -> FarmState:
    """Return a farm whose workers have one model each, or none."""
    workers = (
        replace(each, resident=frozenset({models[each.name]} if each.name in models else ()))
        for each in state.workers
    )
    return replace(state, workers=tuple(workers))


def looking(state: FarmState) -> set[str]:
    """Return the workers that have a job in their plans."""
    return {worker for worker, made in decide(state, passes()).shares.items() if made}


def test_shares_follow_speed() -> None:
    """Workers that need a second together get six tenths of a second of their own work each."""
    made = shares(farm([job(waiting=40)], {"fast": 3000, "slow": 1000}))
    assert tokens(made) == {"fast": 1800, "slow": 600}
    assert (made["fast"].blocks, made["slow"].blocks) == (18, 6)


def test_who_has_its_hands_full_gets_less() -> None:
    """A worker gets less by what it holds: with 2 s left for each and 1 s in hand, 1 s."""
    held = job(waiting=30, leases=[("busy", 10)])
    made = shares(farm([held], {"busy": 1000, "idle": 1000}))
    assert tokens(made) == {"busy": FACTOR * 1000, "idle": FACTOR * 2000}


def test_who_is_busy_for_longer_than_all_need_takes_no_part() -> None:
    """A worker with 9 s in hand does none of the 2 s that two idle ones need for the rest."""
    held = job(waiting=40, leases=[("full", 90)])
    made = shares(farm([held], {"full": 1000, "one": 1000, "other": 1000}))
    assert tokens(made) == {"full": 0, "one": FACTOR * 2000, "other": FACTOR * 2000}


def test_a_worker_takes_part_from_when_its_hands_are_empty() -> None:
    """3,000 tokens fill two workers to the second that one holds, and then all three equally."""
    held = job(waiting=30, leases=[("busy", 10), ("full", 90)])
    made = shares(farm([held], {"full": 1000, "busy": 1000, "idle": 1000}))
    assert tokens(made) == {"full": 0, "busy": FACTOR * 1000, "idle": FACTOR * 2000}


def test_nobody_loads_a_model_for_what_may_come() -> None:
    """A job that grows is looked at by those who have its model, or have none at all."""
    grows = job("grows", state="open")
    state = farm([grows], dict.fromkeys(("has", "other", "none"), 1000))
    assert looking(having(state, has="model", other="another")) == {"has", "none"}


@pytest.mark.parametrize("model", ["model", "third"])
def test_what_the_dead_hold_is_rescued(model: str) -> None:
    """Workers with its model look at such a job; where nobody has it, everybody does."""
    held = job(leases=[("dead", 1)])
    state = farm([held], dict.fromkeys(("has", "other"), 1000))
    found = looking(having(state, has=model, other="another"))
    assert found == ({"has"} if model == "model" else {"has", "other"})


def test_what_the_only_worker_with_its_model_refuses_is_rescued() -> None:
    """A block that was handed back by the only worker that has its model is looked at by others."""
    held = job(leases=[("has", 1)])
    state = having(farm([held], dict.fromkeys(("has", "other"), 1000)), has="model", other="second")
    assert looking(state) == {"has"}
    has, other = state.workers
    assert looking(
        replace(state, workers=(replace(has, refused=frozenset({held.job})), other))
    ) == {"other"}


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 99)), min_size=1, max_size=6),
    st.integers(1, 200),
)
def test_parts_of_the_rest_make_the_rest(workers: list[tuple[int, int]], waiting: int) -> None:
    """All workers together get what waits, where overheads are too high to keep anything back."""
    speeds: dict[str, float | None] = {f"w{n}": speed for n, (speed, _) in enumerate(workers)}
    leases = [(f"w{n}", blocks) for n, (_, blocks) in enumerate(workers) if blocks]
    state = farm([job(waiting=waiting, leases=leases)], speeds, overhead=1e6)
    wide = Size(SETTINGS.model_copy(update={"micro_batch_seconds_max": 1e6}))
    made = wide(draft(state)).shares
    total = sum(share.tokens for (share,) in made.values())
    assert 100 * waiting - len(workers) <= total <= 100 * waiting


@pytest.mark.parametrize(("passed", "busy", "idle"), [(0.5, 750, 1050), (4.0, 600, 1200)])
def test_time_that_passed_is_work_that_is_done(passed: float, busy: int, idle: int) -> None:
    """Held work shrinks with time; when it is overdue, a quarter of the time is still expected."""
    held = job(waiting=30, leases=[("busy", 10)])
    state = farm([held], {"busy": 1000, "idle": 1000}, held_seconds={"busy": passed})
    assert tokens(shares(state)) == {"busy": busy, "idle": idle}


def test_work_held_of_another_job_counts() -> None:
    """Work that a worker holds of another job counts in seconds at its speed there."""
    other = replace(job("other", leases=[("busy", 10)]), model="heavy")
    state = farm([job(waiting=30), other], {"busy": 1000, "idle": 1000})
    heavy = {
        name: msgspec.structs.replace(rate, tokens_per_second=rate.tokens_per_second / 2)
        for name, rate in state.pace(other).rates.items()
    }
    state = replace(state, rates=dict(state.rates) | {("heavy", other.length_class): heavy})
    made = tokens(shares(state))
    # 2 s of held work: (3000 + 2 * 1000) / 2000 = 2.5 s together.
    assert made == {"busy": FACTOR * 500, "idle": FACTOR * 2500}


def test_no_micro_batch_is_longer_than_the_cap() -> None:
    """A worker leases at most 3 s of work at a time, however much waits."""
    made = shares(farm([job(waiting=10**6)], {"fast": 4000, "slow": 1000}))
    assert tokens(made) == {"fast": 4000 * CAP, "slow": 1000 * CAP}


@pytest.mark.parametrize(
    ("overhead", "seconds"), [(0.02, CAP), (0.1, 10.0), (60.0, CAP * CAP_FACTOR_MAX)]
)
def test_the_cap_grows_with_the_overhead(overhead: float, seconds: float) -> None:
    """Micro-batches grow until the overhead is a hundredth of them, but to 30 s at most.

    A worker that waited a minute for its server still leaves work to others.
    """
    made = shares(farm([job(waiting=10**6)], {"worker": 10_000}, overhead=overhead))
    assert made["worker"].tokens == pytest.approx(10_000 * seconds, abs=1)


@pytest.mark.parametrize(("blocks", "tokens"), [(10, 1000), (90, 9000), (110, 6600)])
def test_no_rest_is_left_that_is_not_worth_its_overhead(blocks: int, tokens: int) -> None:
    """A rest is taken whole if six tenths of it take less than 6 overheads of 100 ms."""
    made = shares(farm([job(waiting=blocks)], {"worker": 10_000}, overhead=0.1))
    assert made["worker"].tokens == tokens
    assert made["worker"].blocks == tokens // 100


def test_an_unknown_worker_probes() -> None:
    """The first micro-batch is 0.3 s of the slowest known worker, whatever waits."""
    made = shares(farm([job(waiting=10**4)], {"fast": 9000, "slow": 1000, "new": None}))
    assert made["new"].tokens == 300
    assert made["new"].blocks == 3


def test_the_first_workers_of_all_probe_with_a_block() -> None:
    """Every worker starts with one block where no speed is known."""
    made = shares(farm([job(waiting=100)], {"one": None, "other": None}))
    assert [(share.tokens, share.blocks) for share in made.values()] == [(0, 1), (0, 1)]


def test_an_old_rate_is_confirmed_first() -> None:
    """A worker gets 0.3 s of its own work, and not yet the cap, after a minute without news."""
    state = farm([job(waiting=10**4)], {"worker": 1000}, now=CONFIRMED_SECONDS)
    assert shares(state)["worker"].tokens == 1000 * CAP
    state = replace(state, now=CONFIRMED_SECONDS + 1)
    assert shares(state)["worker"].tokens == 1000 * SETTINGS.probe_seconds


def test_a_micro_batch_keeps_to_the_limit_on_text() -> None:
    """A micro-batch's text keeps to the limit in bytes, however fast the worker."""
    lean = SETTINGS.model_copy(update={"micro_batch_bytes_max": 5 * 400})
    state = farm([job(waiting=10**4)], {"worker": 10**6})
    assert Size(lean)(draft(state)).shares["worker"][0].blocks == 5


def test_a_worker_that_drains_gets_no_plan() -> None:
    """A worker that drains gets no plan, and its speed does not count."""
    state = farm([job(waiting=40)], {"leaving": 9000, "staying": 1000})
    leaving, staying = state.workers
    made = shares(replace(state, workers=(replace(leaving, draining=True), staying)))
    assert tokens(made) == {"staying": FACTOR * 4000}


def test_a_plan_for_one_is_the_same_as_in_a_plan_for_all() -> None:
    """Under "fcfs" a plan for one worker is the same as in a plan for all."""
    jobs = [job(f"job-{place}", waiting=40, leases=[("fast", 3)]) for place in range(3)]
    state = farm(jobs, {"fast": 3000, "slow": 1000}, held_seconds={"fast": 0.1})
    everybody = decide(state, passes("fcfs")).shares
    for name in ("fast", "slow"):
        one = decide(replace(state, planned=frozenset({name})), passes("fcfs")).shares
        assert one == {name: everybody[name]}


def test_plans_are_short() -> None:
    """A plan has a handful of jobs, though a thousand wait and a thousand are leased."""
    jobs = [job(f"waiting-{place}", waiting=5) for place in range(1000)]
    jobs += [job(f"leased-{place}", leases=[("dead", 1)]) for place in range(1000)]
    made = decide(farm(jobs, {"one": 1000, "other": 1000}), passes()).shares
    assert {len(each) for each in made.values()} == {SHARES_MIN + RESCUES_MAX}


def test_plans_last_until_the_next_one() -> None:
    """Where jobs are so small that a handful is done at once, a plan has more of them."""
    jobs = [job(f"little-{place}", waiting=1) for place in range(1000)]  # of 100 tokens
    for speed, count in ((1000, 5), (10_000, 50), (100_000, SHARES_MAX)):
        made = decide(farm(jobs, {"one": speed}), passes()).shares
        assert len(made["one"]) == count


def test_workers_look_after_the_leases_of_the_dead_between_them() -> None:
    """Jobs of which all is leased are spread over the plans, so that somebody looks at each."""
    jobs = [job(f"job-{place}", leases=[("dead", 1)]) for place in range(10)]
    made = decide(farm(jobs, {"a": 1000, "b": 1000, "c": None}), passes()).shares
    assert {share.job for each in made.values() for share in each} == {each.job for each in jobs}
