"""Tests of modelled workers and jobs, and of the bound that no farm can beat."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.scheduler.simulation.machines import ModelledWorker, fluid_bound, make_workers
from embedfarm.scheduler.simulation.modelled_jobs import JobRun, make_job
from embedfarm.scheduler.simulation.scenario import Machine, Scenario, Work, spread
from tests.scheduler.support import SETTINGS

STEADY = Scenario("steady", "", (Machine(1000.0), Machine(3000.0)), drift=0.0)


def workers(scenario: Scenario = STEADY, seconds: float = 50.0) -> list[ModelledWorker]:
    """Return machines whose speeds are known for some time."""
    return make_workers(scenario, seconds, seed=1)


def one(stops: float, wakes: float = math.inf) -> list[ModelledWorker]:
    """Return a single machine of 1,000 tokens per second that stands still for some time."""
    return workers(replace(STEADY, machines=(Machine(1000.0, stops, wakes),)))


# The bound.


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [
        ([(0.0, 40_000.0)], 10.0),
        ([(5.0, 40_000.0)], 15.0),
        ([(0.0, 40_000.0), (4.0, 8_000.0)], 12.0),  # it comes while the other is being done
        ([(4.0, 8_000.0), (0.0, 40_000.0)], 12.0),  # in any order
        ([(0.0, 40_000.0), (20.0, 8_000.0)], 22.0),  # nothing to do for 10 s
        ([(0.0, 40_000.0), (10.0, 8_000.0)], 12.0),  # just when the other one ends
        ([(0.5, 1_000.0)], 0.75),  # within a second
    ],
)
def test_the_fluid_bound(arrivals: list[tuple[float, float]], seconds: float) -> None:
    """The bound is the time in which all workers together could do the work from when it comes."""
    assert fluid_bound(arrivals, workers()) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("stops", "wakes", "seconds"), [(2.0, 5.0, 13.0), (2.5, 4.25, 11.75), (20.0, 30.0, 10.0)]
)
def test_standing_still_is_in_the_bound(stops: float, wakes: float, seconds: float) -> None:
    """The bound counts the time in which a machine stands still."""
    assert fluid_bound([(0.0, 10_000.0)], one(stops, wakes)) == pytest.approx(seconds)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(100, 10_000)), min_size=1, max_size=4))
def test_more_work_never_ends_sooner(arrivals: list[tuple[float, float]]) -> None:
    """The bound is never before the last arrival, all of the work, or the bound of fewer jobs."""
    machines = workers(replace(STEADY, drift=0.1))
    bound = fluid_bound(arrivals, machines)
    total = sum(tokens for _, tokens in arrivals)
    capacity = np.sum([each.capacity for each in machines], axis=0)
    assert np.interp(bound, np.arange(len(capacity)), capacity) >= total * (1 - 1e-9)
    assert bound >= max(arrives for arrives, _ in arrivals)
    if arrivals[1:]:
        assert fluid_bound(arrivals[1:], machines) <= bound + 1e-9


# Machines.


def test_speeds_are_spread_evenly() -> None:
    """The fastest machine does four times what the slowest does, the ratio of neighbours is one."""
    speeds = [each.tokens_per_second for each in spread(8)]
    assert speeds[-1] == pytest.approx(4 * speeds[0])
    assert np.allclose(np.diff(np.log(speeds)), math.log(4) / 7)
    assert len(spread(1)) == 1


@given(st.floats(0, 40), st.floats(1, 20_000))
def test_work_takes_its_time(start: float, tokens: float) -> None:
    """Work ends when the machine could have done it, whatever its drift."""
    (worker,) = workers(replace(STEADY, machines=(Machine(1000.0),), drift=0.2))
    end = worker.finish(start, tokens)
    assert worker.done_by(end) - worker.done_by(start) == pytest.approx(tokens)


def test_what_is_begun_before_a_stop_ends_after_it() -> None:
    """A machine that stands still from 2 s to 5 s ends 3 s of work, begun at 1 s, at 7 s."""
    (worker,) = one(2.0, 5.0)
    assert worker.finish(1.0, 3000.0) == pytest.approx(7.0)
    assert worker.finish(1.0, 999.0) == pytest.approx(1.999)
    assert [worker.alive(now) for now in (1.9, 2.0, 4.9, 5.0)] == [True, False, False, True]


def test_the_dead_finish_nothing() -> None:
    """Work that a machine had begun when it died never ends."""
    (worker,) = one(2.0)
    assert worker.finish(1.0, 3000.0) == math.inf


def test_one_machine_drops() -> None:
    """One machine falls to a tenth after 30 % of the ideal time; the others keep their speed."""
    dropped = workers(replace(STEADY, drop=0.1), seconds=100)
    rates = [each.done_by(60) - each.done_by(59) for each in dropped]
    usual = [each.done_by(29) - each.done_by(28) for each in dropped]
    assert sorted(now / before for now, before in zip(rates, usual, strict=True)) == [
        pytest.approx(0.1),
        pytest.approx(1.0),
    ]


# Jobs.


def test_a_job_is_as_long_as_it_says() -> None:
    """A job costs the time asked for at all speeds together; blocks are 0.1 s of the slowest."""
    job = make_job(Work(seconds=50.0), [20_000, 80_000], SETTINGS)
    assert job.costs.sum() == pytest.approx(50 * 100_000, rel=0.01)
    assert job.costs[0] == pytest.approx(0.1 * 20_000, rel=0.1)
    assert job.chunk_tokens_mean == pytest.approx(100)


def test_long_chunks_cost_more_than_their_tokens() -> None:
    """A token of a chunk of 2,000 tokens costs twice that of a short chunk."""
    job = make_job(Work(lengths=(2000,)), [100_000], SETTINGS)
    assert job.costs.sum() / job.tokens.sum() == pytest.approx(2.0)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=9))
def test_lengths_come_over_and_over(lengths: list[int]) -> None:
    """Blocks tile the repeated list of chunk lengths."""
    job = make_job(Work(seconds=3.0, lengths=lengths), [50_000], SETTINGS)
    chunks = np.resize(lengths, len(job.tokens) * job.block_chunks)
    assert np.allclose(job.tokens, chunks.reshape(-1, job.block_chunks).sum(axis=1))


def leased() -> JobRun:
    """Return a job of which two workers hold two blocks each."""
    job = make_job(Work(seconds=5.0), [20_000], SETTINGS)
    assert list(job.lease("one", 2)) == [0, 1]
    assert list(job.lease("other", 2)) == [2, 3]
    return job


def test_blocks_of_the_dead_are_leased_first() -> None:
    """Blocks of a silent worker go to the next one that leases, and are no new work."""
    job = leased()
    waiting, tokens = job.waiting, job.leased_tokens
    job.expire("one")
    assert list(job.lease("other", 5)) == [0, 1]
    assert (job.waiting, job.leased_tokens) == (waiting, tokens)
    assert list(job.lease("third", 1)) == [4]
    assert job.holders == {0: "other", 1: "other", 2: "other", 3: "other", 4: "third"}


def test_who_commits_first_counts() -> None:
    """A block that two workers did is counted once, and one that came back is not leased again."""
    job = leased()
    job.expire("one")
    assert job.commit([0, 1], 7.0) == job.tokens[:2].sum()
    assert job.commit([1, 2], 8.0) == job.tokens[2]
    assert job.commit([1, 2], 9.0) == 0
    assert job.ended == 8.0
    assert list(job.lease("other", 5)) == [4, 5, 6, 7, 8]
