"""Passes: small named steps from state to plan; the order of their list is the policy.

A pass may reorder, annotate or defer; of a job that it defers a note says so, and begins with the
job. It never drops a job's work: what no plan mentions stays in the stream. Every live worker that
is not draining gets a plan, be it an empty one: without a plan it would help itself.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from embedfarm.scheduler.state import Draft, FarmState


class Pass(Protocol):
    """One step of a decision: a pure function with a name."""

    @property
    def name(self) -> str:
        """Name by which the pass is added, removed and explained."""

    def __call__(self, draft: Draft) -> Draft:
        """Return the next draft; the state in it stays as it is."""


class PassFailed(RuntimeError):
    """Raised when a pass raised an error, which is the cause, or returned no valid draft."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


def decide(state: FarmState, passes: Sequence[Pass], *, explain: bool = False) -> Draft:
    """Make the plan for a state.

    Args:
        state: State of the farm.
        passes: Passes in the order of the policy.
        explain: Whether to say in words what each pass did, which takes longer than deciding.

    Raises:
        PassFailed: A pass raised an error, or what it gave is no plan; without it the farm can go
            on. Whether every job is still there is looked at when explaining.
    """
    asking = {worker.name for worker in state.asking}
    draft = Draft(state=state, tiers=(state.jobs,) if state.jobs else (), explain=explain)
    for each in passes:
        try:
            made = each(draft)
            _check(draft, made, asking)
        except Exception as error:
            raise PassFailed(each.name, error) from error
        draft = made
    return draft


def _check(before: Draft, made: object, asking: AbstractSet[str]) -> None:
    """Check that a plan can be made of the draft that a pass returned.

    Raises:
        TypeError: The pass gave no draft.
        ValueError: The draft is of another state, plans for the wrong workers, or loses or doubles
            a job.
    """
    if not isinstance(made, Draft):
        raise TypeError(f"it gives {type(made).__name__}, no draft")
    if made.state is not before.state:
        raise ValueError("it gives a draft of another state")
    if made.shares is not before.shares:
        if missing := asking - made.shares.keys():
            raise ValueError(f"it gives no plan for {', '.join(sorted(missing))}")
        if others := made.shares.keys() - asking:
            raise ValueError(f"it gives a plan for {', '.join(sorted(others))}")
    if made.explain:
        _check_jobs(before, made)


def _check_jobs(before: Draft, made: Draft) -> None:
    """Check that each job is there once, or that a note says why it is not.

    Raises:
        ValueError: A job is made up, is there twice, or is lost without a note.
    """
    known, found = {job.job for job in before.jobs}, Counter(job.job for job in made.jobs)
    told = {note.words.partition(" ")[0] for note in made.notes[len(before.notes) :]}
    for job, count in found.items():
        if job not in known:
            raise ValueError(f"it makes the job {job} up")
        if count > 1:
            raise ValueError(f"it has the job {job} twice")
    if lost := known - found.keys() - told:
        raise ValueError(f"it loses the job {', '.join(sorted(lost))}")
