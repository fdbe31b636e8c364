"""Tests of what the farm remembers about speed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.farm_statistics import HISTORY_SECONDS
from embedfarm.contract.records import Completion, Rate
from embedfarm.scheduler.history import COSTS_MIN, PRIOR_SECONDS, History, rate_key

HALF_LIFE = 4.0
seconds = st.floats(0.01, 100)
token_counts = st.integers(1, 10**7)


def completion(
    tokens: int, seconds: float, *, chunks: int = 1, overhead: float = 0.0, job: str = "job"
) -> Completion:
    """Return a worker's completion of a micro-batch."""
    return Completion(
        worker="worker",
        model="model",
        job=job,
        chunks=chunks,
        tokens=tokens,
        padded_tokens=tokens,
        real_tokens=tokens,
        seconds=seconds,
        overhead_seconds=overhead,
    )


def known(speed: float, updated: float = 0.0) -> Rate:
    """Return a rate without overhead."""
    return Rate(tokens_per_second=speed, overhead_seconds=0.0, updated=updated, samples=1)


def learned(history: History, *completions: Completion, now: float = 0.0) -> Rate:
    """Learn from completions, and return the rate of chunks of 100 tokens."""
    history.learn(completions, {"job": 100.0}, now)
    return history.rates("model", 6)["worker"]


def seeded(speed: float) -> History:
    """Return a history that has recalled one rate from the server."""
    return recalled({rate_key("worker", "model", 6): known(speed)})


def recalled(stored: dict[str, Rate]) -> History:
    """Return a history that has recalled rates from the server."""
    history = History(HALF_LIFE)
    history.recall(stored)
    return history


def test_what_was_learned_counts_half_after_the_half_life() -> None:
    """One half-life of work at another speed moves a rate of long standing half of the way."""
    long = completion(10**6, 1000.0)
    rate = learned(History(HALF_LIFE), long, completion(int(3000 * HALF_LIFE), HALF_LIFE))
    assert rate.tokens_per_second == pytest.approx(2000)
    assert rate.samples == 2


def test_what_the_server_kept_is_soon_outvoted() -> None:
    """A recalled rate counts like `PRIOR_SECONDS` of work: one half-life of work outvotes it."""
    weight = 0.5 / (1 - 0.5 ** ((HALF_LIFE + PRIOR_SECONDS) / HALF_LIFE))
    rate = learned(seeded(1000), completion(int(3000 * HALF_LIFE), HALF_LIFE))
    assert rate.tokens_per_second == pytest.approx(1000 + 2000 * weight)
    assert weight > 0.95


@given(
    before=st.lists(st.tuples(token_counts, seconds), max_size=3), tokens=token_counts, s=seconds
)
def test_two_halves_weigh_as_one(before: list[tuple[int, float]], tokens: int, s: float) -> None:
    """A micro-batch counts the same whole or in two halves, whatever was known before."""
    for whole, halves in ((History(HALF_LIFE), History(HALF_LIFE)), (seeded(1234), seeded(1234))):
        past = [completion(*each) for each in before]
        one = learned(whole, *past, completion(2 * tokens, 2 * s))
        two = learned(halves, *past, completion(tokens, s), completion(tokens, s))
        assert one.tokens_per_second == pytest.approx(two.tokens_per_second, rel=1e-6)


@given(
    work=st.lists(st.tuples(token_counts, seconds), min_size=1, max_size=COSTS_MIN),
    stored=st.floats(1, 1e7),
)
def test_a_rate_lies_between_what_was_seen(work: list[tuple[int, float]], stored: float) -> None:
    """An average is never above the best nor below the worst of what went into it.

    It is the average that counts as long as there is too little to learn costs from.
    """
    speeds = [stored, *(tokens / s for tokens, s in work)]
    rate = learned(seeded(stored), *(completion(*each) for each in work)).tokens_per_second
    assert min(speeds) * (1 - 1e-9) <= rate <= max(speeds) * (1 + 1e-9)


def test_a_slow_first_micro_batch_is_soon_outvoted() -> None:
    """A slow first micro-batch hardly shows in the rate after two more seconds of work."""
    rate = learned(History(HALF_LIFE), completion(150, 0.3), completion(2000, 2.0))
    assert rate.tokens_per_second == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("void", [completion(0, 1.0), completion(100, 0.0)])
