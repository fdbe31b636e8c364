"""The loaded model: one at a time, which jobs and requests share."""

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec, model_key, weights_key
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import TRYING, Engine
from embedfarm.workers.engines.memory import limit_batches, model_bytes
from embedfarm.workers.engines.opening import engine_name, look_at, open_engine, open_reference
from embedfarm.workers.watchdog import Watchdog

VARIANTS_MAX: Final = 64  # engines that are kept, or known to need other weights

log = logging.getLogger(__name__)


@dataclass
class ModelStore:
    """Loads the model that a job or a request needs, in place of the model before.

    Jobs that differ in what does not touch the weights, such as the prompt, share them: each such
    variant is an engine of its own, made in a moment.

    Attributes:
        warm_up: Function that runs a newly loaded engine for the first time.
        loading: Key of the model that is being loaded now, "" when none is.
        load_seconds: Time that the last loading took.
        loaded: Key of the loaded model, "" when there is none.
        model_bytes: Device memory that the loaded model took.
        serving: Held while requests are answered on an idle device, and while a model is replaced.
    """

    farm: FarmClient
    worker: str
    torch_device: str
    settings: Settings
    watchdog: Watchdog
    warm_up: Callable[[JobSpec, Engine], None] = lambda _spec, _engine: None
    loading: str = ""
    load_seconds: float = 0.0
    loaded: str = ""
    model_bytes: int = 0
    serving: threading.Lock = field(default_factory=threading.Lock)
    _engine: Engine | None = None
    _begun: str = ""  # the load that is counted, by `weights_key`
    _is: tuple[str, str] = ("", "")  # the loaded model, and its engine by `engine_name`
    # By `embedfarm.contract.farm_client.engine_key`; None for one on other weights.
    _variants: dict[str, Engine | None] = field(default_factory=dict)

    @property
    def trying_engines(self) -> bool:
        """Whether engines are tried against each other, before the faster one is loaded."""
        return TRYING.is_set()

    def open_reference(self, engine: Engine, spec: JobSpec) -> Engine | None:
        """Open the same model in float32 on the CPU; None where there is none.

        Raises:
            ModelError: The model does not load a second time.
        """
        return open_reference(engine, spec, self.settings)

    def known(self, key: str) -> Engine | None:
        """Return the engine of a key, None if it is not there."""
        return self._variants.get(key)

    def may_serve(self, key: str) -> bool:
        """Tell whether the loaded weights serve a key, as far as is known."""
        variants = self._variants
        return bool(variants) and variants.get(key, self._engine) is not None

    def variant(self, spec: JobSpec) -> Engine | None:
        """Return the engine of a spec on the loaded weights; None where it needs others.

        Raises:
            ModelError: The model cannot do what is asked for.
        """
        loaded, variants, key = self._engine, self._variants, engine_key(spec)
        if key not in variants and loaded is not None:
            variants[key] = loaded.for_job(spec) if self._is_for(spec) else None
            while len(variants) > VARIANTS_MAX:  # the loaded one stays
                variants.pop(next(islice(variants, 1, None)), None)
        return variants.get(key)

    def _is_for(self, spec: JobSpec) -> bool:
        """Tell whether a job is for the loaded model, and for the engine that runs it."""
        model, name = self._is
        same = spec.model == model
        return same and name == engine_name(spec, self.torch_device, self.settings)

    def load(self, spec: JobSpec) -> Engine:
        """Return an engine on the loaded weights if they serve `spec`, else load others instead.

        A model that is not to be had does not cost the one that is loaded.

        Raises:
            ModelError: The model is not to be had, or does not load.
        """
        variant = self.variant(spec)
        if variant is not None:
            return variant
        look_at(spec, self.settings)
        self._begin_load(spec)
        with self.serving:
            self._engine, self._variants, self.loaded = None, {}, ""
            gc.collect()  # its modules refer to each other, and the next one needs the memory
            began = time.monotonic()
            limit_batches(self.torch_device, 0)  # the model is no part of what is limited
            try:
                engine = self._load(spec)
            finally:
                self._end_load()
            limit_batches(self.torch_device, self.settings.batch_bytes_max)
            self.model_bytes = model_bytes(self.torch_device)
            self.load_seconds = time.monotonic() - began
            self.loaded = model_key(spec)
        log.info("loaded %s in %.1f s", spec.model, self.load_seconds)
        return engine

    def _load(self, spec: JobSpec) -> Engine:
        """Load a model and run it once; a load that takes too long is the last of this process."""
        what, watchdog = f"the loading of {spec.model}", self.watchdog
        with watchdog.watch(what, watchdog.load_limit, hung=self._quarantine):
            engine = open_engine(spec, self.torch_device, self.settings)
            self.warm_up(spec, engine)
        self._is = spec.model, engine_name(spec, self.torch_device, self.settings)
        self._engine, self._variants = engine, {engine_key(spec): engine}
        return engine

    def _begin_load(self, spec: JobSpec) -> None:
        """Have a load counted, which may be the end of this process.

        Raises:
            ModelError: Others have been, and this model is left alone now.
        """
        model = weights_key(spec)
        before = self.farm.loads.begin(self.worker, model)
        if before is not None:
            raise ModelError(before.sentence())
        self._begun, self.loading = model, model_key(spec)

    def _end_load(self) -> None:
        """Have a load forgotten, since this process outlives it."""
        model, self._begun, self.loading = self._begun, "", ""
        try:
            self.farm.loads.end(self.worker, model)
        except UNAVAILABLE as error:
            log.warning("a load is still counted, server away: %s", error)

    def _quarantine(self, reason: str) -> None:
        self.farm.loads.quarantine(self.worker, self._begun, reason)

    def leave(self) -> None:
        """Have the load forgotten that this process leaves behind when it ends as it was asked to.

        Raises:
            redis.ConnectionError: The server is away.
        """
        if self._begun:
            self.farm.loads.end(self.worker, self._begun)
