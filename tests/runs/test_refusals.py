"""Tests of when a run gives up since no worker can embed its job."""

import pytest

from embedfarm.contract.job_reports import NOT_NOW, ModelRefused
from embedfarm.contract.records import Heartbeat
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
