"""The scheduler's own figures, over the last minute and since it became active."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from embedfarm.contract.records import Completion, SchedulerStats
from embedfarm.scheduler.state import FarmState

RECENT_SECONDS: Final = 60.0
RECENT_MAX: Final = 10_000  # micro-batches, and decisions


class ReportedMicroBatch(NamedTuple):
    """A micro-batch that was reported.

    Attributes:
        at: Monotonic time of the report.
        completion: The micro-batch as it was reported.
        predicted: Seconds that the micro-batch should have taken, or 0.
        worth: Seconds that all workers together would need for it, 0 where that is not known.
    """

    at: float
    completion: Completion
    predicted: float
    worth: float


class TimedDecision(NamedTuple):
    """A decision: when, seconds it took, and whether there was work of known speed."""

    at: float
    seconds: float
    wanted: bool


@dataclass
class Statistics:
    """Collects the figures of `SchedulerStats`."""

    decisions: int = 0
    micro_batches: int = 0
    tokens: int = 0
    _speeds: Mapping[str, float] = field(default_factory=dict)
    _done: deque[ReportedMicroBatch] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    _looked: deque[TimedDecision] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))

    def decided(self, state: FarmState, seconds: float, now: float) -> None:
        """Take a decision in.

        Args:
            state: State of the farm that the decision was about.
            seconds: Time that the decision took.
            now: Monotonic time.
        """
        self.decisions += 1
        self._speeds = {job.job: state.pace(job).tokens_per_second for job in state.jobs}
        wanted = any(
            job.held_blocks or (job.waiting_blocks and job.status.state != "paused")
            for job in state.jobs
            if self._speeds[job.job]
        )
        self._looked.append(TimedDecision(now, seconds, wanted))

    def completed(self, done: Iterable[tuple[Completion, float]], now: float) -> None:
        """Take micro-batches in, each with the seconds that it should have taken, or 0."""
        for completion, predicted in done:
            self.micro_batches += 1
            self.tokens += completion.tokens
            speed = self._speeds.get(completion.job, 0.0)
            worth = completion.tokens / speed if speed else 0.0
            self._done.append(ReportedMicroBatch(now, completion, predicted, worth))

    def figures(
        self,
        passes: Sequence[str],
        dropped: Mapping[str, str],
        late: Mapping[str, float],
        now: float,
    ) -> SchedulerStats:
        """Return all figures, those of decisions and micro-batches over the last minute."""
        since = now - RECENT_SECONDS
        done = [each for each in self._done if each.at >= since]
        looked = [each for each in self._looked if each.at >= since]
        took = [each.completion.seconds for each in done]
        decided = [each.seconds for each in looked]
        errors = [abs(d.completion.seconds / d.predicted - 1) for d in done if d.predicted > 0]
        tokens = sum(each.completion.tokens for each in done)
        real = sum(each.completion.real_tokens for each in done)
        padded = sum(each.completion.padded_tokens for each in done)
        seconds = max(1e-9, now - min((each.at for each in looked), default=now))
        worked = _seconds_wanted(looked, now)
        return SchedulerStats(
            passes=list(passes),
            dropped=dict(dropped),
            late=dict(late),
            decisions=self.decisions,
            decision_seconds_mean=_mean(decided),
            decision_seconds_p99=_p99(decided),
            micro_batches=self.micro_batches,
            tokens=self.tokens,
            micro_batch_seconds_mean=_mean(took),
            micro_batch_seconds_p99=_p99(took),
            tokens_per_second=tokens / seconds,
            prediction_error=statistics.median(errors) if errors else 0.0,
            padding=padded / real - 1 if real else 0.0,
            # Rates are estimates: some workers beat theirs for a while.
            efficiency=min(1.0, sum(each.worth for each in done) / worked) if worked else 0.0,
        )


def _seconds_wanted(looked: Sequence[TimedDecision], now: float) -> float:
    """Return the seconds since the first of these decisions in which there was work to do."""
    ends = [*(each.at for each in looked[1:]), now]
    return sum(end - each.at for each, end in zip(looked, ends, strict=False) if each.wanted)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
