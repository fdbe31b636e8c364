"""From state to plan, in small named steps: the order of the list is the policy.

A pass may reorder, annotate or defer. It never drops a job's work: what no plan mentions stays in
the stream. Every live worker that is not draining gets a plan, be it an empty one: without a plan
it would help itself.
"""

from collections.abc import Sequence
from typing import Protocol

from scheduler.state import Draft, FarmState


class Pass(Protocol):
    """One step of a decision: a pure function with a name."""

    @property
    def name(self) -> str:
        """By which it is added, removed and explained."""

    def __call__(self, draft: Draft) -> Draft:
        """The next draft; the state in it stays as it is."""


class PassFailed(RuntimeError):
    """A pass raised an error, which is its cause."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


def decide(state: FarmState, passes: Sequence[Pass], *, explain: bool = False) -> Draft:
    """The plan for a state.

    Args:
        state: The farm.
        passes: The policy.
        explain: Whether to say in words what each pass did, which takes longer than deciding.

    Raises:
        PassFailed: A pass raised an error; without it the farm can go on.
    """
    draft = Draft(state=state, tiers=(state.jobs,) if state.jobs else (), explain=explain)
    for each in passes:
        try:
            draft = each(draft)
        except Exception as error:
            raise PassFailed(each.name, error) from error
    return draft
