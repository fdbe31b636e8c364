"""Figures, times and texts of unknown origin, formatted for people."""

import math
from datetime import UTC, datetime
from typing import Final

from embedfarm.contract.scheduling_terms import DEADLINE_MS_MAX

EMBEDDED_ENOUGH: Final = 100  # chunks, to say how long one takes
MINUTE: Final = 60
HOUR: Final = 3600
UNITS: Final = ((1, "s"), (MINUTE, "min"), (HOUR, "h"), (24 * HOUR, "d"))
UNITS_OF_NEXT: Final = 90  # up to so many of a unit; more are said in the next one
COUNT_SHORTENED: Final = 10_000
DIGITS_ROUNDED_UP: Final = 999.5  # three digits would make it four
PREFIXES: Final = "kMGT"


def format_seconds(seconds: float) -> str:
    """Format a duration as a person would say it."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE:02d} min"


def moment_of(seconds: float) -> datetime:
    """Return the date of any Unix time; one beyond the calendar is the calendar's nearest end."""
    return datetime.fromtimestamp(min(max(seconds, 0), DEADLINE_MS_MAX / 1000), UTC)


def format_moment(seconds: float) -> str:
    """Format a Unix time for people, in UTC."""
    return moment_of(seconds).strftime("%Y-%m-%d %H:%M:%S UTC")


def one_line(text: str, characters_max: int) -> str:
    """Make a text of unknown origin fit for a line: short, and nothing in it moves a cursor."""
    shown = "".join(each if each.isprintable() else " " for each in text[: characters_max + 1])
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def format_range(low: float, high: float) -> str:
    """Format a range of seconds in the unit of its longer end, such as "2 to 5 min"."""
    unit, name = next((each for each in UNITS if high < each[0] * UNITS_OF_NEXT), UNITS[-1])
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return f"{first} to {last} {name}" if first + 1 < last else f"{last} {name}"


def format_count(count: float) -> str:
    """Format a number in at most six characters, such as 9,999 or 12.3k."""
    if count < COUNT_SHORTENED:
        return f"{count:,.0f}"
    sizes = range(1, len(PREFIXES))
    size = next((n for n in sizes if count < DIGITS_ROUNDED_UP * 1000**n), len(PREFIXES))
    return f"{count / 1000**size:.3g}{PREFIXES[size - 1]}"


def counted(count: int, noun: str) -> str:
    """Format a number of things, such as "1 part" or "1,234 parts"; a noun's plural takes an s."""
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def describe_reuse(reused: int, embedded: int, seconds: float) -> str:
    """Describe how many vectors were there already, and the time that making them would have taken.

    Args:
        reused: Number of chunks whose vectors were there.
        embedded: Number of chunks that were embedded.
        seconds: Time from the first block of these to their last result.
    """
    saved = reused * seconds / embedded if embedded >= EMBEDDED_ENOUGH else 0.0
    return f"{reused:,} reused" + (f", about {format_seconds(saved)} saved" if saved else "")


def format_bytes(count: float) -> str:
    """Format a number of bytes in MiB, or in GiB from 1 GiB on."""
    return f"{count / (1 << 20):,.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):,.1f} GiB"
