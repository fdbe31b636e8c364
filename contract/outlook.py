"""How fast a job goes and how long its rest will take, as all that show it say it."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from redis.exceptions import NoPermissionError

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.pace import (
    AVERAGE_SECONDS,
    NOW_SECONDS,
    Pace,
    Range,
    WorkDone,
    averages,
    forecast_seconds,
    paces_now,
    total,
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


def chunk_rates(samples: Sequence[tuple[float, Sample]], now: float) -> dict[str, list[float]]:
    """Return the chunks per second of each job, over each of `AVERAGE_SECONDS`.

    Args:
        samples: Samples of the farm with their Unix times, oldest first.
        now: Unix seconds.
    """
    done = [
        WorkDone(end, each.seconds, {job: chunks for job, (_, chunks) in each.jobs.items()})
        for end, each in samples
    ]
    return averages(done, now)


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
        busy = {beat.worker for beat in workers if beat.state == "busy"}
        paces = paces_now(statistics.recent_batches(NOW_SECONDS), busy, now)
        pace = total(each for (_, job), each in paces.items() if job == self.job)
        rates = chunk_rates(self._follow(now), now)
        return outlook(status, pace, rates.get(self.job, []))

    def _follow(self, now: float) -> list[tuple[float, Sample]]:
        """Return the samples of the longest average, of which only the new ones are read."""
        since = now - max(AVERAGE_SECONDS)
        last = self._samples[-1][0] if self._samples else since
        new = self.farm.statistics.samples(now - last)
        self._samples += [each for each in new if each[0] > last]
        self._samples = [each for each in self._samples if each[0] > since]
        return self._samples
