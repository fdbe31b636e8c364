"""Figures and other people's words as a person reads them."""

from typing import Final

MINUTE: Final = 60
HOUR: Final = 3600


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
