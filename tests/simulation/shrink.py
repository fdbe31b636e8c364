"""Shrinking: the fewest operations of a failing run that still make it fail."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.simulation.faults import Operation
from tests.simulation.run import Simulation

ORDERS: Final = 10  # in which what is left is tried; without the others all else falls differently


class Trial(NamedTuple):
    """The result of a run.

    Attributes:
        kind: Kind of its failure: the error's class and its words without numbers; "" if none.
        reason: The error's class and message.
        operations: All operations of the run, with those that were left out.
    """

    kind: str
    reason: str
    operations: Sequence[Operation]


class Least(NamedTuple):
    """The fewest operations that make a run fail.

    Attributes:
        seed: Seed of the run.
        operations: Operations that are left.
        dropped: Numbers of the operations that were left out.
        order: The order of events (see `Simulation`) in which it fails.
        reason: The error's class and message.
    """

    seed: int
    operations: Sequence[Operation]
    dropped: Collection[int]
    order: int
    reason: str

    @property
    def command(self) -> str:
        """The command that runs it again."""
        words = ["python -m tests.simulation --seed", str(self.seed)]
        if self.dropped:
            words += ["--without", ",".join(map(str, sorted(self.dropped)))]
        if self.order:
            words += ["--order", str(self.order)]
        return " ".join(words)

    def to_text(self) -> str:
        """Return the command, the reason and the operations for people to read."""
        lines = [f"{self.command}: {self.reason}", *map(describe, self.operations)]
        return "\n  ".join(lines)


def describe(operation: Operation) -> str:
    """Return an operation's number, moment and name as a line of text."""
    return f"{operation.number:3}  at {operation.moment:7.4f} s  {operation.name}"


def try_run(seed: int, place: Path, dropped: frozenset[int] = frozenset(), order: int = 0) -> Trial:
    """Run a seed without some of its operations."""
    simulation = Simulation(seed, place, lambda _line: None, dropped=dropped, order=order)
    kind = reason = ""
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001 # whatever it is, the run has failed
        reason = f"{type(error).__name__}: {error}"
        kind = " ".join([type(error).__name__, *filter(str.isalpha, str(error).split())])
    return Trial(kind, reason, simulation.faults.operations)


def shrink(seed: int, place: Path, tell: Callable[[str], None]) -> Least | None:
    """Drop operations, many at a time and then one by one; return None if the run does not fail.

    Args:
        seed: Seed of the run.
        place: Directory for the files of the runs.
        tell: Called with a line of progress.
    """
    first = try_run(seed, place)
    if not first.kind:
        return None
    least = Least(seed, first.operations, frozenset(), 0, first.reason)
    size = len(first.operations) // 2
    while size:
        for start in range(0, len(first.operations), size):
            some = [each.number for each in first.operations[start : start + size]]
            dropped = frozenset({*least.dropped, *some})
            if len(dropped) > len(least.dropped):
                least = _without(least, dropped, first.kind, place) or least
        tell(f"{len(least.operations)} of {len(first.operations)} operations are left")
        size //= 2
    return least


def _without(least: Least, dropped: frozenset[int], kind: str, place: Path) -> Least | None:
    """Return the run without some operations if it then fails in the same way, else None."""
    for order in range(ORDERS):
        trial = try_run(least.seed, place, dropped, order)
        if trial.kind == kind:
            left = [each for each in trial.operations if each.number not in dropped]
            return Least(least.seed, left, dropped, order, trial.reason)
    return None
