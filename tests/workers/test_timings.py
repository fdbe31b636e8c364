"""Tests of how long a device batch is taken to last."""

import time

import numpy as np
import pytest

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.timings import Timings
from embedfarm.workers.watchdog import Watchdog


def test_a_slow_first_run_makes_no_later_hang_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in the first run of an engine, as in a stopped process, leaves hangs as short."""
    spec, clock = JobSpec(model="null:8"), iter([0.0, 3600.0, 3600.0, 3600.001])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    timings, engine = Timings(), NullEngine.open(spec)
    timings.warm_up(spec, engine)
    predicted = timings.predict(spec, engine, np.full(1000, 16))
    assert 0 < predicted < 2.0
    assert Watchdog(Settings(hang_seconds=1, hang_factor=2)).bound(predicted) < 4.0
