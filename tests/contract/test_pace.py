"""Tests of paces, and of the times that they forecast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.pace import (
    NOW_SECONDS,
    Pace,
    TimedMicroBatch,
    WorkDone,
    averages,
    forecast_seconds,
    paces_now,
)

NOW = 1000.0


def bar(end: float, seconds: float, chunks: int = 10, job: str = "job") -> TimedMicroBatch:
    """Return a micro-batch with ten tokens for each chunk."""
    return TimedMicroBatch(end, seconds, job, chunks, 10 * chunks)


def chunks_now(*bars: TimedMicroBatch, busy: bool = False) -> float:
    """Return the chunks per second of one worker now."""
    paces = paces_now({"worker": bars}, {"worker"} if busy else set(), NOW)
    assert all(
        pace.tokens_per_second == pytest.approx(10 * pace.chunks_per_second)
        for pace in paces.values()
    )
    return sum(pace.chunks_per_second for pace in paces.values())


@given(seconds=st.floats(0.05, 14), since=st.floats(0, 0.99))
def test_a_steady_worker_has_its_own_pace(seconds: float, since: float) -> None:
    """A worker's pace is the same wherever in its next micro-batch it is."""
    ends = [NOW - seconds * (since + place) for place in range(int(NOW_SECONDS / seconds) + 1)]
    bars = [bar(end, seconds) for end in reversed(ends) if end > NOW - NOW_SECONDS]
    assert chunks_now(*bars, busy=True) == pytest.approx(10 / seconds, rel=1e-6)


def test_a_worker_that_stopped_slows_down() -> None:
    """The pace of a worker that stopped sinks with the time since its last micro-batch."""
    assert chunks_now(bar(NOW - 9, 1)) == pytest.approx(1)
    assert chunks_now(bar(NOW - 1, 1)) == pytest.approx(5)
    assert paces_now({}, set(), NOW) == {}


def test_time_between_micro_batches_counts() -> None:
    """A worker that waits half of its time is half as fast."""
    bars = [bar(NOW - 6, 1), bar(NOW - 4, 1), bar(NOW - 2, 1), bar(NOW, 1)]
    assert chunks_now(*bars, busy=True) == pytest.approx(40 / 7)


def test_paces_are_told_apart_by_job() -> None:
    """A worker that serves two jobs shares its time between them."""
    bars = [bar(NOW - 1, 1, job="one"), bar(NOW, 1, 30, job="two")]
    paces = paces_now({"worker": bars}, {"worker"}, NOW)
    assert paces["worker", "one"] == pytest.approx(Pace(50, 5))
    assert paces["worker", "two"] == pytest.approx(Pace(150, 15))


def test_a_micro_batch_without_a_duration_breaks_nothing() -> None:
    """A micro-batch of 0 seconds, which another program may report, breaks nothing."""
    assert chunks_now(bar(NOW - 1, 1), bar(NOW, 0.0), busy=True) == pytest.approx(10)


def test_averages_begin_with_the_first_progress() -> None:
    """Averages over 60 s and 300 s begin with a job's first progress, and include idle times."""
    done = [WorkDone(NOW - 80, 10, {"old": 200}), WorkDone(NOW - 60, 20, {"old": 40})]
    done += [WorkDone(NOW - 40, 20, {"old": 40}), WorkDone(NOW - 30, 10, {"old": 60, "new": 50})]
    done += [WorkDone(NOW - 20, 10, {}), WorkDone(NOW - 10, 10, {"new": 100})]
    assert averages(done, NOW) == {"old": [2, 4.25], "new": [5, 5]}
    assert averages([], NOW) == {}


def test_a_young_average_is_none() -> None:
    """What began a moment ago has no average: its next micro-batch counts only when it is done."""
    done = [WorkDone(NOW - 12, 1, {"job": 10}), WorkDone(NOW - 1, 11, {})]
    assert averages(done, NOW) == {"job": []}


def test_an_average_begins_again_after_a_break() -> None:
    """While a model was loaded, or nobody worked on a job, says nothing about how fast it is."""
    done = [WorkDone(NOW - 40, 5, {"job": 1000}), WorkDone(NOW - 20, 20, {})]
    done += [WorkDone(NOW - 10, 10, {"job": 50}), WorkDone(NOW, 10, {"job": 150})]
    assert averages(done, NOW) == {"job": [10, 10]}


def test_what_is_foretold_lies_between_the_fastest_and_the_slowest() -> None:
    """Times are forecast from the rates above zero; without any nothing is known."""
    assert forecast_seconds(100, [10, 0, 4]) == (10, 25)
    assert forecast_seconds(100, [0, 0]) is None
    assert forecast_seconds(0, []) == (0, 0)
