"""Tests of the costs of device batches, learned from those that ran."""

import numpy as np
import pytest

from embedfarm.contract.costs import Cost, Costs

TRUE = Cost(launch=5e-3, token=2e-4, pair=1e-7)


def learn(cost: Cost, batches: int, noise: float, costs: Costs | None = None) -> Costs:
    """Learn from batches of any shape that take about as long as `cost` says."""
    random = np.random.default_rng(batches)
    costs = costs or Costs()
    for _ in range(batches):
        rows, longest = int(random.integers(1, 40)), int(random.integers(3, 256))
        size = rows * longest, rows * longest**2
        costs.observe(*size, cost.seconds(*size) * random.lognormal(0, noise))
    return costs


@pytest.mark.parametrize("pair", [0.0, 1e-7, 1e-6])
def test_the_terms_are_found(pair: float) -> None:
    """Each term is found to within a thousandth when times are exact; a zero one stays zero."""
    true = TRUE._replace(pair=pair)
    found = learn(true, 200, 0.0).cost()
    assert found is not None
    assert found == pytest.approx(true, rel=1e-3, abs=1e-11)


def test_noise_is_averaged() -> None:
    """A prediction is right to 15 % though the times scatter by 20 %."""
    found = learn(TRUE, 1000, 0.2).cost()
    assert found is not None
    for size in ((16, 256), (1024, 32768), (2048, 524288)):
        assert found.seconds(*size) == pytest.approx(TRUE.seconds(*size), rel=0.15)


def test_what_changes_is_followed() -> None:
    """The prediction for a device that became three times slower is right 4,000 batches later."""
    slower = Cost(*(3 * term for term in TRUE))
    found = learn(slower, 4000, 0.05, learn(TRUE, 1000, 0.05)).cost()
    assert found is not None
    assert found.seconds(1024, 65536) == pytest.approx(slower.seconds(1024, 65536), rel=0.1)


def test_nothing_is_claimed_too_soon() -> None:
    """There are no terms after too few batches, or after batches that are all alike."""
    assert learn(TRUE, Costs().batches_min - 1, 0.0).cost() is None
    alike = Costs()
    for _ in range(200):
        alike.observe(512, 32768, 0.1)
        alike.observe(512, 32768, 0.0)  # a clock that stands still
    assert alike.cost() is None


def test_an_estimate_from_the_first_batch_on() -> None:
    """An estimate is 0 before the first batch, then goes by the mean rate, later by the terms."""
    costs = Costs()
    assert costs.estimate(100, 1000) == 0
    costs.observe(500, 25_000, 0.1)
    assert costs.estimate(500, 25_000) == pytest.approx(0.1)
    assert costs.estimate(250, 12_500) == pytest.approx(0.05)
    learn(TRUE, 200, 0.0, costs)
    assert costs.estimate(2048, 524288) == pytest.approx(TRUE.seconds(2048, 524288), rel=0.05)
