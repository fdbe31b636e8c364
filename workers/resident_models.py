"""The models that a worker has loaded, and the engines of jobs and requests that share them."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.load_errors import load_errors
from embedfarm.workers.engines.unchanged_files import files_of

VARIANTS_MAX: Final = (
    64  # engines that are kept of a model, and keys that none of the models serves
)


@dataclass(eq=False)
class ResidentModel:
    """A loaded model.

    Jobs that differ in what does not touch the weights, such as the prompt, share them: each such
    variant is an engine of its own, made in a moment.

    Attributes:
        spec: Job or request that it was loaded for.
        runs_on: Name of the engine that runs it, by `engines.opening.engine_name`.
        engine: Engine that it was loaded as.
        bytes: Memory that its weights take on the device.
        load_seconds: Time that its loading took.
        came_seconds: Time after which it was on the device last, less than that if it was parked.
        loaded_at: Unix time at which it was loaded.
        used_at: Monotonic time at which work was last taken for it.
        files: Fingerprint of the files that it was loaded from, by `files_of`.
        unwanted: Whether it is to go once no work needs it.
        parked_since: Unix time since which its weights are in the host's memory, if they are.
    """

    spec: JobSpec
    runs_on: str
    engine: Engine
    bytes: int
    load_seconds: float
    loaded_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    unwanted: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    came_seconds: float = field(init=False)
    parked_since: float = field(init=False, default=0.0)
    _variants: dict[str, Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.came_seconds = self.load_seconds
        self._variants = {engine_key(self.spec): self.engine}

    @property
    def key(self) -> str:
        """Key of the model, under which its throughput is remembered."""
        return model_key(self.spec)

    def find(self, key: str) -> Engine | None:
        """Return the engine of a key, None if it is not there."""
        return self._variants.get(key)

    def has(self, engine: Engine) -> bool:
        """Tell whether an engine is one of this model."""
        return any(each is engine for each in list(self._variants.values()))

    def is_outdated(self, cache: Path | None) -> bool:
        """Tell whether the model has other files now than those that it was loaded from."""
        return bool(self.files) and files_of(self.spec, cache) not in ({}, self.files)

    def serves(self, keys: Collection[str]) -> bool:
        """Tell whether one of the keys is that of an engine of this model."""
        return not self._variants.keys().isdisjoint(keys)

    def open_variant(self, key: str, spec: JobSpec) -> Engine | None:
        """Return the engine of a job for this model and engine; None where it needs other weights.

        Raises:
            ModelError: The model cannot do what the job asks for.
        """
        with load_errors(spec.model):
            engine = self.engine.for_job(spec)
        if engine is not None:
            self._variants[key] = engine
            while len(self._variants) > VARIANTS_MAX:  # the one that was loaded stays
                self._variants.pop(next(islice(self._variants, 1, None)), None)
        return engine


@dataclass
class ResidentModels:
    """The models that are loaded; safe between threads."""

    _models: tuple[ResidentModel, ...] = ()
    _elsewhere: dict[str, None] = field(default_factory=dict)  # engines on other weights, by key
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[ResidentModel]:
        """Iterate over the models, those first that have not been used for longest."""
        return iter(sorted(self._models, key=lambda model: model.used_at))

    @property
    def last(self) -> ResidentModel | None:
        """The model that was used last, None when none is loaded."""
        return max(self._models, key=lambda model: model.used_at, default=None)

    @property
    def bytes(self) -> int:
        """Memory that the weights of all of them take."""
        return sum(model.bytes for model in self._models)

    def owner(self, key: str) -> ResidentModel | None:
        """Return the model that the engine of a key is one of; None if it is not there."""
        return next((model for model in self._models if model.find(key) is not None), None)

    def find(self, key: str) -> Engine | None:
        """Return the engine of a key, None if it is not there."""
        model = self.owner(key)
        return None if model is None else model.find(key)

    def use(self, key: str) -> Engine | None:
        """Return the engine of a key, None if it is not there; note that work is taken for it."""
        model = self.owner(key)
        if model is not None:
            model.used_at = time.monotonic()
        return None if model is None else model.find(key)

    def may_serve(self, key: str) -> bool:
        """Tell whether one of the models serves a key, as far as is known."""
        return bool(self._models) and key not in self._elsewhere

    def variant(self, spec: JobSpec, runs_on: Callable[[], str]) -> Engine | None:
        """Return the engine of a spec on one of the models; None where it needs other weights.

        Args:
            spec: What is asked for.
            runs_on: Names the engine that is to run it, which may take a look at files.

        Raises:
            ModelError: The model cannot do what is asked for.
        """
        key, models = engine_key(spec), self._models
        known = self.find(key)
        if known is not None or key in self._elsewhere:
            return known
        for model in models:
            if model.spec.model == spec.model and model.runs_on == runs_on():
                engine = model.open_variant(key, spec)
                if engine is not None:
                    return engine
        with self._lock:
            if models is self._models and models:
                self._elsewhere[key] = None
                while len(self._elsewhere) > VARIANTS_MAX:
                    del self._elsewhere[next(iter(self._elsewhere))]
        return None

    def add(self, model: ResidentModel) -> None:
        """Add a model that was loaded."""
        with self._lock:
            self._models = (*self._models, model)
            self._elsewhere.clear()

    def remove(self, models: Collection[ResidentModel]) -> None:
        """Remove models whose memory is wanted."""
        with self._lock:
            self._models = tuple(model for model in self._models if model not in models)
