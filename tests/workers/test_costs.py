"""What device batches take, learned from those that ran."""

import numpy as np
import pytest

from workers.costs import BATCHES_MIN, BatchCosts, Cost

TRUE = Cost(launch=5e-3, token=2e-4, pair=1e-7)


def learn(cost: Cost, batches: int, noise: float, costs: BatchCosts | None = None) -> BatchCosts:
    """Batches of any shape that take what `cost` says, more or less."""
    random = np.random.default_rng(batches)
    costs = costs or BatchCosts()
    for _ in range(batches):
        rows, longest = int(random.integers(1, 40)), int(random.integers(3, 256))
        costs.observe(rows, longest, cost.seconds(rows, longest) * random.lognormal(0, noise))
    return costs


@pytest.mark.parametrize("pair", [0.0, 1e-7, 1e-6])
def test_the_terms_are_found(pair: float) -> None:
    """Each of them, to the last digits when times are exact; one that is nothing stays nothing."""
    true = TRUE._replace(pair=pair)
    found = learn(true, 200, 0.0).cost()
    assert found is not None
    assert found == pytest.approx(true, rel=1e-3, abs=1e-11)


def test_noise_is_averaged() -> None:
    """With times that are 20 % off a prediction is not."""
    found = learn(TRUE, 1000, 0.2).cost()
    assert found is not None
    for rows, longest in ((1, 16), (32, 32), (8, 256)):
        assert found.seconds(rows, longest) == pytest.approx(TRUE.seconds(rows, longest), rel=0.15)


def test_what_changes_is_followed() -> None:
    """A device that became three times slower is known as such some thousand batches later."""
    slower = Cost(*(3 * term for term in TRUE))
    found = learn(slower, 4000, 0.05, learn(TRUE, 1000, 0.05)).cost()
    assert found is not None
    assert found.seconds(16, 64) == pytest.approx(slower.seconds(16, 64), rel=0.1)


def test_nothing_is_claimed_too_soon() -> None:
    """Too few batches, or all alike, say nothing about the terms."""
    assert learn(TRUE, BATCHES_MIN - 1, 0.0).cost() is None
    alike = BatchCosts()
    for _ in range(200):
        alike.observe(8, 64, 0.1)
        alike.observe(8, 64, 0.0)  # a clock that stands still
    assert alike.cost() is None


def test_an_estimate_from_the_first_batch_on() -> None:
    """Nothing is known of no batch; then the mean rate counts, and later what was learned."""
    costs = BatchCosts()
    assert costs.estimate(10, 10) == 0
    costs.observe(10, 50, 0.1)
    assert costs.estimate(10, 50) == pytest.approx(0.1)
    assert costs.estimate(5, 50) == pytest.approx(0.05)
    learn(TRUE, 200, 0.0, costs)
    assert costs.estimate(8, 256) == pytest.approx(TRUE.seconds(8, 256), rel=0.05)
