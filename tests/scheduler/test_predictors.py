"""Tests of two predictors of a worker's speed: the one that was right lately counts."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from embedfarm.contract.records import Completion
from embedfarm.scheduler.history import COSTS_MIN, History

HALF_LIFE = 4.0
LAUNCH, TOKEN = 0.2, 1e-3  # seconds


def completion(tokens: int, seconds: float, pairs: int = 0) -> Completion:
    """Return the completion of a micro-batch with chunks of 100 tokens."""
    return Completion(
        worker="worker",
        model="model",
        job="job",
        chunks=max(1, tokens // 100),
        tokens=tokens,
        padded_tokens=tokens,
        real_tokens=tokens,
        seconds=seconds,
        overhead_seconds=LAUNCH,
        pairs=pairs,
    )


def speed(done: Sequence[Completion]) -> float:
    """Return the tokens per second that a history predicts after some completions."""
    history = History(HALF_LIFE)
    history.learn(done, {"job": 100.0}, 0.0)
    return history.rates("model", 6)["worker"].tokens_per_second


def costly(sizes: Sequence[int], *, slower: float = 1.0) -> list[Completion]:
    """Return completions of micro-batches that cost a launch, and some time for each token."""
    return [completion(each, slower * (LAUNCH + TOKEN * each)) for each in sizes]


def sizes(count: int, least: int = 100, most: int = 2000) -> list[int]:
    """Return random sizes of micro-batches, in tokens."""
    return [int(each) for each in np.random.default_rng(1).integers(least, most, count)]


def test_a_launch_is_not_taken_for_slowness() -> None:
    """Short micro-batches after long ones leave the speed of tokens as it was."""
    learned = costly([*sizes(30), *sizes(10, 100, 200)])
    assert speed(learned) == pytest.approx(1 / TOKEN, rel=0.02)
    assert np.mean([each.tokens / each.seconds for each in learned[-5:]]) < 0.5 / TOKEN


def test_few_micro_batches_are_averaged() -> None:
    """The cost model is not believed before it has seen enough of them."""
    learned = costly(sizes(COSTS_MIN - 1))
    assert speed(learned) < max(each.tokens / each.seconds for each in learned)


def test_a_worker_that_slows_down_is_followed() -> None:
    """A worker that slows down to half its speed is predicted so after 20 micro-batches."""
    assert speed([*costly(sizes(40)), *costly(sizes(20), slower=2.0)]) == pytest.approx(
        0.5 / TOKEN, rel=0.1
    )


def test_a_prediction_has_the_launch_in_it() -> None:
    """A short micro-batch is expected to take its launch and its tokens, not only its tokens."""
    history = History(HALF_LIFE)
    history.learn(costly(sizes(40)), {"job": 100.0}, 0.0)
    short = completion(100, LAUNCH + 100 * TOKEN)
    assert history.predict(short, 100.0) == pytest.approx(short.seconds, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 10.0)), min_size=1, max_size=20))
@example([*[(1, 1.0)] * 7, (3, 1.0), (1, 1.0)])
def test_no_speed_is_out_of_this_world(work: list[tuple[int, float]]) -> None:
    """A predicted speed is at most ten times the fastest one reported.

    A worker of any higher speed would be planned for alone, as if it did everything at once.
    """
    found = speed([completion(*each) for each in work])
    assert math.isfinite(found)
    assert 0 < found <= 10 * max(tokens / seconds for tokens, seconds in work)
