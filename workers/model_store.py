"""The models that a worker has loaded: as many as its device holds."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec, model_key, weights_key
from embedfarm.contract.model_counts import UNLOADS
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import TRYING, Engine, ModelUnavailable
from embedfarm.workers.engines.group import current_group
from embedfarm.workers.engines.load_errors import load_errors
from embedfarm.workers.engines.memory import allocated_bytes, limit_batches, predict_bytes
from embedfarm.workers.engines.opening import engine_name, look_at, open_engine, open_reference
from embedfarm.workers.engines.unchanged_files import files_of
from embedfarm.workers.model_room import ModelRoom
from embedfarm.workers.model_tally import ModelTally
from embedfarm.workers.resident_models import ResidentModel, ResidentModels
from embedfarm.workers.watchdog import Watchdog

ORDERS_SECONDS: Final = 1.0  # between looks at what people want
FAILED_MAX: Final = 16  # models that did not load, of which it is remembered why

log = logging.getLogger(__name__)


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a thread that ends with its process."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@dataclass
class ModelStore:
    """Loads the models that jobs and requests need, beside those that are loaded if they fit.

    Only the thread that leases work may call `load` and `load_beside`.

    Attributes:
        warm_up: Function that runs a newly loaded engine for the first time.
        start: Function that starts a thread; what is raised in it is the worker's failure.
        resident: Models that are loaded.
        room: Memory for them.
        tally: Counts what is done with them.
        loading: Key of the model that is being loaded now, "" when none is.
    """

    farm: FarmClient
    worker: str
    torch_device: str
    settings: Settings
    watchdog: Watchdog
    warm_up: Callable[[JobSpec, Engine], None] = lambda _spec, _engine: None
    start: Callable[[str, Callable[[], None]], threading.Thread] = start_thread
    resident: ResidentModels = field(default_factory=ResidentModels)
    room: ModelRoom = field(init=False)
    tally: ModelTally = field(init=False)
    loading: str = ""
    _loading_since: float = 0.0
    _begun: str = ""  # the load that is counted, by `weights_key`
    _outlived: set[str] = field(default_factory=set)  # loads that may be counted still
    _beside: threading.Thread | None = None
    _failures: dict[str, ModelError] = field(default_factory=dict)  # of loads beside, by engine_key
    _failed: dict[str, ModelState] = field(default_factory=dict)  # by `model_key`
    _orders_at: float = 0.0  # monotonic time from which orders are read again
    _ordered: dict[str, float] = field(default_factory=dict)  # times of orders that were followed

    def __post_init__(self) -> None:
        self.tally = ModelTally(self.farm.model_counts)
        self.room = ModelRoom(self.resident, self.torch_device, self.settings, self._gone)

    def _gone(self, model: str, reason: str) -> None:
        self.tally.count(model, **{UNLOADS[reason]: 1})

    @property
    def trying_engines(self) -> bool:
        """Whether engines are tried against each other, before the faster one is loaded."""
        return TRYING.is_set()

    def open_reference(self, engine: Engine, spec: JobSpec) -> Engine | None:
        """Open the same model in float32 on the CPU; None where there is none.

        Raises:
            ModelError: The model does not load a second time, or from other files by now.
        """
        reference = open_reference(engine, spec, self.settings)
        if reference is not engine and self.is_outdated(engine):
            raise ModelUnavailable(f"the files of {spec.model} have changed")
        return reference

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded."""
        return bool(self.loading) or (self._beside is not None and self._beside.is_alive())

    @property
    def has_any(self) -> bool:
        """Whether a model is loaded, or is being loaded."""
        return self.is_loading or self.resident.last is not None

    def variant(self, spec: JobSpec) -> Engine | None:
        """Return the engine of a spec on the loaded weights; None where it needs others.

        Raises:
            ModelError: The model cannot do what is asked for.
        """
        return self.resident.variant(spec, lambda: self._runs_on(spec))

    def _runs_on(self, spec: JobSpec) -> str:
        return engine_name(spec, self.torch_device, self.settings)

    def is_outdated(self, engine: Engine) -> bool:
        """Tell whether the model of an engine has other files now than it was loaded from."""
        cache = self.settings.model_cache
        return any(model.has(engine) and model.is_outdated(cache) for model in self.resident)

    def load(self, spec: JobSpec) -> Engine | None:
        """Return an engine for a spec, for which a model is loaded if none serves it.

        Returns:
            The engine; None while another load, or work in hand, must come to its end first.

        Raises:
            ModelError: The model is not to be had, or does not load.
        """
        loads = self.is_loading  # looked at first: what comes to its end meanwhile is found below
        variant = self.variant(spec)
        if variant is not None or loads:
            return variant
        with self._noting(spec):
            return self._load(spec) if self._make_room(spec) else None

    def load_beside(
        self,
        spec: JobSpec,
        then: Callable[[], None] = lambda: None,
        needed: Collection[str] = (),
    ) -> bool:
        """Have a model loaded while the device works; tell whether that goes on, or has to wait.

        Args:
            spec: What it is loaded for.
            then: Called in the loading thread once it has ended, if it is begun by this call.
            needed: Keys of engines whose models do not go for it, beside those of work in hand.

        Raises:
            ModelError: The model is not to be had, or the load that was begun has failed.
        """
        key = engine_key(spec)
        failure = self._failures.pop(key, None)
        if failure is not None:
            raise failure
        if self.is_loading:
            return True
        if self.variant(spec) is not None:  # since the caller looked, a load has come to its end
            then()
            return True
        with self._noting(spec):
            if not self._make_room(spec, needed):
                return False
        self._beside = self.start("load", lambda: self._load_beside(key, spec, then))
        return True

    def follow_orders(self) -> None:
        """Load and unload what people want, and note what they want kept; called often.

        The farm's counters of models are brought up to date, too.

        A model that is wanted is loaded once for each order, beside what work in hand needs, and
        may go again like any other one. One that cannot be loaded is noted among the failures.

        Raises:
            redis.ConnectionError: The server is away.
        """
        if time.monotonic() < self._orders_at:
            return
        self._orders_at = time.monotonic() + ORDERS_SECONDS
        self.tally.hand_over()
        orders = self.farm.models.all()
        self.room.follow(orders)
        for name, order in orders.items():
            if order.loaded and self._ordered.get(name) != order.load_at and not self.is_loading:
                self._load_ordered(name, order.load_at)
        self._ordered = {name: at for name, at in self._ordered.items() if name in orders}

    def _load_ordered(self, name: str, at: float) -> None:
        """Begin to load a model that people want, unless models in use are in its way."""
        spec = JobSpec(model=name)
        try:
            settled = self.variant(spec) is not None or self.load_beside(spec)
        except ModelError as error:
            log.warning("%s is wanted, and not loaded: %s", name, error)
            settled = True
        if settled:
            self._ordered[name] = at

    def _make_room(self, spec: JobSpec, needed: Collection[str] = ()) -> bool:
        """Tell whether there is room for a model; one that is not to be had costs no other one.

        Raises:
            ModelError: The model is not to be had, or takes too much, or is left alone now.
        """
        look_at(spec, self.settings)
        before = self.farm.loads.forbidding(self.worker, weights_key(spec))
        if before is not None:
            raise ModelError(before.sentence())
        return self.room.make(spec, needed)

    def _load_beside(self, key: str, spec: JobSpec, then: Callable[[], None]) -> None:
        try:
            with self._noting(spec):
                self._load(spec)
        except ModelError as error:
            self._failures[key] = error
            while len(self._failures) > FAILED_MAX:
                del self._failures[next(iter(self._failures))]
        except UNAVAILABLE as error:
            log.warning("not loaded, server away; it is asked for again: %s", error)
        then()

    @contextmanager
    def _noting(self, spec: JobSpec) -> Iterator[None]:
        """Note why a model is not loaded if the body fails, for people who look at the worker."""
        began = time.monotonic()
        try:
            yield
        except ModelError as error:
            key, took = model_key(spec), time.monotonic() - began
            self._failed.pop(key, None)
            self._failed[key] = ModelState(
                model=key, state="failed", since=time.time(), reason=str(error), load_seconds=took
            )
            while len(self._failed) > FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            raise

    def failed_seconds(self, spec: JobSpec) -> float:
        """Return the time that it took to find that a model does not load; 0 if it was not so."""
        failed = self._failed.get(model_key(spec))
        return 0.0 if failed is None else failed.load_seconds

    def states(self) -> list[ModelState]:
        """Return the states of models that are here, are being loaded, or failed to load."""
        states = [
            ModelState(
                model=each.key,
                state="ready",
                since=each.loaded_at,
                bytes=each.bytes,
                load_seconds=each.load_seconds,
                pinned=self.room.pinned(each.spec.model),
            )
            for each in self.resident
        ]
        states += [
            ModelState(model=each.key, state="parked", since=each.parked_since, bytes=each.bytes)
            for each in self.room.parked
        ]
        coming = self.loading
        if coming:
            since = self._loading_since
            states.append(ModelState(model=coming, state="loading", since=since))
        return [*states, *self._failed.values()]

    def _load(self, spec: JobSpec) -> Engine:
        """Load a model for which there is room, and have it counted while that goes on."""
        self._begin_load(spec)
        limit = self.settings.batch_bytes_max
        if limit:
            limit_batches(self.torch_device, 0)  # the model is no part of what is limited
        try:
            with load_errors(spec.model):
                model = self._open(spec)
            self.resident.add(model)
            self._failed.pop(model.key, None)
        finally:
            self._end_load()
        if limit:
            limit_batches(self.torch_device, limit)
        self.tally.count(spec.model, loads=1, load_ms=round(1000 * model.came_seconds))
        log.info("loaded %s in %.1f s", spec.model, model.came_seconds)
        return model.find(engine_key(spec)) or model.engine

    def _open(self, spec: JobSpec) -> ResidentModel:
        """Open a model and run it once; a load that takes too long is the last of this process."""
        what, watchdog, device = f"the loading of {spec.model}", self.watchdog, self.torch_device
        began, allocated, alone = time.monotonic(), allocated_bytes(device), not self.room.in_use()
        in_group = current_group() is not None  # whose ranks do one thing at a time
        with watchdog.watch(
            what, watchdog.load_limit, hung=self._quarantine, stops_others=in_group
        ):
            parked = self.room.parked.take(spec, self._runs_on(spec))
            if parked is not None:
                return parked
            files = files_of(spec, self.settings.model_cache)
            engine = open_engine(spec, device, self.settings)
            self.warm_up(spec, engine)
        seconds, taken = time.monotonic() - began, allocated_bytes(device) - allocated
        dtype = engine.fingerprint.get("dtype", spec.dtype)
        size = predict_bytes(msgspec.structs.replace(spec, dtype=dtype), device, self.settings)
        # On a CPU much else comes and goes, and on a busy GPU what its work allocates; a group's
        # first rank has only its own part.
        if size is None or (alone and device != "cpu" and not in_group):
            size = max(0, taken)
        return ResidentModel(spec, self._runs_on(spec), engine, size, seconds, files=files)

    def _begin_load(self, spec: JobSpec) -> None:
        """Have a load counted, which may be the end of this process.

        Raises:
            ModelError: Others have been, and this model is left alone now.
        """
        model = weights_key(spec)
        before = self.farm.loads.begin(self.worker, model)
        if before is not None:
            raise ModelError(before.sentence())
        self._loading_since = time.time()
        self._begun, self.loading = model, model_key(spec)

    def _end_load(self) -> None:
        """Have a load forgotten, since this process outlives it."""
        self._outlived.add(self._begun)
        self._begun = self.loading = ""
        try:
            self.forget_loads()
        except UNAVAILABLE as error:
            log.warning("a load is still counted, server away: %s", error)

    def forget_loads(self) -> None:
        """Have the loads forgotten that this process has outlived.

        Raises:
            redis.ConnectionError: The server is away.
        """
        for model in sorted(self._outlived - {self._begun}):
            self.farm.loads.end(self.worker, model)
            self._outlived.discard(model)

    def recover(self) -> None:
        """Have the loads of all models forgotten again: a crash may have brought them back."""
        self._outlived |= {weights_key(model.spec) for model in list(self.resident)}

    def _quarantine(self, reason: str) -> None:
        self.farm.loads.quarantine(self.worker, self._begun, reason)

    def leave(self) -> None:
        """Have the load forgotten that this process leaves behind when it ends as it was asked to.

        Raises:
            redis.ConnectionError: The server is away.
        """
        self.tally.hand_over()
        if self._begun:
            self.farm.loads.end(self.worker, self._begun)
