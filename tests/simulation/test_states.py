"""Tests of states that runs must reach: how they are noticed, counted and missed."""

from collections.abc import Iterator

import pytest

from tests.simulation.run import Outcome
from tests.simulation.soak import Tally, Verdict, to_markdown
from tests.simulation.states import STATES, State, after, unreached
from tests.simulation.world import World, enter


@pytest.fixture
def state() -> Iterator[State]:
    """Give a state that only these tests know."""
    yield State("moon full", "somebody howls", seeds=3)
    del STATES["moon full"]


def outcome(reached: dict[str, int]) -> Verdict:
    """Return the verdict of a run that reached these states."""
    return Verdict(1, Outcome({"kill": 12}, 1.0, 0.1, 5, 0, 0, 100, reached), "", 0.1)


def test_a_soak_counts_runs(state: State) -> None:
    """A run counts once for a state, however often it reached it."""
    tally = Tally(("", 0))
    for times in ({}, {state.name: 4}, {state.name: 1}):
        tally.add(outcome(times))
    assert tally.reached == {state.name: 2}
    assert "| moon full | 2 | somebody howls |" in to_markdown(tally, range(3))


def test_only_enough_runs_miss_a_state(state: State) -> None:
    """A state is missed only once as many runs as it names have not reached it."""
    assert state not in unreached(2, {})
    assert state in unreached(3, {"another": 1})
    assert state not in unreached(3, {state.name: 1})


class Wolf:
    """An object with a method that can be watched."""

    def howl(self, *, hoarse: bool) -> str:
        """Return a howl, or raise an error when hoarse."""
        if hoarse:
            raise ValueError("hoarse")
        return "awoo"


def test_calls_are_seen(state: State) -> None:
    """A watched function returns and raises as before, and `look` gets its answer and arguments."""
    world, seen = World(1), []
    enter(world)

    def look(answer: object, wolf: Wolf, *, hoarse: bool) -> None:
        state.reach(not hoarse)
        seen.append((str(answer), wolf))

    after(Wolf, "howl", look)
    wolf = Wolf()
    assert wolf.howl(hoarse=False) == "awoo"
    with pytest.raises(ValueError, match="hoarse"):
        wolf.howl(hoarse=True)
    assert seen == [("awoo", wolf), ("hoarse", wolf)]
    assert world.reached == {state.name: 1}
