"""Tests of what a command shows of a job that runs."""

from embedfarm.cli.progress import WINDOW_SECONDS, ProgressRates
from embedfarm.contract.status import JobStatus


def at(chunks: int) -> JobStatus:
    """Return the status of a job with so many chunks done, of ten tokens each."""
    return JobStatus(chunks_done=chunks, real_tokens_done=10 * chunks)


def test_a_pace_begins_with_the_first_progress() -> None:
    """A pace counts neither the time before the first progress, nor the chunks done by then."""
    pace = ProgressRates()
    for second in range(20):
        pace.update(at(500), float(second))
    pace.update(at(640), 20.0)
    assert pace.rates == (0, 0)
    assert pace.seconds_left(1000) is None
    pace.update(at(640), 21.0)
    pace.update(at(940), 23.0)
    assert pace.rates == (100, 1000)
    assert pace.seconds_left(1000) == 10


def test_a_pace_is_of_the_last_seconds() -> None:
    """A pace forgets what is longer ago, and is 0 without progress."""
    pace = ProgressRates()
    for second in range(100):
        pace.update(at(second * (10 if second < 50 else 20)), float(second))
    assert pace.rates == (20, 200)
    for second in range(100, 100 + int(WINDOW_SECONDS) + 2):
        pace.update(at(99 * 20), float(second))
    assert pace.rates == (0, 0)


def test_counters_that_fall_are_no_pace() -> None:
    """Counters that fall, as after a server's loss, give a pace of 0."""
    pace = ProgressRates()
    for second, chunks in enumerate((0, 100, 200, 50)):
        pace.update(at(chunks), float(second))
    assert pace.rates == (0, 0)
