"""Each pass alone, and what holds for every decision."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.jobs import JobStatus, Pending
from embedfarm.records import JobShare, Rate
from embedfarm.settings import Settings
from scheduler.passes import Defer, Size, Tail, decide, default_passes, oldest_first
from scheduler.state import Draft, FarmState, JobState, WorkerState

SETTINGS = Settings()
BLOCK_TOKENS = 100


def job(
    name: str = "job",
    *,
    waiting: int = 0,
    state: str = "closed",
    leases: Sequence[tuple[str, int]] = (),
    deliveries: int = 1,
    **counters: int,
) -> JobState:
    """A job of equal blocks; `leases` tells how many blocks who holds, the oldest first."""
    held = [worker for worker, count in leases for _ in range(count)]
    blocks = waiting + len(held)
    status = JobStatus(
        state=state,
        blocks_in=blocks,
        chunks_in=8 * blocks,
        tokens_in=BLOCK_TOKENS * blocks,
        bytes_in=400 * blocks,
        created_ms=counters.get("created_ms", 0),
        result_bytes=counters.get("result_bytes", 0),
    )
    pending = [
        Pending("in", f"{8 * place + 1}-0", worker, 0, deliveries)
        for place, worker in enumerate(held)
    ]
    return JobState(name, "model", status, waiting, tuple(pending))


def farm(
    jobs: Sequence[JobState],
    speeds: Mapping[str, float | None],
    *,
    overhead: float = 0.02,
    held_seconds: Mapping[str, float] | None = None,
) -> FarmState:
    """A farm whose workers have these speeds for every job; None for one that is unknown."""
    rates = {
        (worker, each.job): Rate(
            tokens_per_second=speed, overhead_seconds=overhead, updated=0, samples=1
        )
        for worker, speed in speeds.items()
        for each in jobs
        if speed is not None
    }
    workers = tuple(WorkerState(name, (held_seconds or {}).get(name, 0.0)) for name in speeds)
    return FarmState(tuple(jobs), workers, rates)


def draft(state: FarmState) -> Draft:
    """A draft that no pass has seen."""
    return Draft(state=state, jobs=state.jobs)


def shares(state: FarmState) -> dict[str, JobShare]:
    """The first share of each worker."""
    made = decide(state, default_passes(SETTINGS)).shares
    return {worker: each[0] for worker, each in made.items()}


# Defer and order.


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
    """Paused, cancelled or not collected: the job is left out, and the notes say why."""
    kept = job("a", waiting=1, state="open")
    made = Defer(SETTINGS)(draft(farm([kept, deferred], {})))
    assert made.jobs == (kept,)
    assert made.notes == (reason,)


@given(st.lists(st.integers(0, 3), max_size=6))
def test_older_jobs_come_first(created: list[int]) -> None:
    """Jobs are ordered by age, those of the same age by name, and none is lost."""
    jobs = [job(f"job-{place}", created_ms=each) for place, each in enumerate(created)]
    ordered = oldest_first(draft(farm(jobs, {}))).jobs
    assert [(each.status.created_ms, each.job) for each in ordered] == sorted(
        (each.status.created_ms, each.job) for each in jobs
    )


# Size.


def test_shares_follow_speed() -> None:
    """A quarter of what waits, by speed: a worker leases twice before the plan is renewed."""
    made = shares(farm([job(waiting=40)], {"fast": 3000, "slow": 1000}))
    assert (made["fast"].tokens, made["slow"].tokens) == (750, 250)
    assert (made["fast"].blocks, made["slow"].blocks) == (8, 2)


def test_no_micro_batch_is_longer_than_the_cap() -> None:
    """However much waits, a worker leases at most 2 s of work at a time."""
    made = shares(farm([job(waiting=10**6)], {"fast": 4000, "slow": 1000}))
    assert made["fast"].tokens == 4000 * SETTINGS.micro_batch_seconds_max
    assert made["slow"].tokens == 1000 * SETTINGS.micro_batch_seconds_max


def test_no_micro_batch_is_shorter_than_twice_the_overhead() -> None:
    """However little waits, at most a third of the time goes into overhead."""
    made = shares(farm([job(waiting=1)], {"worker": 10_000}, overhead=0.1))
    assert made["worker"].tokens == 2 * 0.1 * 10_000


def test_a_huge_overhead_does_not_lift_the_floor_beyond_half_the_cap() -> None:
    """A worker that waited a minute for its server still leaves work to others at the end."""
    made = shares(farm([job(waiting=1)], {"worker": 10_000}, overhead=60))
    assert made["worker"].tokens == 10_000 * SETTINGS.micro_batch_seconds_max / 2


def test_an_unknown_worker_probes() -> None:
    """The first micro-batch is 0.3 s of the slowest known worker, whatever waits."""
    made = shares(farm([job(waiting=10**4)], {"fast": 9000, "slow": 1000, "new": None}))
    assert made["new"].tokens == 300
    assert made["new"].blocks == 3


def test_the_first_workers_of_all_probe_with_a_block() -> None:
    """Where nothing is known of anybody, everybody starts with one block."""
    made = shares(farm([job(waiting=100)], {"one": None, "other": None}))
    assert [(share.tokens, share.blocks) for share in made.values()] == [(0, 1), (0, 1)]


def test_a_worker_that_drains_gets_no_plan() -> None:
    """It takes no more work, and its speed counts no more."""
    state = farm([job(waiting=40)], {"leaving": 9000, "staying": 1000})
    leaving, staying = state.workers
    made = shares(replace(state, workers=(replace(leaving, draining=True), staying)))
    assert set(made) == {"staying"}
    assert made["staying"].tokens == 1000


# Tail.


def tail(state: FarmState) -> dict[str, list[str]]:
    """Copies by worker, of those that were given any."""
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


def test_a_copy_that_would_lose_is_not_made() -> None:
    """Between equals nobody repeats a block that its owner has begun."""
    leases = [("busy", 2)]
    assert not tail(
        farm([job(leases=leases)], {"busy": 1000, "idle": 1000}, held_seconds={"busy": 0.1})
    )


def test_an_owner_that_hangs_is_overtaken() -> None:
    """A worker that beats but is overdue is not believed, even if its speed is unknown."""
    for speed in (1000.0, None):
        state = farm(
            [job(leases=[("hung", 1)])], {"hung": speed, "idle": 1000}, held_seconds={"hung": 20}
        )
        assert tail(state) == {"idle": ["1-0"]}


def test_blocks_of_the_dead_are_left_to_the_rescue() -> None:
    """A holder without a heartbeat is not raced: only the rescue counts deliveries."""
    assert not tail(farm([job(leases=[("dead", 5)])], {"idle": 1000}))


def test_a_suspect_block_is_not_copied() -> None:
    """A block whose last delivery this is goes through one worker at a time."""
    suspect = job(leases=[("slow", 5)], deliveries=SETTINGS.deliveries_max)
    assert not tail(farm([suspect], {"slow": 1, "idle": 1000}))


def test_nothing_is_copied_while_something_waits() -> None:
    """Not while a block waits in any job, and not in a job that is still open."""
    late = job(leases=[("slow", 5)])
    speeds = {"slow": 10.0, "idle": 1000.0}
    assert tail(farm([late], speeds))
    assert not tail(farm([late, job("other", waiting=1)], speeds))
    assert not tail(farm([job(leases=[("slow", 5)], state="open")], speeds))


def test_a_worker_busy_with_another_job_copies_nothing() -> None:
    """Who holds a lease of any job is not idle."""
    jobs = [job(leases=[("slow", 5)]), job("other", leases=[("busy", 5)], state="open")]
    assert not tail(farm(jobs, {"slow": 10, "busy": 1000}))


def test_copies_stay_below_a_full_micro_batch() -> None:
    """A copying worker takes no more than the cap, in time and in bytes."""
    state = farm([job(leases=[("slow", 200)])], {"slow": 1, "idle": 1000})
    assert len(tail(state)["idle"]) == 20
    lean = SETTINGS.model_copy(update={"micro_batch_bytes_max": 5 * 400})
    made = decide(state, [Size(lean), Tail(lean)]).shares
    assert len(made["idle"][0].copies) == 5


# Every decision.

speeds = st.one_of(st.none(), st.floats(1, 1e6))


@st.composite
def states(draw: st.DrawFn) -> FarmState:
    """Farms with up to 4 workers and 3 jobs in any state."""
    names = [f"worker-{number}" for number in range(draw(st.integers(0, 4)))]
    holders = st.sampled_from([*names, "dead"])
    jobs = [
        job(
            f"job-{number}",
            waiting=draw(st.sampled_from([0, 0, 1, 7, 1000])),
            state=draw(st.sampled_from(["closed", "open", "paused", "cancelled"])),
            leases=draw(st.lists(st.tuples(holders, st.integers(1, 9)), max_size=3)),
            deliveries=draw(st.integers(1, 4)),
            created_ms=draw(st.integers(0, 2)),
            result_bytes=draw(st.sampled_from([0, 0, SETTINGS.results_bytes_max])),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    state = farm(
        jobs,
        {name: draw(speeds) for name in names},
        overhead=draw(st.floats(0, 100)),
        held_seconds={name: draw(st.floats(0, 30)) for name in names},
    )
    workers = tuple(replace(each, draining=draw(st.booleans())) for each in state.workers)
    return replace(state, workers=workers)


@given(states())
def test_a_decision_is_a_function_of_the_state(state: FarmState) -> None:
    """The same state gives the same draft, and no pass changes the state."""
    before = copy.deepcopy(state)
    made = decide(state, default_passes(SETTINGS))
    assert made == decide(before, default_passes(SETTINGS))
    assert state == before
    assert made.state is state


@given(states())
def test_no_pass_loses_or_invents_work(state: FarmState) -> None:
    """After each pass: no job twice or from nowhere, and each left-out one is told in a note."""
    current = draft(state)
    for each in default_passes(SETTINGS):
        current = each(current)
        names = [left.job for left in current.jobs]
        assert len(names) == len(set(names))
        assert all(left in state.jobs for left in current.jobs)
        for missing in state.jobs:
            told = any(note.startswith(f"{missing.job} deferred") for note in current.notes)
            assert (missing in current.jobs) != told
        for made in current.shares.values():
            assert [share.job for share in made] == names


@given(states())
def test_every_live_worker_gets_a_plan(state: FarmState) -> None:
    """One for each that is not draining, even an empty one, and none for anybody else."""
    made = decide(state, default_passes(SETTINGS)).shares
    assert set(made) == {worker.name for worker in state.workers if not worker.draining}


@given(states())
def test_sizes_stay_within_bounds(state: FarmState) -> None:
    """Each share has a block or more; that of a known worker lies between floor and cap."""
    for name, made in decide(state, default_passes(SETTINGS)).shares.items():
        for share in made:
            assert share.blocks >= 1
            rate = state.rates.get((name, share.job))
            if rate is not None:
                cap = SETTINGS.micro_batch_seconds_max * rate.tokens_per_second
                floor = min(2 * rate.overhead_seconds * rate.tokens_per_second, cap / 2)
                assert int(floor * (1 - 1e-9)) <= share.tokens <= cap


@given(states())
def test_a_faster_worker_gets_no_less(state: FarmState) -> None:
    """Of two workers with the same overhead the faster one may lease at least as much."""
    made = decide(state, default_passes(SETTINGS))
    for place, left in enumerate(made.jobs):
        ordered = sorted(
            (state.rates[name, left.job].tokens_per_second, each[place].tokens, each[place].blocks)
            for name, each in made.shares.items()
            if (name, left.job) in state.rates
        )
        assert [tokens for _, tokens, _ in ordered] == sorted(tokens for _, tokens, _ in ordered)
        assert [blocks for _, _, blocks in ordered] == sorted(blocks for _, _, blocks in ordered)


@given(states())
def test_copies_are_of_leases_and_only_once(state: FarmState) -> None:
    """A copied block is leased to another live worker, and no two workers copy the same."""
    made = decide(state, default_passes(SETTINGS)).shares
    live = {worker.name for worker in state.workers}
    owners = {(each.job, lease.id): lease.worker for each in state.jobs for lease in each.leases}
    pairs = [
        (share.job, identifier, name)
        for name, each in made.items()
        for share in each
        for identifier in share.copies
    ]
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    for job_name, identifier, name in pairs:
        assert owners[job_name, identifier] in live - {name}
