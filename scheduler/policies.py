"""Named lists of passes, and the passes that a list may name."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.passes import Pass, PassFailed, decide
from embedfarm.scheduler.passes.affinity import Affinity
from embedfarm.scheduler.passes.baselines import Adaptive, Fixed, Rounds
from embedfarm.scheduler.passes.defer import Defer
from embedfarm.scheduler.passes.order import FirstCome, Priority, ShortestFirst
from embedfarm.scheduler.passes.share import Fair, Memory
from embedfarm.scheduler.passes.size import Size
from embedfarm.scheduler.passes.tail import Tail
from embedfarm.scheduler.state import FarmState, JobState, WorkerState

ENTRY_POINTS: Final = "embedfarm.passes"
DEFAULT_POLICY: Final = "fair"
POLICIES: Final[Mapping[str, Sequence[str]]] = {
    "fair": ("defer", "priority", "fair", "memory", "affinity", "size", "tail"),
    "priority": ("defer", "priority", "fcfs", "memory", "size", "tail"),
    "fcfs": ("defer", "fcfs", "memory", "size", "tail"),
    "sjf": ("defer", "sjf", "memory", "size", "tail"),
    # The three generations of the design that this one grew out of, to be compared with.
    "rounds": ("defer", "fcfs", "rounds"),
    "fixed": ("defer", "fcfs", "fixed"),
    "adaptive": ("defer", "fcfs", "adaptive"),
}

_OWN: Final[Mapping[str, Callable[[Settings], Pass]]] = {
    "defer": Defer,
    "fcfs": lambda _settings: FirstCome(),
    "sjf": lambda _settings: ShortestFirst(),
    "priority": Priority,
    "fair": Fair,
    "affinity": Affinity,
    "memory": lambda _settings: Memory(),
    "size": Size,
    "tail": Tail,
    "rounds": Rounds,
    "fixed": Fixed,
    "adaptive": Adaptive,
}


class PolicyRefused(EmbedfarmError, ValueError):
    """Raised when a list of passes is one that no farm could work by; the message says why."""

    exit_status = 2


class UnknownPass(PolicyRefused):
    """Raised when no pass has this name, or the package that brings it does not load."""


def pass_names() -> list[str]:
    """Return the names of all passes: our own, and those that installed packages bring."""
    return sorted({*_OWN, *(each.name for each in entry_points(group=ENTRY_POINTS))})


def make_passes(names: Sequence[str], settings: Settings) -> tuple[Pass, ...]:
    """Make the passes of these names, in this order.

    Raises:
        UnknownPass: A pass cannot be had.
    """
    return tuple(_make(name, settings) for name in names)


def check_policy(names: Sequence[str], settings: Settings) -> None:
    """Check that the passes can be had, and that a worker gets something to do by them.

    Raises:
        PolicyRefused: A pass cannot be had or fails, or no worker gets anything to do.
    """
    status = JobStatus(state="closed", blocks_in=8, chunks_in=64, tokens_in=6400)
    state = FarmState((JobState("job", "model", status, 8),), (WorkerState("worker"),), {})
    try:
        draft = decide(state, make_passes(names, settings), explain=True)
    except PassFailed as error:
        raise PolicyRefused(f"pass {error.name} fails: {error}") from error
    if not draft.shares.get("worker"):
        sizes = "size, rounds, fixed or adaptive"
        raise PolicyRefused(f"no worker would get anything to do; a pass such as {sizes} is needed")


def _make(name: str, settings: Settings) -> Pass:
    if name in _OWN:
        return _OWN[name](settings)
    for each in entry_points(group=ENTRY_POINTS, name=name):
        try:
            made: Pass = each.load()(settings)
        except Exception as error:
            raise UnknownPass(f"pass {name!r} of {each.value} does not load: {error}") from error
        return made
    raise UnknownPass(f"no pass is called {name!r}; there are {', '.join(pass_names())}")
