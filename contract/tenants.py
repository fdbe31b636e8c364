"""The farm as one tenant sees it: as if there were no jobs but its own."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import msgspec

from embedfarm.contract import wire
from embedfarm.contract.farm_client import PLACE_SECONDS, RETRY_SECONDS_MAX, FarmClient, FarmFull
from embedfarm.contract.farm_statistics import FarmStatistics
from embedfarm.contract.pace import TimedMicroBatch
from embedfarm.contract.records import Heartbeat, Sample
from embedfarm.contract.status import OVER_STATES, JobStatus


class TenantFull(FarmFull):
    """Raised when there are as many unfinished jobs as a tenant may have, or as the farm takes."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        RuntimeError.__init__(self, f"{message}, try again in {retry_after_seconds:,} s")
        self.retry_after_seconds = retry_after_seconds


@dataclass
class TenantStatistics(FarmStatistics):
    """Statistics of a farm as one tenant sees them."""

    def recent_batches(self, seconds: float) -> dict[str, list[TimedMicroBatch]]:
        """Return micro-batches of the tenant's jobs, by worker; workers without are left out."""
        batches = super().recent_batches(seconds)
        own = set(self.own({bar.job for bars in batches.values() for bar in bars}))
        found = {name: [bar for bar in bars if bar.job in own] for name, bars in batches.items()}
        return {name: bars for name, bars in found.items() if bars}

    def samples(self, seconds: float) -> list[tuple[float, Sample]]:
        """Return the samples of the last `seconds`, with the tenant's jobs only, oldest first."""
        return self.own_samples(super().samples(seconds))


@dataclass
class TenantFarm(FarmClient):
    """The part of a farm that one tenant sees.

    Workers are seen by everybody, since their number and speed are what a tenant may hope for; but
    not the jobs and models of others that they work on.

    Attributes:
        jobs_max: Unfinished jobs that the tenant may make, None for no limit but the farm's.
    """

    jobs_max: int | None = field(default=None, kw_only=True)

    def job_ids(self) -> list[str]:
        """Return the ids of the tenant's jobs, oldest first."""
        return self.own(super().job_ids())

    def statuses(self) -> dict[str, JobStatus]:
        """Return the status of each of the tenant's jobs, oldest first."""
        return {job: each for job, each in super().statuses().items() if self.sees(each.tenant)}

    def call_roll(self) -> tuple[list[Heartbeat], dict[str, float]]:
        """Return all live workers, as `conceal` shows them, and the seconds of the lost ones."""
        beats, lost_seconds = super().call_roll()
        jobs = dict.fromkeys(job for beat in beats for job in (beat.job, *beat.refused) if job)
        own = set(self.own(jobs))
        return [conceal(beat, own) for beat in beats], lost_seconds

    @cached_property
    def statistics(self) -> FarmStatistics:
        """Statistics of the tenant's jobs."""
        return TenantStatistics(self.client, self.on_unreadable, tenant=self.tenant)

    def admit(self, job: str, jobs_max: int) -> None:
        """Give a job its place among the tenant's and among the farm's.

        A job that exists already needs a place among the tenant's as well: a failed one may be
        made anew.

        Raises:
            TenantFull: There is no place for the job.
        """
        self._take_own_place(job)
        try:
            # The farm's list is looked through by a farm that sees all: to one that does not, the
            # places of others would look empty.
            FarmClient(self.client, self.on_unreadable).admit(job, jobs_max)
        except FarmFull as error:
            self.client.zrem(wire.tenant_key(str(self.tenant)), job)
            # How many jobs others have is theirs to know.
            raise TenantFull("the farm is full", error.retry_after_seconds) from error

    def _take_own_place(self, job: str) -> None:
        """Put a job on the tenant's list of jobs made by HTTP; jobs that are over leave it."""
        if self.jobs_max is None:
            return
        key = wire.tenant_key(str(self.tenant))
        words: list[str | float] = [job, time.time(), self.jobs_max]
        if not self._script("admit")(keys=[key], args=words):
            return
        over = self._over(cast("list[Any]", self.client.zrange(key, 0, -1, withscores=True)))
        if over:
            self.client.zrem(key, *over)
        if self._script("admit")(keys=[key], args=words):
            seconds = min(RETRY_SECONDS_MAX, self._seconds_left(self.statuses().values()))
            limit = f"tenant {self.tenant} may have {self.jobs_max:,} unfinished jobs, and has them"
            raise TenantFull(limit, seconds)

    def _over(self, places: Collection[tuple[bytes, float]]) -> list[str]:
        """Return places whose jobs are over or gone; a young place may await its job."""
        names = [name.decode(errors="replace") for name, _ in places]
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(wire.JobKeys(name).meta, "state")
        before = time.time() - PLACE_SECONDS
        states = pipe.execute()
        return [
            name
            for name, (_, at), state in zip(names, places, states, strict=True)
            if (at < before if state is None else state.decode(errors="replace") in OVER_STATES)
        ]


def conceal(beat: Heartbeat, own: Collection[str]) -> Heartbeat:
    """Return a heartbeat without the jobs of others, nor the model that is loaded for them."""
    at_work = beat.job in own
    return msgspec.structs.replace(
        beat,
        job=beat.job if at_work else "",
        model=beat.model if at_work else "",
        models=[each for each in beat.models if at_work and each.model == beat.model],
        loading="",
        refused=[job for job in beat.refused if job in own],
    )
