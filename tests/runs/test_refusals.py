"""Tests of when a run gives up since no worker can embed its job."""

import threading
from pathlib import Path

import pytest

import embedfarm
from embedfarm.collector.collect import Collector
from embedfarm.collector.manifest import About, Manifest
from embedfarm.contract.job_reports import NOT_NOW, ModelRefused
from embedfarm.contract.records import Heartbeat
from embedfarm.runs import run
from embedfarm.runs.run_failures import check_refusals

REASONS = {"one": "no such model", "two": "another model"}


def beat(worker: str, *refused: str) -> Heartbeat:
    """Return the heartbeat of a worker that refuses some jobs now."""
    return Heartbeat(
        worker=worker,
        incarnation="1",
        host="here",
        pid=1,
        device="cpu-0",
        state="idle",
        refused=list(refused),
    )


def test_it_gives_up_when_all_refuse() -> None:
    """Each live worker refuses the job now, and has said why: the run ends with the reasons."""
    with pytest.raises(ModelRefused, match=r"^another model; no such model$"):
        check_refusals("j", REASONS | {"dead": "odd"}, [beat("one", "j"), beat("two", "i", "j")])


@pytest.mark.parametrize(
    ("reasons", "workers"),
    [
        (REASONS, []),
        (REASONS, [beat("one", "j"), beat("three")]),
        (REASONS, [beat("one", "j"), beat("two")]),
        (REASONS | {"two": f"{NOT_NOW}out of memory"}, [beat("one", "j"), beat("two", "j")]),
    ],
    ids=["nobody is there", "one has not tried", "one tries again", "one has no room now"],
)
def test_it_waits(reasons: dict[str, str], workers: list[Heartbeat]) -> None:
    """A run goes on while any worker may embed its job yet, whatever it has refused before."""
    check_refusals("j", reasons, workers)


def test_a_refusal_that_comes_too_late_is_of_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose output is whole is finished, though all workers refuse it before it has ended."""
    refused = threading.Event()
    finish = Collector.finish

    def finish_and_wait(collector: Collector, count: int, about: About) -> Manifest | None:
        manifest = finish(collector, count, about)
        whole.set()
        assert refused.wait(60)
        return manifest

    def refuse(*_: object) -> None:
        if whole.wait(60):
            refused.set()
            raise ModelRefused("the corpus has other rows than when they were sent")

    whole = threading.Event()
    monkeypatch.setattr(Collector, "finish", finish_and_wait)
    monkeypatch.setattr(run, "check_refusals", refuse)
    embedding = embedfarm.embed(["a", "b"], out=tmp_path / "out", model="null:16", progress=False)
    assert len(embedding) == 2
    assert not (tmp_path / "out" / ".embedfarm").exists()
