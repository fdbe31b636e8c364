"""Tests of what the shelf of a run takes for a mistake of a worker."""

from collections.abc import Callable
from random import Random

import pytest

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.model_orders import ModelOrder
from embedfarm.contract.records import Heartbeat
from embedfarm.workers.engines.engine import NoRoom
from tests.simulation.shelf import Shelf, Title, role_of
from tests.simulation.views import Broken
from tests.simulation.world import Process, World, enter

A, B = "null:4:60:a", "null:4:60:b"


class Stocked:
    """A shelf with two models, of which a worker takes one, and the mistakes that it has found."""

    def __init__(self) -> None:
        self.world, self.mistakes = World(1), list[str]()
        self.process = Process("worker-0#1")
        enter(self.world)
        self.shelf = Shelf(
            self.world, Random(1), 60, lambda: None, lambda _line: None, lambda: False, self._note
        )
        self.shelf.rooms = {"worker-0": 2, "worker-1": 2}
        self.shelf.titles = {A: Title(2, 0.1), B: Title(1, 0.1)}

    def _note(self, error: Broken) -> None:
        self.mistakes.append(str(error).partition(": ")[2])

    def do(self, *steps: Callable[[], object]) -> list[str]:
        """Let the process of a worker take some steps; return the mistakes."""
        process = self.process
        self.world.spawn(process, "main", lambda: [step() for step in steps])
        assert self.world.run(lambda: not process.tasks, 10.0)
        return self.mistakes

    def load(self, model: str) -> None:
        """Load a model like a worker."""
        self.shelf.open(model)
        self.shelf.loaded(model)

    def let_go(self, model: str, reason: str) -> None:
        """Let a model go like a worker."""
        del self.shelf.held().models[model]
        self.shelf.gone([model], reason)


@pytest.fixture
def stocked() -> Stocked:
    """Return a shelf with two models."""
    return Stocked()


def test_one_model_after_the_other_is_right(stocked: Stocked) -> None:
    """A model that goes before another one is loaded is no mistake, nor is work with that."""

    def work() -> None:
        with stocked.shelf.running("b"):
            stocked.world.park(1.0)

    go = lambda: stocked.let_go(A, "room")  # noqa: E731 # a step
    assert not stocked.do(lambda: stocked.load(A), go, lambda: stocked.load(B), work)


def test_too_much_memory_is_noticed(stocked: Stocked) -> None:
    """Models that take more than a worker may, or one that is loaded twice, are mistakes."""
    load = [lambda: stocked.load(A), lambda: stocked.load(B), lambda: stocked.load(B)]
    assert stocked.do(*load) == [
        f"{B} is loaded: 3 bytes of 2 then",
        f"{B} is loaded, and it was already",
        f"{B} is loaded: 4 bytes of 2 then",
    ]


def test_what_is_in_use_does_not_go(stocked: Stocked) -> None:
    """A model that goes while a device batch runs, or before one, is a mistake."""

    def work() -> None:
        with stocked.shelf.running("a"):
            stocked.let_go(A, "idle")
        with stocked.shelf.running("a"):
            pass

    found = stocked.do(lambda: stocked.load(A), work)
    assert found == [
        f"{A} went while worker-0#1 worked with it",
        f"worker-0#1 works with {A}, which it has let go",
    ]


def test_what_is_pinned_does_not_go(stocked: Stocked) -> None:
    """A pinned model goes by an order alone."""

    def pin() -> None:
        stocked.shelf.held().orders = {B: ModelOrder(pinned=True)}

    def load() -> None:
        stocked.load(B)

    stocked.shelf.unload_orders[B] = 1
    by_order = lambda: stocked.let_go(B, "order")  # noqa: E731 # a step
    found = stocked.do(pin, load, by_order, load, lambda: stocked.let_go(B, "room"))
    assert found == [f"{B} is pinned, and goes: room"]
    assert stocked.do(load, by_order)[1:] == [f"{B} is unloaded more often than it was ordered"]


def test_refusals_are_true(stocked: Stocked) -> None:
    """A refusal for good needs a reason that lasts, and says what its error is."""
    shelf = stocked.shelf
    shelf.ill(B, "worker-0").never = True
    some, lasting = NoRoom("others have it"), ModelError("no such file")
    found = stocked.do(
        lambda: shelf.refused("job", B, lasting, "no such file"),
        lambda: shelf.refused("job", A, some, "not now: others have it"),
        lambda: shelf.refused("job", A, some, "others have it"),
        lambda: shelf.refused("job", A, lasting, "no such file"),
    )
    assert [each[:30] for each in found] == [
        "worker-0 says 'others have it'",
        f"worker-0 refuses {A} for good: no such file"[:30],
    ]


def test_nothing_is_given_up_that_somebody_may_take(stocked: Stocked) -> None:
    """Giving something up takes a refusal for good of every live worker."""
    shelf = stocked.shelf
    shelf.ill(A, "worker-0").never = True
    beats = [
        Heartbeat(worker=f"vm:cpu-{n}", incarnation="", host="", pid=1, device="", state="idle")
        for n in range(2)
    ]
    assert role_of(beats[0].worker) == role_of("worker-0#7") == "worker-0"
    found = stocked.do(
        lambda: shelf.refused("job", A, ModelError("no"), "no"),
        lambda: shelf.given_up("job", beats[:1]),
        lambda: shelf.given_up("job", beats),
        lambda: shelf.given_up("job", []),
    )
    assert found == [
        "job is given up, not refused for good by ['worker-1']",
        "job is given up, not refused for good by anybody",
    ]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_server_may_bring_a_refusal_for_good_back(stocked: Stocked, forgets: bool) -> None:  # noqa: FBT001 # a parameter
    """Where it loses what a worker said last, a job is given up for what that said before."""
    shelf = stocked.shelf
    shelf.forgets = lambda: forgets
    shelf.ill(A, "worker-0").never = True
    beat = Heartbeat(worker="vm:cpu-0", incarnation="", host="", pid=1, device="", state="idle")
    found = stocked.do(
        lambda: shelf.refused("job", A, ModelError("no"), "no"),
        lambda: shelf.refused("job", A, NoRoom("full"), "not now: full"),
        lambda: shelf.given_up("job", [beat]),
    )
    assert bool(found) is not forgets
