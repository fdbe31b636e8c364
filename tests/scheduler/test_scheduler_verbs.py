"""Tests of `embedfarm simulate` and `embedfarm scheduler explain`, as people call them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.records import Decision, Rate
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.readers import CorpusOptions
from embedfarm.runs.request import Request
from embedfarm.scheduler.history import rate_key
from embedfarm.scheduler.loop import NOTES_MAX
from embedfarm.watch import forecast
from embedfarm.watch.forecast import Forecast
from embedfarm.watch.trial_run import WorkerPace
from tests.farm.harness import run
from tests.scheduler.conftest import Install
from tests.scheduler.live import Start, at, beat, fill, remember
from tests.scheduler.test_steering import TALKING
from tests.support import wait_until

QUICK = ["--seeds", "1", "--seconds", "2", "--policies", "fair"]


# The simulator.


@pytest.mark.parametrize("scenario", ["wrong-history", "drop", "tenants"])
def test_a_farm_may_have_one_worker(scenario: str) -> None:
    """A farm of a single speed can be simulated."""
    done = run("simulate", "--speeds", "30000", "--scenario", scenario, *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["scenario"], row["workers"]) == (scenario, 1)
    assert 0.5 < row["efficiency_mean"] <= 1.1


def test_a_history_may_have_one_worker(farm: FarmClient) -> None:
    """A farm whose history has one worker can be simulated."""
    remember(farm, "worker", 30_000, DEFAULT_MODEL)
    done = run("simulate", "--from-history", *QUICK, "--json", environment=at(farm))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["workers"] == 1


def test_what_takes_two_workers_is_not_offered_to_one() -> None:
    """A scenario in which the only worker dies is refused with status 2 and a sentence."""
    done = run("simulate", "--speeds", "30000", "--scenario", "deaths", *QUICK)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'deaths' is none of cold" in done.stderr
    assert "Traceback" not in done.stderr


# How long a job will take.


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Write a corpus of 20 chunks, of 102 tokens each as estimated by bytes."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(20 * (json.dumps({"text": "x" * 400}) + "\n"), encoding="utf-8")
    return [str(path)]


def plan(farm: FarmClient, corpus: Sequence[str]) -> Forecast:
    """Return the forecast of a job on this farm."""
    settings = Settings(redis_url=at(farm)["EMBEDFARM_REDIS_URL"])
    spec = JobSpec(model="null:4")
    request = Request(tuple(corpus), CorpusOptions(), skip_bad_rows=False, spec=spec, sink="npy")
    return forecast.forecast(request, settings, "cpu", 1)


def test_a_job_is_forecast_for_those_who_are_alive(farm: FarmClient, corpus: list[str]) -> None:
    """A forecast counts the live workers; where nobody is alive, all that are remembered."""
    remember(farm, "alive", 1000, "null:4")
    remember(farm, "gone", 9000, "null:4")
    made = plan(farm, corpus)
    assert (made.source, made.workers, made.tokens_per_second) == ("history", 2, 10_000)
    beat(farm, "alive")
    beat(farm, "leaving", "draining")
    remember(farm, "leaving", 5000, "null:4")
    made = plan(farm, corpus)
    assert (made.source, made.workers, made.tokens_per_second) == ("history", 1, 1000)


def test_a_worker_that_was_never_measured_is_not_in_a_forecast(
    farm: FarmClient, corpus: list[str]
) -> None:
    """A forecast counts only the live workers whose rate is known."""
    remember(farm, "known", 1000, "null:4")
    beat(farm, "known")
    beat(farm, "new")
    assert plan(farm, corpus).workers == 1


def test_a_job_is_forecast_by_chunks_of_its_length(farm: FarmClient, corpus: list[str]) -> None:
    """Forecast and simulator take the rate of the length class, not the newest rate."""
    remember(farm, "worker", 1000, "null:4")
    key = rate_key("worker", model_key(JobSpec(model="null:4")), length_class(4000))
    long = Rate(tokens_per_second=50, overhead_seconds=0, updated=3e9, samples=1)
    farm.statistics.remember({key: long}, [])
    assert plan(farm, corpus).tokens_per_second == 1000
    settings = Settings(redis_url=at(farm)["EMBEDFARM_REDIS_URL"])
    spec = JobSpec(model="null:4")
    assert forecast.remembered_speeds(spec, settings) == [1000]
    assert forecast.remembered_speeds(spec, settings, 5000) == [50]


def test_a_farm_that_does_not_know_a_model_is_calibrated(
    farm: FarmClient, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forecast calibrates where no live worker has embedded anything with the model."""
    monkeypatch.setattr(forecast, "calibrate", lambda *_: [WorkerPace(1234.0, 0.0, 0.0)])
    assert plan(farm, corpus).source == "calibration"
    remember(farm, "gone", 9000, "null:4")
    beat(farm, "new")
    made = plan(farm, corpus)
    assert (made.source, made.tokens_per_second) == ("calibration", 1234)


# What it says of its decisions.


def explain(farm: FarmClient, *words: str) -> str:
    """Run `embedfarm scheduler explain`, and return its output."""
    done = run("scheduler", "explain", *words, environment=at(farm))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decision_is_explained_for_one_worker(farm: FarmClient, start: Start) -> None:
    """`--worker` shows the notes of every pass about one worker or all, and none about another."""
    fill(farm, 64, "bulk")
    fill(farm, 64, "wanted").set_terms(priority=2)
    fill(farm, 8, "paused").set_state("paused")
    for worker in ("one", "other"):
        beat(farm, worker)
        remember(farm, worker, 1000)
    start()
    wait_until(lambda: farm.plans.decisions(1))
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


def test_notes_that_are_not_kept_are_counted(
    farm: FarmClient, start: Start, install: Install
) -> None:
    """A pass whose notes were all over the limit is shown with their number."""
    install("talking", TALKING)
    farm.plans.set_policy(["talking", "size"])
    fill(farm, 8)
    beat(farm, "one")
    start()
    wait_until(lambda: (found := farm.plans.decisions(1)) and found[0].left_out.get("size"))
    for words in ([], ["--worker", "one"]):
        said = explain(farm, *words).splitlines()
        assert said[-2].strip() == f"notes not kept: {5000 - NOTES_MAX:,}"
        assert said[-1].split() == ["size", "notes", "not", "kept:", "1"]


def test_a_decision_of_an_earlier_version_is_about_nobody() -> None:
    """A decision that does not say whom its notes are about shows all of them."""
    old = Decision(time=1.0, seconds=0.1, passes=["size"], notes=[("size", "a may lease much")])
    assert old.about("b").notes == old.notes
