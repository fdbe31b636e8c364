"""What a command shows of a job that runs."""

from embedfarm.cli.progress import WINDOW_SECONDS, Pace
from embedfarm.status import JobStatus


def at(chunks: int) -> JobStatus:
    """A job of which so many chunks are done, of ten tokens each."""
    return JobStatus(chunks_done=chunks, real_tokens_done=10 * chunks)


def test_a_pace_begins_with_the_first_progress() -> None:
    """Neither the time to load a model counts nor what was done when it began to look."""
    pace = Pace()
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
    """What is longer ago is forgotten; without progress there is no pace."""
    pace = Pace()
    for second in range(100):
        pace.update(at(second * (10 if second < 50 else 20)), float(second))
    assert pace.rates == (20, 200)
    for second in range(100, 100 + int(WINDOW_SECONDS) + 2):
        pace.update(at(99 * 20), float(second))
    assert pace.rates == (0, 0)


def test_counters_that_fall_are_no_pace() -> None:
    """A server that lost the end of its log counts some chunks again."""
    pace = Pace()
    for second, chunks in enumerate((0, 100, 200, 50)):
        pace.update(at(chunks), float(second))
    assert pace.rates == (0, 0)
