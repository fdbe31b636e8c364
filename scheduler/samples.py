"""What workers did since the last sample: the curves that people look at."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.records import Completion, Sample
from embedfarm.scheduler.state import FarmState

SAMPLE_SECONDS: Final = 10.0


@dataclass
class Sampler:
    """Adds completions up into samples.

    Attributes:
        began: Monotonic time of the last sample, or of the beginning.
    """

    began: float
    _workers: dict[str, tuple[int, int]] = field(default_factory=dict)
    _jobs: dict[str, tuple[int, int]] = field(default_factory=dict)

    def completed(self, completions: Iterable[Completion]) -> None:
        """Take micro-batches in."""
        for done in completions:
            for figures, name in ((self._workers, done.worker), (self._jobs, done.job)):
                tokens, chunks = figures.get(name, (0, 0))
                figures[name] = (tokens + done.real_tokens, chunks + done.chunks)

    def take(self, state: FarmState, now: float) -> Sample | None:
        """Return a sample that ends now, if it is time for one; the next one begins there.

        Args:
            state: The farm.
            now: Monotonic time.
        """
        seconds = now - self.began
        if seconds < SAMPLE_SECONDS:
            return None
        sample = Sample(
            seconds=seconds,
            workers=self._workers,
            jobs=self._jobs,
            backlog_tokens=sum(job.tokens_left for job in state.jobs),
            workers_alive=len(state.workers),
        )
        self.began, self._workers, self._jobs = now, {}, {}
        return sample
