"""The loaded model: one at a time, and only for jobs whose files agree with ours."""

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import redis

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_reports import NO_ROOM, ModelRefused
from embedfarm.contract.job_spec import JobSpec, model_key, weights_key
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import TRYING, Engine, NoRoom
from embedfarm.workers.engines.memory import limit_batches, model_bytes
from embedfarm.workers.engines.opening import engine_name, look_at, open_engine, open_reference
from embedfarm.workers.quantisation import check_ranges
from embedfarm.workers.watchdog import Watchdog

JOBS_MAX: Final = 1000  # that something is known about
VARIANTS_MAX: Final = 64  # engines that are kept, or known to need other weights
REFUSAL_SECONDS = 30.0  # a refused job is looked at again after this, for a model that arrives late

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """The refusal of a job.

    Attributes:
        until: Time of the monotonic clock, in seconds, at which the job is looked at again.
        generation: Generation of the job; one of another generation is not refused.
        reason: Why it is refused.
    """

    until: float
    generation: str
    reason: str


@dataclass
class ModelStore:
    """Loads the model that a job needs, in place of the model before.

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
    _known: dict[str, None] = field(default_factory=dict)  # jobs, in the order they came
    _identities: dict[str, tuple[JobSpec, str]] = field(default_factory=dict)
    _accepted: dict[str, Engine] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)

    @property
    def trying_engines(self) -> bool:
        """Whether engines are tried against each other, before the faster one is loaded."""
        return TRYING.is_set()

    def refused(self, job: str) -> bool:
        """Tell whether this worker refused the job a moment ago."""
        refusal = self._refusals.get(job)
        return refusal is not None and time.monotonic() < refusal.until

    def refusals(self) -> list[str]:
        """Return the jobs that this worker refused a moment ago; forget those made anew since."""
        for job, refusal in list(self._refusals.items()):
            if self.refused(job) and self._generation(job) != refusal.generation:
                self._refusals.pop(job, None)
        return [job for job in list(self._refusals) if self.refused(job)]

    def _generation(self, job: str) -> str:
        """Return the generation that a job has on the server, "" where there is no job."""
        try:
            return self.farm.job(job).noted("generation")
        except redis.ResponseError:
            return ""  # something else has its key

    def ever_refused(self, job: str) -> bool:
        """Tell whether this worker has ever refused the job."""
        return job in self._refusals

    def spec(self, job: str) -> JobSpec:
        """Return the specification of a job.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        return self._identity(job)[0]

    def knows(self, job: str, generation: str) -> bool:
        """Tell whether what is known about a job is of this generation; else forget it.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        if self._identity(job)[1] == generation:
            return True
        self.forget(job)
        return False

    def _identity(self, job: str) -> tuple[JobSpec, str]:
        if job not in self._identities:
            self._identities[job] = self.farm.job(job).identity()
            self._remember(job)
        return self._identities[job]

    def forget(self, job: str) -> None:
        """Forget all about a job that was deleted or made anew: it may be another one."""
        self._known.pop(job, None)
        self._identities.pop(job, None)
        self._accepted.pop(job, None)
        self._refusals.pop(job, None)

    def swaps(self, job: str) -> bool:
        """Tell whether the loaded model would have to go for this job.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        if self._engine is None or job in self._accepted:
            return False
        try:
            return self.variant(self.spec(job)) is None
        except (ModelError, RecordError):
            return False  # `prepare` refuses it

    def prepare(self, job: str) -> Engine | None:
        """Return the engine for a job, None when this worker refuses it and has said why.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        if job in self._accepted:
            return self._accepted[job]
        try:
            spec = self.spec(job)
            engine = self._open(spec)
            _check_dimensions(spec, engine)
            check_ranges(spec, engine.dimensions)
            generation = self._identity(job)[1]
            self.farm.reports.agree(job, engine.fingerprint, generation)
            self.farm.reports.agree_on_tokens(job, engine.tokenisation, generation)
        except NoRoom as error:
            self.refuse(job, f"{NO_ROOM}{error}")
            return None
        except (ModelError, ModelRefused, RecordError) as error:
            self.refuse(job, str(error))
            return None
        self._refusals.pop(job, None)
        self.farm.reports.accept(job, self.worker, generation)
        self._accepted[job] = engine
        return engine

    def refuse(self, job: str, reason: str) -> None:
        """Leave a job to others for a while, and say why; then it may have been made anew."""
        before = self._refusals.get(job)
        if before is None or before.reason != reason:
            log.warning("job %s refused: %s", job, reason)
        _, generation = self._identities.pop(job, None) or (None, self._generation(job))
        self._refusals[job] = Refusal(time.monotonic() + REFUSAL_SECONDS, generation, reason)
        self._remember(job)
        self.farm.reports.refuse(job, self.worker, reason, generation)

    def _remember(self, job: str) -> None:
        """Remember a fact about a job; the oldest job is forgotten when there are too many."""
        self._known[job] = None
        while len(self._known) > JOBS_MAX:
            self.forget(next(iter(self._known)))

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

    def load(self, spec: JobSpec) -> None:
        """Have the engine of a spec loaded, though no job needs it.

        Raises:
            ModelError: The model is not to be had, or does not load.
        """
        self._open(spec)

    def _open(self, spec: JobSpec) -> Engine:
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
            self._accepted.clear()  # jobs of the previous model are looked at afresh
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


def _check_dimensions(spec: JobSpec, engine: Engine) -> None:
    """Refuse a job that wants more dimensions than the model's vectors have.

    Raises:
        ModelError: It does; the message has both numbers.
    """
    if spec.dimensions > engine.dimensions:
        few = f"{spec.model} has vectors of {engine.dimensions:,} dimensions"
        raise ModelError(f"{few}, and {spec.dimensions:,} are wanted")