def test_an_empty_account_says_nothing(void: Completion) -> None:
    """A completion without tokens or without time makes no rate."""
    history = History(HALF_LIFE)
    history.learn([void], {}, 0)
    assert history.rates("model", 6) == {}


def test_waiting_for_work_is_no_overhead() -> None:
    """One long wait between micro-batches does not raise the overhead; small ones lower it."""
    history = History(HALF_LIFE)
    learned(history, completion(1000, 1.0, overhead=0.5))
    assert learned(history, completion(1000, 1.0, overhead=0.02)).overhead_seconds == 0.02
    waited = learned(history, completion(10, 0.6, overhead=0.55)).overhead_seconds
    assert 0.02 < waited < 0.3
    assert learned(history, completion(1000, 1.0, overhead=0.02)).overhead_seconds == 0.02


def test_rates_are_kept_by_length_class() -> None:
    """A micro-batch belongs to the class of its job, and to its own mean when the job is gone."""
    history = History(HALF_LIFE)
    history.learn(
        [completion(1000, 1.0, chunks=100), completion(5000, 1.0, chunks=10, job="gone")],
        {"job": 70.0},
        0.0,
    )
    assert set(history.take_changes(0.0)[0]) == {"worker|model|6", "worker|model|8"}


@given(classes=st.sets(st.integers(0, 16), min_size=1), wanted=st.integers(0, 16))
def test_the_nearest_length_class_answers(classes: set[int], wanted: int) -> None:
    """The nearest length class stands in for one without experience, the shorter of two."""
    stored = {rate_key("worker", "model", each): known(float(each)) for each in classes}
    rate = recalled(stored).rates("model", wanted)["worker"]
    nearest = min(classes, key=lambda each: (abs(each - wanted), each))
    assert rate.tokens_per_second == nearest


def test_each_worker_has_its_own_nearest_class() -> None:
    """Each worker's rate is that of its nearest length class, whatever others were measured at."""
    stored = {
        rate_key("both", "model", 6): known(600),
        rate_key("both", "model", 9): known(900),
        rate_key("far", "model", 9): known(90),
    }
    rates = recalled(stored).rates("model", 6)
    assert {name: rate.tokens_per_second for name, rate in rates.items()} == {
        "both": 600,
        "far": 90,
    }


def test_other_workers_and_models_are_no_experience() -> None:
    """Nothing is known of a worker or a model that has not been seen, whatever its name."""
    history = seeded(1000)
    assert set(history.rates("model", 6)) == {"worker"}
    assert history.rates("model|6", 6) == {}
    assert history.rates("mode", 6) == {}


@given(st.sampled_from(["model", "a|b|c", "vendor/model|auto|0|auto"]), st.integers(0, 16))
def test_keys_are_read_as_they_were_written(model: str, length: int) -> None:
    """Stored rates come back under the same model, though its key has bars of its own."""
    history = recalled({rate_key("worker", model, length): known(5)})
    assert history.rates(model, length)["worker"].tokens_per_second == 5


def test_changes_are_handed_out_once() -> None:
    """A rate is handed out for storage once after a change, and never as the server gave it."""
    history = seeded(1000)
    assert history.take_changes(0.0) == ({}, [])
    rate = learned(history, completion(100, 1.0))
    assert history.take_changes(0.0) == ({"worker|model|6": rate}, [])
    assert history.take_changes(0.0) == ({}, [])


def test_nothing_is_kept_of_workers_that_are_forgotten() -> None:
    """A history keeps nothing of workers that it has forgotten, or was only asked about."""
    history = History(HALF_LIFE)
    empty = repr(history)
    assert history.predict(completion(100, 1.0), 100.0) == 0
    assert repr(history) == empty
    history.learn([completion(100, 1.0)] * 3, {}, 0.0)
    history.take_changes(0.0)
    assert repr(history) != empty
    history.take_changes(2 * HISTORY_SECONDS)
    assert repr(history) == empty


def test_old_rates_are_forgotten() -> None:
    """A rate that nothing confirmed for a month is dropped, here and on the server."""
    history = seeded(1000)
    assert history.take_changes(HISTORY_SECONDS) == ({}, [])
    assert history.take_changes(math.nextafter(HISTORY_SECONDS, math.inf)) == (
        {},
        ["worker|model|6"],
    )
    assert history.rates("model", 6) == {}
