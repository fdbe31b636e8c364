"""Passes that order jobs: which of them goes before which."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.state import Draft, JobState

LEVEL_MAX: Final = 2
LEVELS: Final = ("normal", "high", "urgent")


@dataclass(frozen=True)
class FirstCome:
    """Pass that puts older jobs first."""

    name: ClassVar[str] = "fcfs"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by age."""
        return _sort(draft, self.name, lambda job: (job.status.created_ms, job.job))


@dataclass(frozen=True)
class ShortestFirst:
    """Pass that puts jobs with the least left first: least mean time, no promise to long jobs."""

    name: ClassVar[str] = "sjf"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by tokens left."""
        return _sort(draft, self.name, lambda job: (job.tokens_left, job.job))


@dataclass(frozen=True)
class Priority:
    """Pass that puts urgent before high before normal, and in a level the earliest deadline first.

    A job that got nothing for `ageing_seconds` counts as one level higher, for twice that as two,
    and goes before the others of that level until it is served: computed now, not when it came, so
    that nobody starves and a job that is being served never outgrows one that is more urgent. In a
    crowd it takes longer: as long as a micro-batch for each of its jobs, or there would always be
    somebody who has waited too long, and nothing urgent would ever be served.
    """

    settings: Settings
    name: ClassVar[str] = "priority"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by level and deadline."""
        ageing = self._ageing_seconds(draft)
        tiers: list[tuple[JobState, ...]] = []
        for tier in draft.tiers:
            groups: defaultdict[tuple[int, int, int], list[JobState]] = defaultdict(list)
            for job in tier:
                status, waited = job.status, job.service.waited_seconds
                aged = int(waited / ageing) if waited >= ageing else 0
                groups[status.priority, aged, status.deadline_ms].append(job)
            tiers += _merge(groups)
        ordered = replace(draft, tiers=tuple(tiers))
        return ordered.note(self.name, self._explain(ordered))

    def _ageing_seconds(self, draft: Draft) -> float:
        """Return after how long a job rises: no sooner than everybody could have had a turn."""
        least, cap = self.settings.ageing_seconds, self.settings.micro_batch_seconds_max
        takers = max(1, len(draft.state.takers))
        crowd = [
            job
            for tier in draft.tiers
            for job in tier
            if job.waiting_blocks and job.status.priority < LEVEL_MAX
        ]
        if len(crowd) * cap / takers <= least:
            return least
        speeds = [draft.state.pace(job).tokens_per_second / takers for job in crowd]
        turns = (
            min(cap, job.waiting_tokens / speed) if speed else cap
            for job, speed in zip(crowd, speeds, strict=True)
        )
        return max(least, sum(turns) / takers)

    def _explain(self, draft: Draft) -> Iterable[str]:
        ageing = self._ageing_seconds(draft)
        for tier in draft.tiers:
            for job in tier:
                priority, waited = job.status.priority, job.service.waited_seconds
                aged = int(waited / ageing)
                words = LEVELS[min(LEVEL_MAX, priority + aged)]
                if aged and priority < LEVEL_MAX:
                    words += f" after {waited:.0f} s without service"
                if job.job in draft.late:
                    words += f", and misses its deadline by {draft.late[job.job]:.0f} s"
                yield f"{job.job} is {words}"


def _merge(
    groups: Mapping[tuple[int, int, int], Iterable[JobState]],
) -> list[tuple[JobState, ...]]:
    """Make tiers of groups by priority, age and deadline; above urgent there is nothing."""
    tiers: defaultdict[tuple[int, bool, float], list[JobState]] = defaultdict(list)
    for (priority, aged, deadline_ms), jobs in groups.items():
        level = min(priority + aged, LEVEL_MAX)
        tiers[-level, level == priority, deadline_ms or math.inf] += jobs
    return [tuple(tiers[key]) for key in sorted(tiers)]


def _sort(draft: Draft, name: str, key: Callable[[JobState], Any]) -> Draft:
    """Split every tier into single jobs, sorted by `key`."""
    tiers = tuple((job,) for tier in draft.tiers for job in sorted(tier, key=key))
    ordered = replace(draft, tiers=tiers)
    words = (f"{job.job} is number {place}" for place, job in enumerate(ordered.jobs, start=1))
    return ordered.note(name, words)
