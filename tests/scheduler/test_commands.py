"""`embedfarm simulate` and `embedfarm scheduler explain`, as people call them."""

import json

import pytest

from embedfarm.farm import Farm
from embedfarm.records import Decision
from embedfarm.settings import DEFAULT_MODEL
from scheduler.loop import NOTES_MAX
from tests.farm.harness import run
from tests.scheduler.conftest import Install
from tests.scheduler.live import Start, at, beat, fill, remember
from tests.scheduler.test_steering import TALKING
from tests.support import wait_until

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


# What it says of its decisions.


def explain(farm: Farm, *words: str) -> str:
    """What the command says."""
    done = run("scheduler", "explain", *words, environment=at(farm))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decision_is_explained_for_one_worker(farm: Farm, start: Start) -> None:
    """What concerns it or all of them, by every pass, and nothing that is about another one."""
    fill(farm, 64, "bulk")
    fill(farm, 64, "wanted").set_terms(priority=2)
    fill(farm, 8, "paused").set_state("paused")
    for worker in ("one", "other"):
        beat(farm, worker)
        remember(farm, worker, 1000)
    start()
    wait_until(lambda: farm.decisions(1))
    (decision,) = json.loads(explain(farm, "--worker", "one", "--json"))
    assert ["defer", "paused deferred: paused"] in decision["notes"]
    assert ["priority", "wanted is urgent"] in decision["notes"]
    sized = [words for name, words in decision["notes"] if name == "size"]
    assert len(sized) == 2
    assert all(words.startswith("one may lease ") for words in sized)
    assert set(decision["workers"]) == {"", "one"}
    assert decision["left_out"] == {}
    said = explain(farm, "--worker", "one")
    assert "paused deferred: paused" in said
    assert "one may lease" in said
    assert "other may lease" not in said
    assert "other may lease" in explain(farm)


def test_notes_that_are_not_kept_are_counted(farm: Farm, start: Start, install: Install) -> None:
    """A pass all of whose notes were one too many did not do nothing."""
    install("talking", TALKING)
    farm.set_policy(["talking", "size"])
    fill(farm, 8)
    beat(farm, "one")
    start()
    wait_until(lambda: (found := farm.decisions(1)) and found[0].left_out.get("size"))
    for words in ([], ["--worker", "one"]):
        said = explain(farm, *words).splitlines()
        assert said[-2].strip() == f"notes not kept: {5000 - NOTES_MAX:,}"
        assert said[-1].split() == ["size", "notes", "not", "kept:", "1"]


def test_a_decision_of_an_earlier_version_is_about_nobody() -> None:
    """It does not say whom its notes are about: all of them are shown."""
    old = Decision(time=1.0, seconds=0.1, passes=["size"], notes=[("size", "a may lease much")])
    assert old.about("b").notes == old.notes
