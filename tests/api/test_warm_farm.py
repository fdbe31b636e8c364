"""Test of how soon a farm that is kept warm answers."""

import time

import numpy as np
import pytest

import embedfarm


@pytest.mark.alone
def test_a_warm_farm_answers_at_once() -> None:
    """A text has its vector within 50 ms, as a median, of a model that costs nothing."""
    seconds = []
    with embedfarm.Farm(model="null:8", devices="cpu", workers=1) as farm:
        farm.encode("warm up")
        for index in range(20):
            began = time.monotonic()
            farm.encode(f"text {index}")
            seconds.append(time.monotonic() - began)
    assert np.median(seconds) < 0.05
