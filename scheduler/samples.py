"""What workers did since the last sample: the curves that people look at."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.records import Completion, Sample
from embedfarm.scheduler.state import FarmState

SAMPLE_SECONDS: Final = 10.0
LONG_SAMPLE_SECONDS: Final = 600.0


@dataclass
class Sampler:
    """Adds completions up into samples.

    Attributes:
        began: Monotonic time of the last sample, or of the beginning.
        seconds_min: Least length of a sample.
    """

    began: float
    seconds_min: float
    _workers: dict[str, tuple[int, int]] = field(default_factory=dict)
    _jobs: dict[str, tuple[int, int]] = field(default_factory=dict)
    _job_workers: dict[str, Counter[str]] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)

    def completed(self, completions: Iterable[Completion]) -> None:
        """Take micro-batches in."""
        for done in completions:
            for job, amounts in done.by_job().items():
                for figures, name in ((self._workers, done.worker), (self._jobs, job)):
                    tokens, chunks = figures.get(name, (0, 0))
                    figures[name] = (tokens + amounts[0], chunks + amounts[1])
                self._job_workers.setdefault(job, Counter())[done.worker] += amounts[0]
            if done.first:
                self._started.add(done.worker)

    def take(self, state: FarmState, now: float) -> Sample | None:
        """Return a sample that ends now, if it is time for one; the next one begins there.

        Args:
            state: The farm.
            now: Monotonic time.
        """
        seconds = now - self.began
        if seconds < self.seconds_min:
            return None
        sample = Sample(
            seconds=seconds,
            workers=self._workers,
            jobs=self._jobs,
            job_workers={job: dict(done) for job, done in self._job_workers.items()},
            backlog_tokens=sum(job.tokens_left for job in state.jobs),
            workers_alive=len(state.workers),
            started=sorted(self._started),
        )
        self.began, self._workers, self._jobs, self._job_workers = now, {}, {}, {}
        self._started = set()
        return sample


def new_samplers() -> tuple[Sampler, Sampler]:
    """Return samplers that begin now: for the curves of an hour, and for those of a week."""
    now = time.monotonic()
    return Sampler(now, SAMPLE_SECONDS), Sampler(now, LONG_SAMPLE_SECONDS)
