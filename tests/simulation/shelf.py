"""Models of a run: how large they are, how long their loading takes, and what goes wrong over it.

They are null models, whose vectors depend on the name of their weights. A shelf knows what is true
of each model on each worker, and compares what workers do with them and say of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_reports import NOT_NOW
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.load_attempts import ATTEMPTS_MAX
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.model_orders import NO_ORDER, ModelOrder
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import ModelUnavailable
from embedfarm.workers.host_memory import AvailableMemory
from tests.simulation.judge import DIMENSIONS
from tests.simulation.states import State
from tests.simulation.views import Broken
from tests.simulation.world import Process, World

ROOM: Final = 4  # bytes of models that most workers take
LARGE: Final = 1 << 40  # bytes of a device
MODELS: Final = ("a", "b", "c", "d")
LOAD_SECONDS: Final = (0.0, 0.1, 0.3, 0.8)
LIMITS: Final = {
    "load_seconds_max": 2.0, "lane_swap_seconds": 0.3, "lane_lease_seconds": 1.0,
    "lane_wait_seconds": 0.002,
}  # fmt: skip
IDLE_SECONDS: Final = (0.0, 1.0, 5.0)  # after which a model is unloaded, 0 for never
PINNED_SHARE: Final = 0.2  # of the farms, with a model that settings pin
NEVER: Final = "its files are of another make"
AWAY: Final = "its files are on their way"
DEADLY: Final = "while it loaded this model"

SWAPPED: Final = State(
    "model swapped beside work", "one goes for another while a device batch of a third one runs"
)
IN_TURN: Final = State("two workers swap in turn", "of three swaps only the second is another's")
RECOVERED: Final = State("failed load that worked later", "a model loads that was not to be had")
LIFTED: Final = State("quarantine lifted", "a model loads that was left alone on that worker")


class Title(NamedTuple):
    """A model: the bytes that it takes, and the seconds of its loading."""

    bytes: int
    load_seconds: float


@dataclass
class Ill:
    """What is wrong with the loading of a model on a worker.

    Attributes:
        never: Whether it is not to be had there, whatever happens.
        until: Virtual seconds before which it is not to be had.
        deaths: Loads that are left in which the process dies.
        hangs: Loads that are left which never end.
        missed: Whether it was not to be had at some time.
        alone: Whether it was left alone at some time, after deaths or a hang.
        unended: Loads in a row of which the server has not heard that they ended.
    """

    never: bool = False
    until: float = 0.0
    deaths: float = 0
    hangs: int = 0
    missed: bool = False
    alone: bool = False
    unended: int = 0


@dataclass
class Held:
    """What a process of a worker has loaded, by what is seen of it.

    Attributes:
        models: The loaded models, each with a number that no other load has.
        loading: The model that is being loaded, or was last.
        running: Device batches that run now.
        orders: What people want, as the process has read it last.
        unloads: How often it has let a model go by order.
        roll: Heartbeats as the process has read them last.
    """

    models: dict[str, int] = field(default_factory=dict)
    loading: str = ""
    running: int = 0
    orders: Mapping[str, ModelOrder] = field(default_factory=dict)
    unloads: Counter[str] = field(default_factory=Counter)
    roll: Sequence[Heartbeat] = ()


def role_of(name: str) -> str:
    """Return the role of a process's name, or of a worker's."""
    return name.rpartition(":")[2].partition("#")[0].replace("cpu-", "worker-")


@dataclass
class Shelf:
    """The models of a run.

    Attributes:
        speed: Tokens per second of a device.
        kill: Kills the process that runs.
        say: Called with each line of the log.
        forgets: Tells whether the server has lost something so far.
        broken: Told of what must not be.
        rooms: Bytes of models that a worker takes, by its role.
        pinned: The model that settings pin, "" for none.
        idle_seconds: Time after which a model that nobody uses is unloaded, 0 for never.
        titles: The models by name.
        ills: What is wrong with them, by name and role.
        taken: Bytes that other programs have of a worker's device, by role.
        unload_orders: How often people have ordered a model to be unloaded.
    """

    world: World
    random: Random
    speed: int
    kill: Callable[[], None]
    say: Callable[[str], None]
    forgets: Callable[[], object]
    broken: Callable[[Broken], None]
    rooms: dict[str, int] = field(default_factory=dict)
    pinned: str = ""
    idle_seconds: float = 0.0
    titles: dict[str, Title] = field(default_factory=dict)
    ills: dict[tuple[str, str], Ill] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    unload_orders: Counter[str] = field(default_factory=Counter)
    _held: dict[Process, Held] = field(default_factory=dict)
    _loads: int = 0
    _swaps: list[str] = field(default_factory=list)
    _refusals: dict[tuple[str, str], bool] = field(default_factory=dict)  # whether they last
    _lasting: set[tuple[str, str]] = field(default_factory=set)  # all that were said to last

    # What there is.

    def stock(self, roles: Sequence[str], horizon: float) -> None:
        """Draw the models, the room of each worker, and what goes wrong with which model."""
        some = self.random
        self.rooms = {role: some.choice([ROOM, ROOM, ROOM - 1, 2 * ROOM]) for role in roles}
        sizes = [1, 2, 2, 3, min(self.rooms.values()), ROOM + 1]
        for number, letter in enumerate(MODELS[: some.randint(2, len(MODELS))]):
            size = some.choice(sizes if number else sizes[:3])  # one fits everywhere
            name = f"null:{DIMENSIONS}:{self.speed}:{letter}"
            self.titles[name] = Title(size, some.choice(LOAD_SECONDS))
            if number:
                self._draw_ill(name, some.sample(roles, some.randint(1, len(roles))), horizon)
        self.idle_seconds = some.choice(IDLE_SECONDS)
        first, *others = self.titles
        # Where it is pinned there is room for each of the others, or never will be.
        least, most = min(self.rooms.values()) - self.titles[first].bytes, max(self.rooms.values())
        fits = all(not least < self.titles[each].bytes <= most for each in others)
        if fits and some.random() < PINNED_SHARE:
            self.pinned = first

    def _draw_ill(self, name: str, roles: Sequence[str], horizon: float) -> None:
        """Draw what is wrong with a model on some workers."""
        some = self.random
        kind = some.choice(["", "", "never", "until", "until", "deaths", "deaths", "hangs"])
        for role in roles:
            ill = self.ill(name, role)
            if kind == "never":
                ill.never = True
            elif kind == "until":
                ill.until = some.uniform(0.0, 2 * horizon)
            elif kind == "deaths":
                ill.deaths = some.choice([1, 2, ATTEMPTS_MAX, ATTEMPTS_MAX + 1, math.inf])
            elif kind == "hangs":
                ill.hangs = 1

    def ill(self, model: str, role: str) -> Ill:
        """Return what is wrong with a model on a worker."""
        return self.ills.setdefault((model, role), Ill())

    def usable(self) -> list[str]:
        """Return the models that some worker can load in the end."""
        return [name for name in self.titles if not self.hopeless(name)]

    def hopeless(self, model: str) -> bool:
        """Tell whether no worker can ever load a model."""
        return all(self.why_never(model, role) for role in self.rooms)

    def why_never(self, model: str, role: str) -> str:
        """Return a part of what a worker says that can never load a model; "" for any other."""
        ill = self.ill(model, role)
        if self.titles[model].bytes > self.rooms[role]:
            return "models_bytes_max"
        return NEVER if ill.never else DEADLY if ill.deaths == math.inf else ""

    def model_of(self, key: str) -> str:
        """Return the model of an engine, "" for an engine of none of them."""
        return next((name for name in self.titles if engine_key(JobSpec(model=name)) == key), "")

    def settings(self, role: str, settings: Settings) -> Settings:
        """Return the settings of a worker."""
        own = {"models_bytes_max": self.rooms[role], "model_idle_seconds": self.idle_seconds}
        pinned = (self.pinned,) if self.pinned else ()
        return settings.model_copy(update={**LIMITS, **own, "models_pinned": pinned})

    # What workers do.

    def held(self) -> Held:
        """Return what the process that runs has loaded."""
        return self._held.setdefault(self.world.process, Held())

    def role(self) -> str:
        """Return the role of the process that runs."""
        return role_of(self.world.process.name)

    def open(self, model: str) -> None:
        """Take the time of a load, and fail as it has to."""
        held, title, ill = self.held(), self.titles[model], self.ill(model, self.role())
        held.loading = model
        if model in held.models:
            self.fail(f"{model} is loaded, and it was already")
        taken = title.bytes + self._bytes(held)
        if taken > self.rooms[self.role()]:
            self.fail(f"{model} is loaded: {taken} bytes of {self.rooms[self.role()]} then")
        self.world.park(title.load_seconds)
        if ill.never:
            raise ModelError(f"{model}: {NEVER}")
        if self.world.now < ill.until:
            ill.missed = True
            raise ModelUnavailable(f"{model}: {AWAY}")
        if ill.hangs:
            ill.hangs -= 1
            self.say(f"{self.world.process.name} hangs over {model}")
            self.world.park(None)
        if ill.deaths:
            ill.deaths -= 1
            self.say(f"{self.world.process.name} dies of {model}")
            self.kill()
        RECOVERED.reach(ill.missed)
        LIFTED.reach(ill.alone)

    def _bytes(self, held: Held) -> int:
        return sum(self.titles[each].bytes for each in held.models if each in self.titles)

    def memory(self) -> AvailableMemory:
        """Return the memory of the device of the process that runs."""
        return AvailableMemory(LARGE, max(0, LARGE - self.taken.get(self.role(), 0)))

    def is_loaded(self, model: str) -> bool:
        """Tell whether a live process has a model."""
        return any(model in held.models and not each.dead for each, held in self._held.items())

    def loaded(self, model: str) -> None:
        """Note that the process that runs has loaded a model."""
        self._loads += 1
        held = self.held()
        held.models[model], held.loading = self._loads, ""

    def gone(self, models: Iterable[str], reason: str) -> None:
        """Note that the process that runs lets models go, which must not be pinned or in use."""
        held, role = self.held(), self.role()
        for model in models:
            pinned = held.orders.get(model, NO_ORDER).pinned or model == self.pinned
            if pinned and reason != "order":
                self.fail(f"{model} is pinned, and goes: {reason}")
            held.unloads[model] += reason == "order"
            if held.unloads[model] > self.unload_orders[model] and not self.forgets():
                self.fail(f"{model} is unloaded more often than it was ordered")
            if reason == "room":
                SWAPPED.reach(bool(held.running))
                self._swaps.append(role)
                first, second, third = (["", "", "", *self._swaps])[-3:]
                IN_TURN.reach(first == third != second != "" != first)

    @contextmanager
    def running(self, weights: str) -> Iterator[None]:
        """See that the model of a device batch is there while it runs; its first one loads it."""
        held, model = self.held(), f"null:{DIMENSIONS}:{self.speed}:{weights}"
        number = held.models.get(model)
        if number is None and held.loading != model and model in self.titles:
            self.fail(f"{self.world.process.name} works with {model}, which it has let go")
        held.running += number is not None
        yield
        held.running -= number is not None
        if number is not None and held.models.get(model) != number:
            self.fail(f"{model} went while {self.world.process.name} worked with it")

    def fail(self, what: str) -> None:
        """Let the run fail: what was seen must not be. Workers outlive most that is raised."""
        self.broken(Broken(f"{self.world.process.name}: {what}"))

    # What workers say.

    def refused(self, what: str, model: str, error: Exception, reason: str) -> None:
        """Note that the process that runs refuses a job, or requests, and see that it is true.

        Args:
            what: Name of the job, or key of the engine.
            model: The model that it is about.
            error: The error that it had.
            reason: What it says to others, "" for what its error says.
        """
        role, passes = self.role(), isinstance(error, ModelUnavailable)
        self._refusals[role, what] = not passes
        self._lasting |= set() if passes else {(role, what)}
        if model not in self.titles:
            return
        ill = self.ill(model, role)
        if not passes and not (self.why_never(model, role) or ill.unended or self.forgets()):
            self.fail(f"{role} refuses {model} for good: {error}")
        if reason and passes != reason.startswith(NOT_NOW):
            self.fail(f"{role} says {reason!r} of {error!r}")

    def given_up(self, what: str, workers: Sequence[Heartbeat]) -> None:
        """See that all live workers, as who gives something up knows them, refuse it for good.

        A server that has lost what a worker said last has again what it said before.
        """
        roll = [role_of(beat.worker) for beat in workers]
        lost = self._lasting if self.forgets() else set()
        others = [r for r in roll if not self._refusals.get((r, what)) and (r, what) not in lost]
        if others or not roll:
            self.fail(f"{what} is given up, not refused for good by {others or 'anybody'}")


shelves: Final[list[Shelf]] = []
"""The shelf of the run, if it has one."""
