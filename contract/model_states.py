"""What workers say of the models that they have, or tried to load."""

from collections.abc import Iterable, Iterator
from typing import Literal

from embedfarm.contract.encoding import Amount, Count, Record

StateOfModel = Literal["ready", "loading", "parked", "failed"]
"""State of a model on a worker: loaded, being loaded, with its weights in the host's memory from
where it is loaded in a moment, or not loaded when it was tried last."""


class ModelState(Record):
    """State of one model on one worker.

    Attributes:
        model: Key of the model, `embedfarm.contract.job_spec.model_key` of what it was loaded for.
        state: Whether it is loaded.
        since: Unix time since which that is so.
        bytes: Memory that its weights take, 0 if it is not known.
        load_seconds: Time that its loading took, also to fail; 0 before it has ended.
        reason: Why it failed.
        pinned: Whether it stays however long nobody uses it.
    """

    model: str
    state: StateOfModel
    since: Amount
    bytes: Count = 0
    load_seconds: Amount = 0.0
    reason: str = ""
    pinned: bool = False


def ready(states: Iterable[ModelState]) -> Iterator[ModelState]:
    """Yield the states of the models that are loaded."""
    return (each for each in states if each.state == "ready")
