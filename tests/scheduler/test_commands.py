"""`embedfarm simulate` and `embedfarm scheduler explain`, as people call them."""

import json

import pytest

from embedfarm.farm import Farm
from embedfarm.settings import DEFAULT_MODEL
from tests.farm.harness import run
from tests.scheduler.live import at, remember

QUICK = ["--seeds", "1", "--seconds", "2", "--policies", "fair"]


# The simulator.


@pytest.mark.parametrize("scenario", ["wrong-history", "drop", "tenants"])
def test_a_farm_may_have_one_worker(scenario: str) -> None:
    """A single speed is a farm as good as any."""
    done = run("simulate", "--speeds", "30000", "--scenario", scenario, *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["scenario"], row["workers"]) == (scenario, 1)
    assert 0.5 < row["efficiency_mean"] <= 1.1


def test_a_history_may_have_one_worker(farm: Farm) -> None:
    """So is a farm that remembers one."""
    remember(farm, "worker", 30_000, DEFAULT_MODEL)
    done = run("simulate", "--from-history", *QUICK, "--json", environment=at(farm))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["workers"] == 1


def test_what_takes_two_workers_is_not_offered_to_one() -> None:
    """Status 2 and a sentence: where the only worker dies nothing is ever done."""
    done = run("simulate", "--speeds", "30000", "--scenario", "deaths", *QUICK)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'deaths' is none of cold" in done.stderr
    assert "Traceback" not in done.stderr
