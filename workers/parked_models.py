"""Models whose weights wait in the host's memory until their device has room for them again."""

import logging
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import NoRoom, OutOfMemory
from embedfarm.workers.engines.group import current_group
from embedfarm.workers.host_memory import host_memory
from embedfarm.workers.resident_models import ResidentModel

log = logging.getLogger(__name__)


@runtime_checkable
class Movable(Protocol):
    """An engine whose weights can wait in the host's memory."""

    @property
    def apart(self) -> bool:
        """Whether its device has a memory of its own."""

    def park(self) -> None:
        """Move the weights to the host's memory; the engine embeds nothing until `unpark`.

        Raises:
            OutOfMemory: They do not fit there.
            DeviceFailed: Nothing works on this device any more.
        """

    def unpark(self) -> None:
        """Move the weights back to the device.

        Raises:
            OutOfMemory: They do not fit now; the engine is of no use any more.
            DeviceFailed: Nothing works on this device any more.
        """


@dataclass
class ParkedModels:
    """Keeps models that had to make room on a GPU within `models_parked_bytes_max`.

    A model that was loaded once needs only its weights copied to be loaded again. It waits for as
    long as it would stay on the device if nobody used it. One that comes takes half of what the
    host has free at most. Groups of devices park nothing. Safe between threads.
    """

    settings: Settings
    _models: tuple[ResidentModel, ...] = ()  # those first that came first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[ResidentModel]:
        """Iterate over the models, those first that have been here for longest."""
        return iter(self._models)

    def park(self, model: ResidentModel) -> bool:
        """Move a model here that is resident no longer, if it can and there is room.

        Models that came before it go for it, the first ones first.
        """
        engine, most = model.engine, self.settings.models_parked_bytes_max
        if not isinstance(engine, Movable) or not engine.apart or current_group() is not None:
            return False
        if not 0 < model.bytes <= most:
            return False
        with self._lock:
            there = list(self._models)
            taken, free = sum(each.bytes for each in there), host_memory().free
            while there and (taken + model.bytes > most or 2 * model.bytes > free):
                gone = there.pop(0)
                taken, free = taken - gone.bytes, free + gone.bytes
            self._models = tuple(there)
            if 2 * model.bytes > free:
                return False
            try:
                engine.park()
            except OutOfMemory as error:
                log.info("%s is not parked: %s", model.spec.model, error)
                return False
            model.unwanted, model.parked_since = False, time.time()
            self._models = (*there, model)
        return True

    def take(self, spec: JobSpec, runs_on: str) -> ResidentModel | None:
        """Return the model that serves a spec, with its weights on the device; None if none does.

        Raises:
            NoRoom: There is no memory for it on the device; it has to be loaded from its files.
            ModelError: The model cannot do what is asked for.
        """
        began, model = time.monotonic(), self._find(spec, runs_on)
        if model is None:
            return None
        try:
            cast("Movable", model.engine).unpark()
        except OutOfMemory as error:
            raise NoRoom(f"{spec.model}: {error}") from error
        model.loaded_at, model.used_at = time.time(), time.monotonic()
        model.came_seconds = model.used_at - began
        return model

    def _find(self, spec: JobSpec, runs_on: str) -> ResidentModel | None:
        """Return the model that serves a spec, which is not kept here any more."""
        key, cache = engine_key(spec), self.settings.model_cache
        with self._lock:
            for model in self._models:
                if model.spec.model == spec.model and model.is_outdated(cache):
                    self._models = tuple(each for each in self._models if each is not model)
                    continue
                same = model.spec.model == spec.model and model.runs_on == runs_on
                if same and (model.find(key) or model.open_variant(key, spec)) is not None:
                    self._models = tuple(each for each in self._models if each is not model)
                    return model
        return None

    def forget(self, names: Collection[str] = (), used_before: float = 0.0) -> None:
        """Forget the models of some names, and those not used since a monotonic time."""
        with self._lock:
            self._models = tuple(
                each
                for each in self._models
                if each.spec.model not in names and each.used_at >= used_before
            )
