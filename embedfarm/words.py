"""Figures and other people's words as a person reads them."""

import math
from typing import Final

MINUTE: Final = 60
HOUR: Final = 3600
UNITS: Final = ((1, "s"), (MINUTE, "min"), (HOUR, "h"), (24 * HOUR, "d"))
UNITS_OF_NEXT: Final = 90  # so many seconds are said as such; more are minutes
COUNT_SHORTENED: Final = 10_000
DIGITS_ROUNDED_UP: Final = 999.5  # three digits would make it four
PREFIXES: Final = "kMGT"


def format_seconds(seconds: float) -> str:
    """A duration as a person would say it."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE:02d} min"


def one_line(text: str, characters_max: int) -> str:
    """Text of unknown origin as part of a line: nothing in it moves a cursor, and it is short."""
    shown = "".join(each if each.isprintable() else " " for each in text[: characters_max + 1])
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def format_range(low: float, high: float) -> str:
    """A time between two, in the unit of the longer one: so much is known, and no more."""
    unit, name = next((each for each in UNITS if high < each[0] * UNITS_OF_NEXT), UNITS[-1])
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return f"{first} to {last} {name}" if first + 1 < last else f"{last} {name}"


def format_count(count: float) -> str:
    """A number in at most six characters, such as 9,999 or 12.3k."""
    if count < COUNT_SHORTENED:
        return f"{count:,.0f}"
    sizes = range(1, len(PREFIXES))
    size = next((n for n in sizes if count < DIGITS_ROUNDED_UP * 1000**n), len(PREFIXES))
    return f"{count / 1000**size:.3g}{PREFIXES[size - 1]}"


def format_bytes(count: float) -> str:
    """A size in MiB, or in GiB from one of them on."""
    return f"{count / (1 << 20):,.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):,.1f} GiB"
