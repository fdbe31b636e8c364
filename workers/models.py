"""Which model is loaded: one at a time, and only for jobs whose files agree with ours."""

import logging
import time
from dataclasses import dataclass, field

from embedfarm.farm import Farm, ModelRefused, model_key
from embedfarm.model_files import ModelError
from embedfarm.records import JobSpec
from embedfarm.settings import Settings
from workers.engines import Engine, open_engine

REFUSAL_SECONDS = 30.0  # a refused job is looked at again after this, for a model that arrives late

log = logging.getLogger(__name__)


@dataclass
class Models:
    """Loads the model that a job needs; the previous one goes when nothing uses it any more.

    Attributes:
        load_seconds: What the last loading took.
        loaded: Key of the loaded model, "" when there is none.
    """

    farm: Farm
    worker: str
    torch_device: str
    settings: Settings
    load_seconds: float = 0.0
    loaded: str = ""
    _engine: Engine | None = None
    _identity: tuple[object, ...] = ()
    _specs: dict[str, JobSpec] = field(default_factory=dict)
    _refused_until: dict[str, float] = field(default_factory=dict)

    def refused(self, job: str) -> bool:
        """Whether this worker refused the job a moment ago."""
        return time.monotonic() < self._refused_until.get(job, 0.0)

    def spec(self, job: str) -> JobSpec:
        """What a job that `prepare` accepted asks for."""
        return self._specs[job]

    def prepare(self, job: str) -> Engine | None:
        """The engine for a job, None when this worker refuses it and has said why.

        Raises:
            embedfarm.jobs.JobGone: There is no such job.
        """
        if job in self._specs:
            return self._engine
        spec = self.farm.job(job).spec()
        try:
            engine = self._open(spec)
            self.farm.agree(job, engine.fingerprint)
        except (ModelError, ModelRefused) as error:
            log.warning("job %s refused: %s", job, error)
            self._refused_until[job] = time.monotonic() + REFUSAL_SECONDS
            self.farm.refuse(job, self.worker, str(error))
            return None
        self._specs[job] = spec
        return engine

    def _open(self, spec: JobSpec) -> Engine:
        """The loaded engine if it serves `spec`, else a new one in its place."""
        if self._engine is not None and self._identity == _identity(spec):
            return self._engine
        self._engine, self.loaded = None, ""
        self._specs.clear()  # jobs of the previous model are looked at afresh
        began = time.monotonic()
        self._engine = open_engine(spec, self.torch_device, self.settings)
        self.load_seconds = time.monotonic() - began
        self.loaded, self._identity = model_key(spec), _identity(spec)
        log.info("loaded %s in %.1f s", spec.model, self.load_seconds)
        return self._engine


def _identity(spec: JobSpec) -> tuple[object, ...]:
    """All of a spec that decides which engine serves it."""
    return (
        spec.model,
        spec.dtype,
        spec.prompt,
        spec.max_length,
        spec.normalize,
        spec.dimensions,
    )
