"""What workers do with the models of a run's shelf, seen at the seams of the production code."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from embedfarm.contract import load_attempts
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane
from embedfarm.contract.load_attempts import LoadLedger
from embedfarm.contract.model_orders import ModelOrder, ModelOrders
from embedfarm.contract.records import Heartbeat
from embedfarm.runs import run
from embedfarm.workers import job_engines, lane_loader, model_room, model_store
from embedfarm.workers.engines.engine import Engine, NoRoom
from embedfarm.workers.host_memory import AvailableMemory
from embedfarm.workers.job_engines import JobEngines
from embedfarm.workers.lane_loader import LaneLoader
from embedfarm.workers.model_room import ModelRoom
from embedfarm.workers.resident_models import ResidentModel, ResidentModels
from tests.simulation.shelf import Shelf, shelves
from tests.simulation.source import SENT
from tests.simulation.states import State, after

QUARANTINE_SECONDS: Final = (6.0, 24.0)  # the first one, and the longest
REFUSAL_SECONDS: Final = 2.0

QUARANTINED: Final = State(
    "model left alone after it killed its worker", "a load is refused after deaths or a hang"
)
IN_USE: Final = State("unload order for a model in use", "it is followed, and the model stays")
PINNED: Final = State("pinned model in the way", "a job is refused for pinned models")
NO_MEMORY: Final = State("no memory for a model now", "a job is refused for what others have of it")
YIELDED: Final = State(
    "jobs yielded to requests", "a model loads for which work in hand had to end"
)
AHEAD: Final = State(
    "model loaded before its turn", "a load begins beside work that needs the others"
)

TIMES: Final = [
    (load_attempts, "WAIT_SECONDS_MIN", QUARANTINE_SECONDS[0]),
    (load_attempts, "WAIT_SECONDS_MAX", QUARANTINE_SECONDS[1]),
    (job_engines, "REFUSAL_SECONDS", REFUSAL_SECONDS),
    (lane_loader, "REFUSAL_SECONDS", REFUSAL_SECONDS),
]
USUAL: Final = [(module, name, getattr(module, name)) for module, name, _ in TIMES]


def put_up(shelf: Shelf | None) -> None:
    """Let a run's workers load the models of a shelf; those of null models as ever without one."""
    shelves[:] = [] if shelf is None else [shelf]
    for module, name, value in USUAL if shelf is None else TIMES:
        setattr(module, name, value)
    _install()


@functools.cache
def _install() -> None:
    """Replace what workers ask about models, and watch what they do; all in this process alone."""
    for module in (model_room, model_store):
        _replace(module, "predict_bytes", _predict)
    _replace(model_store, "open_engine", _open)
    _replace(model_room, "device_memory", _memory)
    _replace(lane_loader, "refuse_waiting", _refuse_waiting)
    _replace(JobEngines, "_refuse_for", _refuse_for)
    _replace(LaneLoader, "_refuse", _refuse_requests)
    after(ResidentModels, "add", _see_added)
    after(ResidentModels, "remove", _see_removed)
    after(ModelRoom, "_let_go", _see_gone)
    after(ModelRoom, "follow", _see_followed)
    after(ModelOrders, "all", _see_orders)
    after(LoadLedger, "begin", _see_begun)
    after(LoadLedger, "end", _see_ended)
    after(LoadLedger, "forbidding", _see_forbidden)
    after(FarmClient, "call_roll", _see_roll)
    after(LaneLoader, "_loaded", _see_loaded)
    after(JobEngines, "load_beside", _see_beside)
    after(run, "check_refusals", _see_given_up)


def _replace(owner: object, name: str, by: Callable[..., Any]) -> None:
    """Call `by` in the place of a function, which it gets before the arguments."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: by(function, *arguments, **named))


# What workers ask.


def _has(model: str) -> bool:
    """Tell whether a model is on the run's shelf."""
    return bool(shelves) and model in shelves[-1].titles


def _predict(function: Callable[..., int | None], spec: JobSpec, *rest: object) -> int | None:
    return shelves[-1].titles[spec.model].bytes if _has(spec.model) else function(spec, *rest)


