"""Tests of the scheduler's own figures, from known numbers."""

from dataclasses import replace

import msgspec
import pytest

from embedfarm.contract.records import Completion, SchedulerStats
from embedfarm.scheduler.state import FarmState, JobState
from embedfarm.scheduler.statistics import RECENT_SECONDS, Statistics
from tests.scheduler.support import farm, job

LIGHT = job("light", waiting=10)
HEAVY = replace(job("heavy", waiting=10), model="heavy")


def two_models(*jobs: JobState) -> FarmState:
    """Return a farm that does 4,000 tokens per second, and a quarter of that of heavy ones."""
    state = farm([LIGHT], {"one": 3000, "other": 1000})
    ((kind, rates),) = state.rates.items()
    slow = {
        name: msgspec.structs.replace(rate, tokens_per_second=rate.tokens_per_second / 4)
        for name, rate in rates.items()
    }
    return replace(state, jobs=jobs, rates={kind: rates, ("heavy", kind[1]): slow})


def done(name: str, tokens: int, padded: int = 0, seconds: float = 1.0) -> Completion:
    """Return the completion of a micro-batch of a job."""
    return Completion(
        worker="one",
        model="model",
        job=name,
        chunks=1,
        tokens=tokens,
        padded_tokens=padded,
        real_tokens=tokens,
        seconds=seconds,
        overhead_seconds=0.0,
    )


def figures(kept: Statistics, now: float) -> SchedulerStats:
    """Return all figures of a scheduler at a moment."""
    return kept.figures(["size"], {}, {}, now)


def test_efficiency_is_what_was_done_of_what_could_have_been() -> None:
    """The efficiency is 0.75 where 3,000 of 4,000 possible tokens are done in a second."""
    kept = Statistics()
    kept.decided(two_models(LIGHT), 0.001, 0.0)
    kept.completed([(done("light", 3000), 0.0)], 1.0)
    assert figures(kept, 1.0).efficiency == pytest.approx(0.75)
    assert figures(kept, 1.0).tokens_per_second == pytest.approx(3000)


def test_efficiency_is_one_at_most() -> None:
    """Workers that beat their rates for a while do all that they could, and not 106 % of it."""
    kept = Statistics()
    kept.decided(two_models(LIGHT), 0.001, 0.0)
    kept.completed([(done("light", 4240), 0.0)], 1.0)
    assert figures(kept, 1.0).efficiency == 1.0


@pytest.mark.parametrize("jobs", [(LIGHT, HEAVY), (HEAVY, LIGHT)])
def test_a_job_of_a_heavy_model_counts_by_its_own_speed(jobs: tuple[JobState, ...]) -> None:
    """Tokens of a heavy model count for the efficiency by the workers' speed for that model."""
    kept = Statistics()
    kept.decided(two_models(*jobs), 0.001, 0.0)
    kept.completed([(done("light", 2000), 0.0), (done("heavy", 500), 0.0)], 1.0)
    assert figures(kept, 2.0).efficiency == pytest.approx(0.5)


@pytest.mark.parametrize(
    "idle",
    [
        (),
        (replace(LIGHT, waiting_blocks=0),),
        (job("light", waiting=10, state="paused"),),
    ],
)
def test_time_without_work_is_not_held_against_anybody(idle: tuple[JobState, ...]) -> None:
    """A second in which nothing is there or may run does not lower the efficiency."""
    kept = Statistics()
    kept.decided(two_models(LIGHT), 0.001, 0.0)
    kept.completed([(done("light", 3000), 0.0)], 1.0)
    kept.decided(two_models(*idle), 0.001, 1.0)
    assert figures(kept, 2.0).efficiency == pytest.approx(0.75)
    assert figures(kept, 2.0).tokens_per_second == pytest.approx(1500)


def test_what_is_unknown_is_no_efficiency() -> None:
    """A job that no worker was measured on gives no efficiency."""
    kept = Statistics()
    kept.decided(farm([LIGHT], {"one": None}), 0.001, 0.0)
    kept.completed([(done("light", 3000), 0.0)], 1.0)
    assert figures(kept, 1.0).efficiency == 0.0


def test_padding_is_over_real_tokens() -> None:
    """1,000 real tokens that went through as 1,250 are a padding of 0.25."""
    kept = Statistics()
    assert figures(kept, 0.0).padding == 0.0
    kept.completed([(done("light", 600, 700), 0.0), (done("light", 400, 550), 0.0)], 1.0)
    assert figures(kept, 1.0).padding == pytest.approx(0.25)


def test_percentiles_and_means() -> None:
    """Means and 99th percentiles of decisions and micro-batches are right, as are predictions."""
    kept = Statistics()
    for each in range(101):
        kept.decided(two_models(), each / 1000, 1.0)
        kept.completed([(done("light", 10, seconds=each), each / 2)], 1.0)
    found = figures(kept, 2.0)
    assert found.decision_seconds_mean == pytest.approx(0.05)
    assert found.decision_seconds_p99 == pytest.approx(0.099)
    assert found.micro_batch_seconds_mean == pytest.approx(50)
    assert found.micro_batch_seconds_p99 == pytest.approx(99)
    assert found.prediction_error == pytest.approx(1.0)


def test_only_the_last_minute_counts() -> None:
    """Figures are of the last minute, but for the totals."""
    kept = Statistics()
    kept.decided(two_models(LIGHT), 9.0, 0.0)
    kept.completed([(done("light", 7000, 9000, 9.0), 1.0)], 0.5)
    kept.decided(two_models(LIGHT), 0.002, RECENT_SECONDS)
    kept.completed([(done("light", 1000, 1100), 2.0)], RECENT_SECONDS + 1)
    found = figures(kept, RECENT_SECONDS + 1)
    assert (found.decisions, found.micro_batches, found.tokens) == (2, 2, 8000)
    assert found.decision_seconds_p99 == pytest.approx(0.002)
    assert found.micro_batch_seconds_p99 == pytest.approx(1.0)
    assert found.padding == pytest.approx(0.1)
    assert found.prediction_error == pytest.approx(0.5)
    assert found.efficiency == pytest.approx(0.25)
