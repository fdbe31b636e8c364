"""Tests of terms as people write them."""

from dataclasses import asdict
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.scheduling_terms import (
    DEADLINE_MS_MAX,
    PRIORITIES,
    Terms,
    priority_name,
    read_deadline,
    term_options,
)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"priority": 3}, "priority 3 is not one of 0 .normal., 1 .high., 2 .urgent."),
        ({"weight": 0}, "weight 0 is not in 1 to 1000"),
        ({"weight": 1001}, "weight 1001"),
        ({"tenant": "a\nb"}, "64 printable"),
        ({"tenant": "x" * 65}, "64 printable"),
        ({"deadline_ms": -1}, "deadline"),
        ({"max_hours": -1.0}, "max_hours is 0, for none, or up to"),
        ({"max_cost": float("nan")}, "max_cost is 0, for none, or up to"),
        ({"labels": "a,b c"}, "'b c' is no label"),
        ({"labels": "x" * 41}, "is no label"),
        ({"labels": ",".join(map(str, range(11)))}, "at most 10 labels"),
    ],
)
def test_terms_out_of_range(wrong: dict[str, Any], named: str) -> None:
    """Terms that no scheduler could use are refused, with a message that says what would do."""
    with pytest.raises(ValueError, match=named):
        Terms(**wrong)


def test_labels_are_kept_in_order_and_once() -> None:
    """Labels may be written with spaces and twice; they are kept in order, each once."""
    assert Terms(labels=" nightly, wiki,a ,nightly,,").labels == "a,nightly,wiki"
    assert Terms(labels=" , ").labels == ""


def test_priorities_have_names() -> None:
    """Each priority has a name; an unknown number is shown as it is."""
    assert [priority_name(value) for value in PRIORITIES.values()] == list(PRIORITIES)
    assert priority_name(7) == "7"


@given(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_durations(days: int, hours: int, minutes: int, seconds: int) -> None:
    """A duration in days, hours, minutes and seconds counts from now."""
    expected = 1000 * (1_000 + ((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    assert read_deadline(f"{days}d{hours}h{minutes}m{seconds}s", 1_000) == expected
    assert read_deadline(f"{days}m", 0) == days * 60_000


def test_times() -> None:
    """A time names its zone, or is local; it may have passed."""
    assert read_deadline("1970-01-01T00:01:00+00:00") == 60_000
    assert read_deadline("1970-01-02T00:00+01:00") == 23 * 3_600_000
    local = datetime(2030, 1, 31, 18, 30).timestamp()  # noqa: DTZ001 # local is what is meant
    assert read_deadline("2030-01-31T18:30") == 1000 * int(local)
    assert [read_deadline(text) for text in ("", "none")] == [0, 0]


@given(st.integers(0, DEADLINE_MS_MAX), st.sampled_from(list(PRIORITIES.values())))
def test_options_say_the_same(deadline_ms: int, priority: int) -> None:
    """Terms that are given again as options are the terms that they were."""
    terms = Terms(priority, "red", 3, deadline_ms, "a,b", 0.5, 10.0)
    said = term_options(terms)
    said["priority"] = PRIORITIES[str(said["priority"])]
    said["deadline_ms"] = read_deadline(str(said.pop("deadline")))
    assert said == asdict(terms)


@pytest.mark.parametrize("text", ["soon", "2", "2h 5m", "h", "9" * 400 + "d", "2030-02-30", "-2h"])
def test_no_deadline(text: str) -> None:
    """A text that is no deadline is refused with examples, and without a parser's error."""
    with pytest.raises(ValueError, match="is no deadline: give a time such as"):
        read_deadline(text)
