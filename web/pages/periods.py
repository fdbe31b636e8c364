"""Periods of time that charts are drawn over."""

from typing import Final, Literal

from embedfarm.watch.job_search import AGE_SECONDS

Period = Literal["hour", "day", "week"]

HOUR: Final = "hour"
PERIODS: Final = AGE_SECONDS
"""The seconds of each period; what is longer than an hour is known in steps of ten minutes."""


def gap_in(period: Period) -> float:
    """Return the seconds between two samples from which on nothing is known between them."""
    return 60.0 if period == HOUR else 1500.0
