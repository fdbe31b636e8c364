"""Named states that a soak must reach: a fault that never meets them tries less than it seems to.

A module that knows how a state is noticed declares it beside that, and says when it is there:

    LOST = State("lease lost at commit", "a commit is answered by `duplicate`")
    LOST.reach()

A soak counts the runs that reached each state, and fails over one that none of enough runs did.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.world import current

SEEDS_ENOUGH: Final = 2000  # as many as the gate's soak has

STATES: Final[dict[str, "State"]] = {}
"""All states by name, those of modules that are not imported left out."""


@dataclass(frozen=True)
class State:
    """A state that some run of a soak must reach.

    Attributes:
        name: Its name in reports, which no other state has.
        noticed: How a run tells that it is there.
        seeds: Number of runs of which at least one must reach it.
    """

    name: str
    noticed: str
    seeds: int = SEEDS_ENOUGH

    def __post_init__(self) -> None:
        STATES[self.name] = self

    def reach(self, times: int = 1) -> None:
        """Count the state for the run that goes on now."""
        if times:
            reached = current().reached
            reached[self.name] = reached.get(self.name, 0) + times


def after(owner: object, name: str, look: Callable[..., object]) -> None:
    """Call `look` after each call of a function, with what it returned or raised and its arguments.

    Args:
        owner: The class or module that has the function.
        name: Name of the function.
        look: Called as `look(answer, *arguments)`; it must not change anything.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 # the function's
        try:
            answer = function(*arguments, **named)
        except Exception as error:
            look(error, *arguments, **named)
            raise
        look(answer, *arguments, **named)
        return answer

    setattr(owner, name, watched)


def unreached(runs: int, reached: Mapping[str, int]) -> list[State]:
    """Return the states that so many runs should have reached, and did not."""
    return [each for each in STATES.values() if runs >= each.seeds and not reached.get(each.name)]
