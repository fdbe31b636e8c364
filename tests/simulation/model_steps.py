"""Steps of people with models while a farm works: orders, requests, and programs beside it."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane, LaneFull, LaneLate, LaneRefused, LaneUnserved
from embedfarm.contract.model_orders import ModelOrders
from tests.simulation.farm import URL
from tests.simulation.faults import Fault, Faults
from tests.simulation.judge import Failure, expected_vectors
from tests.simulation.scene import Scene
from tests.simulation.shelf import LARGE, Shelf
from tests.simulation.states import State
from tests.simulation.world import Process

STEPS_MIN: Final = 4
STEPS_MAX: Final = 10
AGAIN_SECONDS: Final = 3.0
PIN_SECONDS_MAX: Final = 3.0
TAKEN_SECONDS_MAX: Final = 4.0
TIMEOUT_SECONDS: Final = (0.5, 6.0)

ANSWERED: Final = State(
    "request for a loaded model", "vectors come, and its model was loaded before"
)
LOADED_FOR: Final = State(
    "request that had a model loaded", "vectors come, and it was loaded for it"
)
UNSERVED: Final = State("request that no worker can serve", "`LaneUnserved` ends it")
LATE: Final = State("request without an answer in time", "`LaneLate` ends it")


@dataclass
class ModelSteps:
    """Steps that are about models, drawn like faults and among them."""

    scene: Scene
    faults: Faults
    shelf: Shelf
    _people: int = 0

    @property
    def random(self) -> random.Random:
        """The random numbers of the step that is being done."""
        return self.faults.random

    def plan(self, horizon: float) -> None:
        """Draw the steps of a run."""
        kinds: list[Fault] = [
            self.ask, self.ask, self.ask, self.load, self.unload, self.unload, self.pin,
            self.take_memory,
        ]  # fmt: skip
        some = self.shelf.random
        for _ in range(some.randint(STEPS_MIN, STEPS_MAX)):
            self.faults.add(some.uniform(0.0, horizon), some.choice(kinds))

    def _model(self) -> str:
        return self.random.choice(list(self.shelf.titles))

    # Requests.

    def ask(self) -> float:
        """Ask for the vectors of some texts, and compare them."""
        model, some = self._model(), self.random
        texts = [f"request {some.random()}" for _ in range(some.randint(1, 3))]
        timeout = some.uniform(*TIMEOUT_SECONDS)
        self._begin("caller", partial(self._ask, model, texts, timeout))
        return timeout

    def _ask(self, model: str, texts: list[str], timeout: float) -> None:
        had, name = self.shelf.is_loaded(model), self.scene.world.process.name
        try:
            with closing_client(URL) as client:
                made = Lane(client, self.scene.settings).embed(JobSpec(model=model), texts, timeout)
        except (*UNAVAILABLE, LaneFull) as error:
            self.scene.say(f"{name} asks for {model} in vain: {error!r}")
        except LaneLate as error:
            LATE.reach()
            self.scene.say(f"{name} has no answer by {model} in time: {error}")
        except LaneUnserved as error:
            UNSERVED.reach()
            self.scene.say(f"{name} is refused {model}: {error}")
        except LaneRefused as error:
            if "the worker died or hung" not in str(error):
                raise
            self.scene.say(f"{name} asks for {model}, and workers die: {error}")
        else:
            (ANSWERED if had else LOADED_FOR).reach()
            self.scene.say(f"{name} has its vectors by {model}")
            if not np.array_equal(made, expected_vectors(texts, model.split(":")[3])):
                raise Failure(f"wrong vectors of a request for {model}")

    # Orders.

    def load(self) -> float:
        """Have a model loaded like `embedfarm models load`."""
        model = self._model()
        self._order(f"load {model}", lambda orders: orders.load(model))
        return 0.0

    def unload(self) -> float:
        """Have a model unloaded like `embedfarm models unload`."""
        model = self._model()
        self.shelf.unload_orders[model] += 1
        self._order(f"unload {model}", lambda orders: orders.unload(model))
        return 0.0

    def pin(self) -> float:
        """Pin a model like `embedfarm models pin`, and unpin it a while later."""
        model, seconds = self._model(), self.random.uniform(0.0, PIN_SECONDS_MAX)
        self._order(f"pin {model}", lambda orders: orders.pin(model, pinned=True))
        self.scene.world.call_at(self.scene.world.now + seconds, partial(self._unpin, model))
        return seconds

    def _unpin(self, model: str) -> None:
        """Unpin a model, again and again until no crash can bring the pin back."""
        self._order(f"unpin {model}", lambda orders: orders.pin(model, pinned=False))
        world = self.scene.world
        if world.now <= self.faults.ends_at + AGAIN_SECONDS:
            world.call_at(world.now + AGAIN_SECONDS, partial(self._unpin, model))

    def _order(self, what: str, give: Callable[[ModelOrders], object]) -> None:
        """Give an order in a process of its own; a server that is away ends it."""

        def command() -> None:
            with contextlib.suppress(*UNAVAILABLE):
                with closing_client(URL) as client:
                    give(FarmClient(client).models)
                self.scene.say(what)

        self._begin("operator-of-models", command)

    # Other programs.

    def take_memory(self) -> float:
        """Let another program take the memory of a device for a while."""
        role = self.random.choice(list(self.shelf.rooms))
        seconds = self.random.uniform(0.5, TAKEN_SECONDS_MAX)
        self.scene.say(f"memory of {role} is taken for {seconds:.2f} s")
        self.shelf.taken[role] = LARGE

        def give_back() -> None:
            self.shelf.taken[role] = 0

        self.scene.world.call_at(self.scene.world.now + seconds, give_back)
        return seconds

    def _begin(self, name: str, command: Callable[[], None]) -> None:
        self._people += 1

        def guarded() -> None:
            try:
                command()
            except Exception as error:  # noqa: BLE001 # a run fails by it
                self.scene.fail(error)

        process = Process(f"{name}#{self._people}")
        self.scene.world.spawn(process, "main", guarded)
