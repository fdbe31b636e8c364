"""Tests of figures and other people's words in a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.formatting import (
    counted,
    format_bytes,
    format_count,
    format_range,
    one_line,
)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 0, "0 s"),
        (12.2, 12.9, "13 s"),
        (40, 55.5, "40 to 56 s"),
        (70, 200, "1 to 4 min"),
        (3700, 4000, "61 to 67 min"),
        (3700, 9000, "1 to 3 h"),
        (86400, 10 * 86400, "1 to 10 d"),
    ],
)
def test_a_range_is_said_in_one_unit(low: float, high: float, words: str) -> None:
    """A range is in the unit of its longer end, and is one figure where it is narrow."""
    assert format_range(low, high) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0"), (9999, "9,999"), (10_000, "10k"), (12_345, "12.3k"), (999_999, "1M")],
)
def test_counts_are_short(count: float, words: str) -> None:
    """A count is exact up to four digits, and then has three."""
    assert format_count(count) == words


@given(st.floats(0, 1e15))
def test_no_count_is_wide(count: float) -> None:
    """A count has six characters at most, so that columns stay where they are."""
    assert len(format_count(count)) <= 6


def test_sizes() -> None:
    """A size is in MiB, or in GiB from 1 GiB on."""
    assert (format_bytes(0), format_bytes((1 << 30) - 1)) == ("0 MiB", "1,024 MiB")
    assert format_bytes(3 << 29) == "1.5 GiB"


@given(st.text(max_size=30), st.integers(1, 20))
def test_a_line_stays_a_line(text: str, characters_max: int) -> None:
    """A shortened text has only printable characters, and no more than asked for."""
    shown = one_line(text, characters_max)
    assert shown.isprintable()
    assert len(shown) <= characters_max
    assert one_line("red \x1b[31m\nline", 40) == "red  [31m line"


def test_counted() -> None:
    """One thing is singular, and all other numbers are plural."""
    assert [counted(count, "part") for count in (0, 1, 2, 1234)] == [
        "0 parts", "1 part", "2 parts", "1,234 parts",
    ]  # fmt: skip
