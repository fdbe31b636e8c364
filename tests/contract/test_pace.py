"""How fast it goes, and what that foretells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.pace import NOW_SECONDS, Batch, Done, Pace, averages, foretell, paces_now

NOW = 1000.0


def bar(end: float, seconds: float, chunks: int = 10, job: str = "job") -> Batch:
    """A micro-batch; its tokens are ten for a chunk."""
    return Batch(end, seconds, job, chunks, 10 * chunks)


def chunks_now(*bars: Batch, busy: bool = False) -> float:
    """Chunks per second of one worker."""
    paces = paces_now({"worker": bars}, {"worker"} if busy else set(), NOW)
    assert all(
        pace.tokens_per_second == pytest.approx(10 * pace.chunks_per_second)
        for pace in paces.values()
    )
    return sum(pace.chunks_per_second for pace in paces.values())


@given(seconds=st.floats(0.05, 14), since=st.floats(0, 0.99))
def test_a_steady_worker_has_its_own_pace(seconds: float, since: float) -> None:
    """One micro-batch of 10 chunks after the other: its pace, wherever in the next one it is."""
    ends = [NOW - seconds * (since + place) for place in range(int(NOW_SECONDS / seconds) + 1)]
    bars = [bar(end, seconds) for end in reversed(ends) if end > NOW - NOW_SECONDS]
    assert chunks_now(*bars, busy=True) == pytest.approx(10 / seconds, rel=1e-6)


def test_a_worker_that_stopped_slows_down() -> None:
    """What it did is spread over the time since, until it leaves the window."""
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
    """Another program's completion may say 0 seconds."""
    assert chunks_now(bar(NOW - 1, 1), bar(NOW, 0.0), busy=True) == pytest.approx(10)


def test_averages_begin_with_the_first_progress() -> None:
    """Over a minute and five; of a job that began later, from then on, idle times included."""
    done = [Done(NOW - 80, 10, {"old": 200})]
    done += [Done(NOW - 30, 10, {"old": 60, "new": 50}), Done(NOW - 20, 10, {})]
    done += [Done(NOW - 10, 10, {"new": 100})]
    assert averages(done, NOW) == {"old": [2, 6.5], "new": [5, 5]}
    assert averages(done[:1], NOW) == {"old": [20]}
    assert averages([], NOW) == {}


def test_what_is_foretold_lies_between_the_fastest_and_the_slowest() -> None:
    """A rate of zero is left out; if all are, nothing is known; nothing left takes no time."""
    assert foretell(100, [10, 0, 4]) == (10, 25)
    assert foretell(100, [0, 0]) is None
    assert foretell(0, []) == (0, 0)
