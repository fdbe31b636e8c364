"""Periods of time that charts are drawn over."""

from typing import Final, Literal

Period = Literal["hour", "day", "week"]

HOUR: Final = "hour"
PERIODS: Final[dict[Period, float]] = {"hour": 3600.0, "day": 86_400.0, "week": 7 * 86_400.0}
"""The seconds of each period; what is longer than an hour is known in steps of ten minutes."""


def gap_in(period: Period) -> float:
    """Return the seconds between two samples from which on nothing is known between them."""
    return 60.0 if period == HOUR else 1500.0