def _open(function: Callable[..., Engine], spec: JobSpec, *rest: object) -> Engine:
    if _has(spec.model):
        shelves[-1].open(spec.model)
    return function(spec, *rest)


def _memory(function: Callable[[str], AvailableMemory], device: str) -> AvailableMemory:
    return shelves[-1].memory() if shelves else function(device)


# What workers do.


def _see_added(_answer: object, _resident: ResidentModels, model: ResidentModel) -> None:
    if _has(model.spec.model):
        shelves[-1].loaded(model.spec.model)


def _see_removed(
    _answer: object, _resident: ResidentModels, models: Collection[ResidentModel]
) -> None:
    for model in models if shelves else ():
        shelves[-1].held().models.pop(model.spec.model, None)


def _see_gone(
    _answer: object, _room: ModelRoom, models: Sequence[ResidentModel], reason: str, _why: str
) -> None:
    if shelves:
        shelves[-1].gone([model.spec.model for model in models], reason)


def _see_followed(_answer: object, room: ModelRoom, _orders: Mapping[str, ModelOrder]) -> None:
    for model in room.resident if shelves else ():
        IN_USE.reach(model.unwanted)


def _see_orders(orders: object, _models: ModelOrders) -> None:
    if shelves and isinstance(orders, dict):
        shelves[-1].held().orders = orders


def _see_begun(answer: object, _ledger: LoadLedger, _worker: str, weights: str) -> None:
    if answer is None and _has(_model_of(weights)):
        shelves[-1].ill(_model_of(weights), shelves[-1].role()).unended += 1


def _see_ended(answer: object, _ledger: LoadLedger, _worker: str, weights: str) -> None:
    if answer is None and _has(_model_of(weights)):
        shelves[-1].ill(_model_of(weights), shelves[-1].role()).unended = 0


def _see_forbidden(answer: object, _ledger: LoadLedger, _worker: str, weights: str) -> None:
    if answer is not None and not isinstance(answer, Exception) and _has(_model_of(weights)):
        shelves[-1].ill(_model_of(weights), shelves[-1].role()).alone = True
        QUARANTINED.reach()


def _model_of(weights: str) -> str:
    return weights.partition("|")[0]


def _see_roll(answer: object, _farm: FarmClient) -> None:
    if shelves and isinstance(answer, tuple):
        shelves[-1].held().roll = answer[0]


# What workers say.


def _refuse_for(
    function: Callable[..., None], engines: JobEngines, job: str, error: Exception
) -> None:
    known = engines._identities.get(job)  # it is forgotten with the refusal
    function(engines, job, error)
    NO_MEMORY.reach(isinstance(error, NoRoom) and "are free" in str(error))
    PINNED.reach(isinstance(error, NoRoom) and "pinned models" in str(error))
    noted = engines._refusals.get(job)  # as others read it; none if the job was made anew since
    if shelves and known is not None and noted is not None:
        shelves[-1].refused(job, known.spec.model, error, noted.reason)


def _refuse_requests(
    function: Callable[..., None], loader: LaneLoader, key: str, error: Exception
) -> None:
    if shelves:
        shelves[-1].refused(key, shelves[-1].model_of(key), error, "")
    function(loader, key, error)


def _refuse_waiting(
    function: Callable[..., None], lane: Lane, key: str, *said: str, late: bool = False
) -> None:
    _worker, reason = said
    if shelves and not late and reason.startswith("no worker"):
        shelves[-1].given_up(key, shelves[-1].held().roll)
    function(lane, key, *said, late=late)


def _see_loaded(_answer: object, loader: LaneLoader, key: str, *, yielded: bool) -> None:
    YIELDED.reach(yielded and loader.models.resident.owner(key) is not None)


def _see_beside(
    begun: object, engines: JobEngines, _job: str, needed: Collection[str] = ()
) -> None:
    AHEAD.reach(bool(begun and needed) and engines.models.is_loading)


def _see_given_up(
    answer: object, job: str, reasons: Mapping[str, str], workers: Sequence[Heartbeat]
) -> None:
    for_texts = any(SENT in reason for reason in reasons.values())
    if shelves and isinstance(answer, ModelRefused) and not for_texts:
        shelves[-1].given_up(job, workers)
