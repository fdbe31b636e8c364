"""Which job goes before which."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from embedfarm.settings import Settings
from scheduler.state import Draft, JobState

LEVEL_MAX: Final = 2
LEVELS: Final = ("normal", "high", "urgent")


@dataclass(frozen=True)
class FirstCome:
    """Older jobs first."""

    name: ClassVar[str] = "fcfs"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by age."""
        return _sort(draft, self.name, lambda job: (job.status.created_ms, job.job))


@dataclass(frozen=True)
class ShortestFirst:
    """Jobs with the least left first: the least mean time in the farm, and no promise to others."""

    name: ClassVar[str] = "sjf"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by tokens left."""
        return _sort(draft, self.name, lambda job: (job.tokens_left, job.job))


@dataclass(frozen=True)
class Priority:
    """Urgent before high before normal, and within a level the earliest deadline first.

    A job that got nothing for `ageing_seconds` counts as one level higher, for twice that as two,
    and goes before the others of that level until it is served: computed now, not when it came, so
    that nobody starves and a job that is being served never outgrows one that is more urgent.
    """

    settings: Settings
    name: ClassVar[str] = "priority"

    def __call__(self, draft: Draft) -> Draft:
        """Split every tier by level and deadline."""
        ageing = self.settings.ageing_seconds
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

    def _explain(self, draft: Draft) -> Iterable[str]:
        for tier in draft.tiers:
            for job in tier:
                priority, waited = job.status.priority, job.service.waited_seconds
                aged = int(waited / self.settings.ageing_seconds)
                words = LEVELS[min(LEVEL_MAX, priority + aged)]
                if aged and priority < LEVEL_MAX:
                    words += f" after {waited:.0f} s without service"
                yield f"{job.job} is {words}"


def _merge(
    groups: Mapping[tuple[int, int, int], Iterable[JobState]],
) -> list[tuple[JobState, ...]]:
    """Tiers out of groups by priority, age and deadline; above urgent there is nothing."""
    tiers: defaultdict[tuple[int, bool, float], list[JobState]] = defaultdict(list)
    for (priority, aged, deadline_ms), jobs in groups.items():
        level = min(priority + aged, LEVEL_MAX)
        tiers[-level, level == priority, deadline_ms or math.inf] += jobs
    return [tuple(tiers[key]) for key in sorted(tiers)]


def _sort(draft: Draft, name: str, key: Callable[[JobState], Any]) -> Draft:
    """Every tier split into single jobs."""
    tiers = tuple((job,) for tier in draft.tiers for job in sorted(tier, key=key))
    ordered = replace(draft, tiers=tiers)
    words = (f"{job.job} is number {place}" for place, job in enumerate(ordered.jobs, start=1))
    return ordered.note(name, words)
