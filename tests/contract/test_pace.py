"""Tests of paces, and of the times that they forecast."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.pace import (
    NOW_SECONDS,
    Pace,
    TimedMicroBatch,
    WorkDone,
    averages,
    bars_of,
    forecast_seconds,
    paces_now,
    who_works,
)
from embedfarm.contract.records import Completion

NOW = 1000.0


def bar(end: float, seconds: float, chunks: int = 10, job: str = "job") -> TimedMicroBatch:
    """Return a micro-batch with ten tokens for each chunk."""
    return TimedMicroBatch(end, seconds, job, chunks, 10 * chunks)


def chunks_now(*bars: TimedMicroBatch, busy: bool = False) -> float:
    """Return the chunks per second of one worker now."""
    paces = paces_now({"worker": bars}, {"worker"} if busy else set(), NOW)
    pace = paces.by_worker["worker"]
    assert pace.tokens_per_second == pytest.approx(10 * pace.chunks_per_second)
    assert paces.by_job["job"] == pytest.approx(pace)
    return pace.chunks_per_second


def test_jobs_of_one_micro_batch_are_bars_one_after_the_other() -> None:
    """Each bar is as long as its job's share of tokens; only the first may follow a restart."""
    done = Completion(
        worker="w", model="m", job="a", chunks=6, tokens=60, padded_tokens=60, real_tokens=60,
        seconds=6.0, overhead_seconds=0.0, first=True, jobs={"a": (40, 4), "b": (20, 2)},
    )  # fmt: skip
    assert bars_of(done, NOW) == [
        TimedMicroBatch(NOW - 2, 4.0, "a", 4, 40, first=True),
        TimedMicroBatch(NOW, 2.0, "b", 2, 20),
    ]
    alone = msgspec.structs.replace(done, jobs={})
    assert bars_of(alone, NOW) == [TimedMicroBatch(NOW, 6.0, "a", 6, 60, first=True)]


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
    assert paces_now({}, set(), NOW) == ({}, {})


def test_time_between_micro_batches_counts() -> None:
    """A worker that waits half of its time is half as fast."""
    bars = [bar(NOW - 6, 1), bar(NOW - 4, 1), bar(NOW - 2, 1), bar(NOW, 1)]
    assert chunks_now(*bars, busy=True) == pytest.approx(40 / 7)


def test_paces_are_told_apart_by_job() -> None:
    """A worker that serves two jobs in turns shares its time between them."""
    bars = [bar(NOW - 3, 1, job="one"), bar(NOW - 2, 1, 30, job="two")]
    bars += [bar(NOW - 1, 1, job="one"), bar(NOW, 1, 30, job="two")]
    paces = paces_now({"worker": bars}, {"worker"}, NOW)
    assert paces.by_job["one"] == pytest.approx(Pace(50, 5))
    assert paces.by_job["two"] == pytest.approx(Pace(150, 15))
    assert paces.by_worker["worker"] == pytest.approx(Pace(200, 20))


def test_a_job_has_no_time_of_what_others_had_before_it() -> None:
    """The time of a job begins when a worker turns to it, and what comes then shares with it."""
    bars = [bar(NOW - 8, 2, job="old"), bar(NOW - 3, 1, job="one")]
    bars += [bar(NOW - 2, 1, 30, job="two"), bar(NOW - 1, 1, job="one"), bar(NOW, 1, 30, job="two")]
    paces = paces_now({"worker": bars}, {"worker"}, NOW)
    assert paces.by_job["one"] == pytest.approx(Pace(50, 5))
    assert paces.by_job["two"] == pytest.approx(Pace(150, 15))
    assert paces.by_worker["worker"] == pytest.approx(Pace(90, 9))


def test_time_without_a_process_is_none() -> None:
    """While the process of a worker was started again, its pace is that of before and after."""
    bars = [bar(NOW - 8, 1), bar(NOW - 1, 1)._replace(first=True), bar(NOW, 1)]
    assert chunks_now(*bars, busy=True) == pytest.approx(10)


def test_a_pause_is_no_time_of_a_job() -> None:
    """The pace of a job that was resumed is that since then; one in hand counts in part."""
    bars = [bar(NOW - 8, 1), bar(NOW - 1, 2), bar(NOW, 1)]
    paces = paces_now({"worker": bars}, {"worker"}, NOW, {"job": NOW - 2})
    assert paces.by_job["job"] == pytest.approx(Pace(75, 7.5))
    assert paces_now({"worker": bars[:1]}, set(), NOW, {"job": NOW - 2}).by_job["job"] == Pace()


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


def test_an_average_counts_only_what_began_with_the_job() -> None:
    """Nobody knows how much it had of the time of a sample in which it began or was resumed."""
    done = [WorkDone(NOW - 20, 10, {"job": 10}), WorkDone(NOW - 10, 10, {"job": 150})]
    done += [WorkDone(NOW, 10, {"job": 50})]
    assert averages(done, NOW, {"job": NOW - 20.5}) == {"job": [10, 10]}
    assert averages(done, NOW, {"job": NOW - 20}) == {"job": [10, 10]}
    assert averages(done, NOW, {"job": NOW - 15}) == {"job": []}
    assert averages(done, NOW, {"job": NOW}) == {}


def test_an_average_begins_again_when_workers_change() -> None:
    """Nothing counts that was done before a worker joined, or by one that is gone."""
    one, two = {"job": {"one"}}, {"job": {"one", "two"}}
    done = [WorkDone(NOW - 20, 20, {"job": 200}, one), WorkDone(NOW, 20, {"job": 300}, one)]
    assert averages(done, NOW, alive={"one", "two"}) == {"job": [12.5, 12.5]}
    done[0] = done[0]._replace(workers=two)
    assert averages(done, NOW) == averages(done, NOW, alive={"one", "two"})
    assert averages(done, NOW, alive={"one"}) == {"job": [15, 15]}
    again = [done[0]._replace(started=["two"]), done[1]]
    assert averages(again, NOW, alive={"one", "two"}) == {"job": [15, 15]}
    done[1] = done[1]._replace(workers={"job": {"three"}})
    assert averages(done, NOW) == {"job": []}


def test_who_works_now_makes_averages_old() -> None:
    """An average is dropped as soon as another worker, or process, has done a micro-batch."""
    done = [WorkDone(NOW - 1, 20, {"job": 200, "": 200}, {"job": {"one"}, "": {"one"}})]
    for bars, average in (
        ({"one": [bar(NOW, 1)]}, [10, 10]),
        ({"one": [bar(NOW, 1)], "two": [bar(NOW, 1)]}, []),
        ({"one": [bar(NOW, 1)._replace(first=True)]}, []),
        ({}, [10, 10]),
    ):
        assert averages([*done, who_works(bars, NOW)], NOW) == {"job": average, "": average}
    other = averages([*done, who_works({"two": [bar(NOW, 1, job="other")]}, NOW)], NOW)
    assert other == {"job": [10, 10], "other": [], "": []}


def test_what_is_foretold_lies_between_the_fastest_and_the_slowest() -> None:
    """Times are forecast from the rates above zero; without any nothing is known."""
    assert forecast_seconds(100, [10, 0, 4]) == (10, 25)
    assert forecast_seconds(100, [0, 0]) is None
    assert forecast_seconds(0, []) == (0, 0)
