"""Tests of shrinking a failing run to the operations that make it fail."""

from pathlib import Path
from random import Random

import pytest

from tests.simulation import shrink
from tests.simulation.faults import Operation
from tests.simulation.shrink import Trial, describe


def nothing() -> float:
    """Do nothing, as an operation that is over at once."""
    return 0.0


OPERATIONS = [Operation(number, number / 2, nothing, 10.0, Random(1)) for number in range(20)]


@pytest.mark.parametrize("guilty", [{3, 14}, {0}, {19, 18, 1}])
def test_only_what_it_fails_by_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guilty: set[int]
) -> None:
    """All operations but the guilty ones are dropped, even if the rest fails in one order only."""

    def try_run(
        _seed: int, _place: Path, dropped: frozenset[int] = frozenset(), order: int = 0
    ) -> Trial:
        if dropped & guilty or (dropped and order != 2):
            return Trial("other" if order == 3 else "", "", OPERATIONS)
        return Trial("kind", "reason", OPERATIONS)

    monkeypatch.setattr(shrink, "try_run", try_run)
    told: list[str] = []
    least = shrink.shrink(17, tmp_path, told.append)
    assert least is not None
    assert {each.number for each in least.operations} == guilty
    without = ",".join(str(number) for number in range(20) if number not in guilty)
    assert least.command == f"python -m tests.simulation --seed 17 --without {without} --order 2"
    assert least.to_text().splitlines()[1:] == [
        f"  {describe(OPERATIONS[number])}" for number in sorted(guilty)
    ]
    assert told


def test_what_does_not_fail_has_no_least(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shrinking a run that does not fail returns None."""
    monkeypatch.setattr(shrink, "try_run", lambda *_: Trial("", "", OPERATIONS))
    assert shrink.shrink(17, tmp_path, print) is None
