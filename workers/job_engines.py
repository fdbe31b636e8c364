"""What a worker knows of jobs: their specifications, and which of them it may embed."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import redis

from embedfarm.contract.encoding import RecordError
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_reports import NOT_NOW, ModelRefused
from embedfarm.contract.job_spec import Decides, JobSpec, decided_by
from embedfarm.contract.jobs import identities
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.status import JobGone
from embedfarm.contract.stored_results import StorageRefused, check_place
from embedfarm.workers.engines.engine import Engine, ModelUnavailable
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.quantisation import check_ranges

JOBS_MAX: Final = 1000  # that something is known about
REFUSAL_SECONDS = 30.0  # a refused job is looked at again after this, for a model that arrives late
FAILURES_WORTH: Final = 10.0  # times as long as it took to find that its model does not load

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


class Identity(NamedTuple):
    """A job as its creator made it.

    Attributes:
        spec: What it asks for.
        generation: Which job of its name it is.
        engine: Key of the engine that serves it.
    """

    spec: JobSpec
    generation: str
    engine: str


class Agreement(NamedTuple):
    """What this worker and the others of a job agreed on.

    Attributes:
        fingerprint: Fingerprint of the engine.
        words: The job's fingerprint as the server has it.
    """

    fingerprint: Mapping[str, str]
    words: bytes


@dataclass
class JobEngines:
    """Finds the engine for a job, for one whose other workers have files that agree with ours.

    Attributes:
        models: What is loaded.
    """

    farm: FarmClient
    worker: str
    models: ModelStore
    _known: dict[str, None] = field(default_factory=dict)  # jobs, in the order they came
    _identities: dict[str, Identity] = field(default_factory=dict)
    _agreed: dict[str, Agreement] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)

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
        return self._identity(job).spec

    def knows(self, job: str, generation: str) -> bool:
        """Tell whether what is known about a job is of this generation; else forget it.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        if self._identity(job).generation == generation:
            return True
        self.forget(job)
        return False

    def _identity(self, job: str) -> Identity:
        if job not in self._identities:
            spec, generation = self.farm.job(job).identity()
            self._identities[job] = Identity(spec, generation, engine_key(spec))
            self._remember(job)
        return self._identities[job]

    def forget(self, job: str) -> None:
        """Forget all about a job that was deleted or made anew: it may be another one."""
        self._known.pop(job, None)
        self._identities.pop(job, None)
        self._agreed.pop(job, None)
        self._refusals.pop(job, None)

    def key(self, job: str) -> str:
        """Return the key of the engine that serves a job.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        return self._identity(job).engine

    def alike(self, job: str, other: str) -> bool:
        """Tell whether one engine embeds two jobs, and their vectors are stored alike.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        try:
            specs = self.spec(job), self.spec(other)
        except RecordError:
            return False  # `prepare` refuses it
        one, another = ({**decided_by(s, Decides.STORAGE), "engine": s.engine} for s in specs)
        return one == another

    def meet(self, jobs: Sequence[str]) -> set[str]:
        """Learn what jobs are that are not known yet, all at once; return those known then."""
        new = [job for job in jobs if job not in self._identities]
        if new:
            for job, (spec, generation) in identities(self.farm.client, new).items():
                self._identities[job] = Identity(spec, generation, engine_key(spec))
                self._remember(job)
        return set(jobs) & self._identities.keys()

    def agree_together(self, jobs: Sequence[str], engine: Engine) -> None:
        """Agree with the other workers of jobs that are alike, all at once, where that is plain.

        What is not is left to `prepare`.
        """
        new = {
            job: self._identities[job].generation for job in jobs if not self._agrees(job, engine)
        }
        if new and not self.models.is_outdated(engine):
            agreed = self.farm.reports.agree_together(
                new, self.worker, engine.fingerprint, engine.tokenisation
            )
            for job in agreed.keys() - self._refusals.keys():
                self._agreed[job] = Agreement(engine.fingerprint, agreed[job])

    def _agrees(self, job: str, engine: Engine) -> bool:
        """Tell whether the job's workers have agreed on an engine."""
        agreement = self._agreed.get(job)
        return agreement is not None and agreement.fingerprint == engine.fingerprint

    def agreed(self, job: str) -> bytes:
        """Return the fingerprint that the workers of a job agreed on, as the server has it."""
        agreement = self._agreed.get(job)
        return b"" if agreement is None else agreement.words

    def agree_again(self, job: str, generation: str, engine: Engine) -> bytes:
        """Agree once more on what has embedded chunks of a job; any thread may ask.

        Returns:
            The job's fingerprint as the server has it; empty where it is of another model, for
            which `prepare` refuses the job then, or where the job is gone.
        """
        try:
            words = self.farm.reports.agree(job, engine.fingerprint, generation)
        except (JobGone, ModelRefused) as error:
            log.warning("job %s is not settled any more: %s", job, error)
            self._agreed.pop(job, None)
            return b""
        self._agreed[job] = Agreement(engine.fingerprint, words)
        return words

    def needs_load(self, job: str) -> bool:
        """Tell whether a model has to be loaded for this job; a new job has the files of now.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        try:
            spec = self.spec(job)
            if job not in self._agreed:
                self.models.room.renew(spec.model)
            return self.models.variant(spec) is None
        except (ModelError, RecordError):
            return False  # `prepare` refuses it

    def load_beside(self, job: str, needed: Collection[str] = ()) -> bool:
        """Have the model of a job loaded while others are at work; refuse a job if it cannot be.

        Args:
            job: The job.
            needed: Keys of engines whose models do not go for it, beside those of work in hand.

        Returns:
            Whether that is settled; if not, models that are needed are in the way.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        try:
            return self.models.load_beside(self.spec(job), needed=needed)
        except (ModelError, RecordError) as error:
            self._refuse_for(job, error)
            return True

    def prepare(self, job: str) -> Engine | None:
        """Return the engine for a job, whose model is loaded if it is not.

        Returns:
            The engine; None when this worker refuses the job and has said why, or while another
            load goes on.

        Raises:
            embedfarm.contract.jobs.JobGone: There is no such job.
        """
        try:
            spec, generation, key = self._identity(job)
            if spec.stored:
                check_place(spec.stored, self.models.settings.stored_roots)
            engine = self.models.resident.use(key) or self.models.load(spec)
            if engine is not None and not self._agrees(job, engine):
                self._agree(job, spec, generation, engine)
        except (ModelError, ModelRefused, RecordError, StorageRefused) as error:
            self._refuse_for(job, error)
            return None
        return engine

    def _agree(self, job: str, spec: JobSpec, generation: str, engine: Engine) -> None:
        """See that an engine makes what is wanted, and the same as the job's other workers.

        Raises:
            ModelError: It has too few dimensions, or other ones than the job's ranges, or was
                loaded from other files than there are now.
            ModelRefused: Others embed the job with another model, or other tokens.
        """
        if self.models.is_outdated(engine):
            later = "they are loaded once no work needs those of before"
            raise ModelUnavailable(f"the files of {spec.model} have changed; {later}")
        _check_dimensions(spec, engine)
        check_ranges(spec, engine.dimensions)
        words = self.farm.reports.agree(job, engine.fingerprint, generation)
        self.farm.reports.agree_on_tokens(job, engine.tokenisation, generation)
        self._refusals.pop(job, None)
        self.farm.reports.accept(job, self.worker, generation)
        self._agreed[job] = Agreement(engine.fingerprint, words)

    def _refuse_for(self, job: str, error: Exception) -> None:
        """Refuse a job for an error, and say whether that passes.

        A load that takes long to fail is not repeated before the other workers have tried, of whom
        a small job is given to one after the other.
        """
        known, passes = self._identities.get(job), isinstance(error, ModelUnavailable)
        took = 0.0 if known is None or passes else self.models.failed_seconds(known.spec)
        self.refuse(job, reason_of(error), FAILURES_WORTH * took)

    def refuse(self, job: str, reason: str, seconds: float = 0.0) -> None:
        """Leave a job to others for a while, and say why; then it may have been made anew."""
        before = self._refusals.get(job)
        if before is None or before.reason != reason:
            log.warning("job %s refused: %s", job, reason)
        known = self._identities.pop(job, None)
        generation = self._generation(job) if known is None else known.generation
        until = time.monotonic() + max(REFUSAL_SECONDS, seconds)
        self._refusals[job] = Refusal(until, generation, reason)
        self._remember(job)
        self.farm.reports.refuse(job, self.worker, reason, generation)

    def _remember(self, job: str) -> None:
        """Remember a fact about a job; the oldest job is forgotten when there are too many."""
        self._known[job] = None
        while len(self._known) > JOBS_MAX:
            self.forget(next(iter(self._known)))


def reason_of(error: Exception) -> str:
    """Return what is said of a refusal for an error: whether it passes, and why."""
    return f"{NOT_NOW}{error}" if isinstance(error, ModelUnavailable) else str(error)


def _check_dimensions(spec: JobSpec, engine: Engine) -> None:
    """Refuse a job that wants more dimensions than the model's vectors have.

    Raises:
        ModelError: It does; the message has both numbers.
    """
    if spec.dimensions > engine.dimensions:
        few = f"{spec.model} has vectors of {engine.dimensions:,} dimensions"
        raise ModelError(f"{few}, and {spec.dimensions:,} are wanted")
