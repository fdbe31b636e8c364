"""How fast a job goes and how long its rest will take, as all that show it say it."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from redis.exceptions import NoPermissionError

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.pace import (
    AVERAGE_SECONDS,
    NOW_SECONDS,
    Pace,
    PacesNow,
    Range,
    TimedMicroBatch,
    WorkDone,
    averages,
    forecast_seconds,
    paces_now,
    who_works,
)
from embedfarm.contract.records import Heartbeat, Sample
from embedfarm.contract.status import JobStatus

LOOK_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


class Outlook(NamedTuple):
    """The pace of a job now, and the seconds until all of it is embedded; None if none can tell."""

    pace: Pace
    seconds_left: Range | None


UNKNOWN: Final = Outlook(Pace(), None)


def outlook(status: JobStatus, pace: Pace, rates: Sequence[float]) -> Outlook:
    """Return the outlook of a job from its pace now, and its chunks per second lately."""
    left = chunks_left(status)
    if left is None or not status.moving:
        return Outlook(pace, None)
    # What is known takes no time.
    left = min(left, status.chunks_to_embed) if status.known_in else left
    return Outlook(pace, forecast_seconds(left, [pace.chunks_per_second, *rates]))


def chunks_left(status: JobStatus) -> int | None:
    """Return how many chunks have no vector yet; None while the corpus is still being read."""
    if status.chunk_count < 0:
        return None
    return max(0, status.chunk_count - status.done)


def done_ratio(status: JobStatus) -> float | None:
    """Return the share of a job's chunks that are embedded or failed; None while it is read."""
    left = chunks_left(status)
    if left is None:
        return None
    return (status.chunk_count - left) / status.chunk_count if status.chunk_count else 1.0


def live_paces(
    batches: Mapping[str, Sequence[TimedMicroBatch]],
    workers: Sequence[Heartbeat],
    now: float,
    begun: Mapping[str, float],
) -> PacesNow:
    """Return the paces of live workers now; those that are gone do nothing more.

    While a worker loads a model it has the pace that it had before, since it comes back to it.

    Args:
        batches: Micro-batches of the last `NOW_SECONDS`, by worker, oldest first.
        workers: Live workers.
        now: Unix seconds.
        begun: Unix time at which each job was begun, or resumed.
    """
    alive = {beat.worker: beat.state for beat in workers}
    busy = {name for name, state in alive.items() if state in {"busy", "loading"}}
    there = {name: done for name, done in batches.items() if name in alive}
    return paces_now(there, busy, now, begun)


def chunk_rates(
    samples: Sequence[tuple[float, Sample]],
    now: float,
    begun: Mapping[str, float],
    workers: Sequence[Heartbeat],
    at_work: WorkDone,
) -> dict[str, list[float]]:
    """Return the chunks per second of each job, over each of `AVERAGE_SECONDS`.

    Args:
        samples: Samples of the farm with their Unix times, oldest first.
        now: Unix seconds.
        begun: Unix time at which each job was begun, or resumed.
        workers: Live workers.
        at_work: Who works on what now, as `who_works` has it.
    """
    done = [
        WorkDone(
            end,
            each.seconds,
            {job: chunks for job, (_, chunks) in each.jobs.items()},
            each.job_workers,
            each.started,
        )
        for end, each in samples
    ]
    return averages([*done, at_work], now, begun, {beat.worker for beat in workers})


@dataclass
class OutlookReader:
    """Reads the outlook of one job now and then; what is asked for in between is the last one."""

    farm: FarmClient
    job: str
    _last: Outlook = UNKNOWN
    _next_at: float = 0.0  # in monotonic time
    _samples: list[tuple[float, Sample]] = field(default_factory=list)  # of the longest average

    def read(self, status: JobStatus, workers: Sequence[Heartbeat]) -> Outlook:
        """Return the outlook of the job, whose status and whose farm's workers are known.

        A user of the server that may not read the farm's figures has no outlook, and goes on.

        Raises:
            redis.ConnectionError, redis.TimeoutError: The server is away.
        """
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + LOOK_SECONDS
            try:
                self._last = self._look(status, workers)
            except NoPermissionError as error:
                log.warning("nobody can tell how long the rest takes: %s", error)
                self._next_at = math.inf
        return self._last

    def _look(self, status: JobStatus, workers: Sequence[Heartbeat]) -> Outlook:
        statistics = self.farm.statistics
        seconds, microseconds = self.farm.client.time()
        now = seconds + microseconds / 1e6
        begun = {self.job: status.begun_at}
        batches = statistics.recent_batches(NOW_SECONDS)
        paces = live_paces(batches, workers, now, begun)
        at_work = who_works(batches, now)
        rates = chunk_rates(self._follow(now), now, begun, workers, at_work)
        return outlook(status, paces.by_job.get(self.job, Pace()), rates.get(self.job, []))

    def _follow(self, now: float) -> list[tuple[float, Sample]]:
        """Return the samples of the longest average, of which only the new ones are read."""
        since = now - max(AVERAGE_SECONDS)
        last = self._samples[-1][0] if self._samples else since
        new = self.farm.statistics.samples(now - last)
        self._samples += [each for each in new if each[0] > last]
        self._samples = [each for each in self._samples if each[0] > since]
        return self._samples
