"""Passes that choose which worker tries which job first."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import ClassVar

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.state import SHARES_MAX, Draft, JobState


@dataclass(frozen=True)
class Fair:
    """Pass that serves tenants by weight, and the jobs of each too, within the first tier.

    Start-time fair queueing (Goyal, Vin and Cheng 1996): the next micro-batch goes to the tenant
    that had the least service for its weight, and there to the job that had the least for its own.
    A worker is charged to its job at once, so that several who ask together do not all take the
    same one.
    """

    settings: Settings
    name: ClassVar[str] = "fair"

    def __call__(self, draft: Draft) -> Draft:
        """Give every worker a queue of jobs."""
        if not draft.waiting[1:]:
            return draft
        turns = _Turns(draft.waiting, self.settings.tenant_weights)
        charge = self.settings.micro_batch_seconds_max / max(1, len(draft.state.takers))
        least = turns.least(SHARES_MAX)
        others = [*least, *draft.first]
        queues = {}
        for worker in draft.state.asking:
            job = turns.take(charge)
            queue = {each.job: each for each in (job, *others)}
            queues[worker.name] = tuple(islice(queue.values(), SHARES_MAX))
        words = (
            f"{job.job} had {job.service.job_seconds:.1f} s of the farm, its tenant "
            f"{job.status.tenant or '(none)'} {job.service.tenant_seconds:.1f} s, by their weights"
            for job in least
        )
        return replace(draft, queues=queues).note(self.name, words)


class _Turns:
    """Order in which jobs get turns; only the jobs of tenants that come first are sorted."""

    def __init__(self, jobs: Iterable[JobState], weights: Mapping[str, int]) -> None:
        self._weights = weights
        groups: defaultdict[str, list[JobState]] = defaultdict(list)
        for job in jobs:
            groups[job.status.tenant].append(job)
        self._groups = groups
        self._queues: dict[str, list[tuple[float, int, str, JobState]]] = {}
        self._tenants = [
            (group[0].service.tenant_seconds, tenant) for tenant, group in groups.items()
        ]
        heapq.heapify(self._tenants)

    def least(self, count: int) -> list[JobState]:
        """Return up to `count` jobs that had the least, those of the least served tenant first."""
        found: list[JobState] = []
        for _, tenant in sorted(self._tenants):
            if len(found) < count:
                found += (job for *_, job in sorted(self._queue(tenant))[: count - len(found)])
        return found

    def take(self, charge: float) -> JobState:
        """Return the next job, and charge it and its tenant so many seconds of the farm."""
        seconds, tenant = self._tenants[0]
        paid = charge / self._weights.get(tenant, 1)
        heapq.heapreplace(self._tenants, (seconds + paid, tenant))
        queue = self._queue(tenant)
        seconds, created_ms, name, job = queue[0]
        heapq.heapreplace(queue, (seconds + charge / job.status.weight, created_ms, name, job))
        return job

    def _queue(self, tenant: str) -> list[tuple[float, int, str, JobState]]:
        """Return the jobs of a tenant as a heap by service; of equals the older one comes first."""
        if tenant not in self._queues:
            queue = [
                (job.service.job_seconds, job.status.created_ms, job.job, job)
                for job in self._groups[tenant]
            ]
            heapq.heapify(queue)
            self._queues[tenant] = queue
        return self._queues[tenant]


@dataclass(frozen=True)
class Affinity:
    """Lets a worker stay with its loaded model, as long as no job falls far behind for it.

    A swap costs seconds to minutes. So a job of the loaded model goes first, unless it is ahead of
    the worker's first choice by more than `affinity_seconds` of service; and only within a tier.
    """

    settings: Settings
    name: ClassVar[str] = "affinity"

    def __call__(self, draft: Draft) -> Draft:
        """Put jobs of the loaded model in front."""
        queues, words = dict(draft.queues), []
        least: dict[str, JobState | None] = {}
        for worker in draft.state.asking:
            queue, model = draft.queue(worker.name), worker.model
            if not model or not queue or queue[0].model == model:
                continue
            if model not in least:
                same = [job for job in draft.waiting if job.model == model]
                least[model] = min(same, key=_served, default=None)
            stay = least[model]
            if stay is not None and _lead(stay, queue[0]) <= self.settings.affinity_seconds:
                others = (job for job in queue if job is not stay)
                queues[worker.name] = (stay, *others)[:SHARES_MAX]
                words.append((f"{worker.name} stays with {model} and {stay.job}", worker.name))
        return replace(draft, queues=queues).note(self.name, words)


@dataclass(frozen=True)
class Memory:
    """Keeps jobs away from devices that their models do not fit, and workers that refused them."""

    name: ClassVar[str] = "memory"

    def __call__(self, draft: Draft) -> Draft:
        """Put jobs that fit in place of those that do not."""
        if not draft.state.model_bytes and not any(w.refused for w in draft.state.asking):
            return draft
        queues, words = dict(draft.queues), []
        for worker in draft.state.asking:
            queue = draft.queue(worker.name)
            small = {job.job for job in queue if not draft.state.fits(worker, job)}
            if small:
                others = (job for job in draft.jobs if job.waiting_blocks and job not in queue)
                fitting = (job for job in chain(queue, others) if draft.state.fits(worker, job))
                queues[worker.name] = tuple(islice(fitting, SHARES_MAX))
                said = f"{worker.name} cannot take {', '.join(sorted(small))}"
                words.append((said, worker.name))
        return replace(draft, queues=queues).note(self.name, words)


def _served(job: JobState) -> tuple[float, float, str]:
    """Return the sort key of a job in a tier: service of the tenant, then of the job."""
    return job.service.tenant_seconds, job.service.job_seconds, job.job


def _lead(one: JobState, other: JobState) -> float:
    """Return the seconds of the farm that a job, or its tenant, is ahead of another."""
    if one.status.tenant != other.status.tenant:
        return one.service.tenant_seconds - other.service.tenant_seconds
    return one.service.job_seconds - other.service.job_seconds
