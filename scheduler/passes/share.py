"""Passes that choose which worker tries which job first."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import ClassVar

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.state import NO_EXCLUSIONS, Draft, JobState


@dataclass(frozen=True)
class Fair:
    """Pass that serves tenants by weight, and the jobs of each too, within the first tier.

    Start-time fair queueing (Goyal, Vin and Cheng 1996): the next micro-batch goes to the tenant
    that had the least service for its weight, and there to the job that had the least for its own.
    A worker is charged to its job at once, so that several who ask together do not all take the
    same one. A worker that cannot take all jobs has its turn among those that it can take, of the
    first tier that has any.
    """

    settings: Settings
    name: ClassVar[str] = "fair"

    def __call__(self, draft: Draft) -> Draft:
        """Give every worker a queue of jobs."""
        excluded = {worker.name: draft.state.exclusions(worker) for worker in draft.state.asking}
        kinds = {NO_EXCLUSIONS, *excluded.values()}
        if not draft.waiting[1:] and len(kinds) == 1:
            return draft
        paid = _Paid(self.settings.tenant_weights)
        turns = {kind: _Turns(draft.waiting_for(kind), paid) for kind in kinds}
        charge = self.settings.micro_batch_seconds_max / max(1, len(draft.state.takers))
        least = turns[NO_EXCLUSIONS].least(draft.width)
        others = [*least, *draft.first]
        queues = {}
        for worker in draft.state.asking:
            job = turns[excluded[worker.name]].take(charge)
            queue = {each.job: each for each in chain(job, others)}
            queues[worker.name] = tuple(islice(queue.values(), draft.width))
        words = (
            f"{job.job} had {job.service.job_seconds:.1f} s of the farm, its tenant "
            f"{job.status.tenant or '(none)'} {job.service.tenant_seconds:.1f} s, by their weights"
            for job in least
        )
        return replace(draft, queues=queues).note(self.name, words)


@dataclass
class _Paid:
    """Seconds of the farm that jobs and tenants are charged in this decision, by their weights."""

    weights: Mapping[str, int]
    tenants: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    jobs: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def charge(self, job: JobState, seconds: float) -> None:
        """Charge a job and its tenant so many seconds."""
        self.tenants[job.status.tenant] += seconds / self.weights.get(job.status.tenant, 1)
        self.jobs[job.job] += seconds / job.status.weight


class _Turns:
    """Order in which jobs get turns; only the jobs of tenants that come first are sorted.

    Jobs may be charged by other turns as well. So what stands first in a heap may have been
    charged since, and is then put back by what it has had: charges only grow.
    """

    def __init__(self, jobs: Iterable[JobState], paid: _Paid) -> None:
        self._paid = paid
        groups: defaultdict[str, list[JobState]] = defaultdict(list)
        for job in jobs:
            groups[job.status.tenant].append(job)
        self._groups = groups
        self._queues: dict[str, list[tuple[float, int, str, JobState]]] = {}
        self._tenants = [(self._tenant_seconds(tenant), tenant) for tenant in groups]
        heapq.heapify(self._tenants)

    def least(self, count: int) -> list[JobState]:
        """Return up to `count` jobs that had the least, those of the least served tenant first."""
        found: list[JobState] = []
        for _, tenant in sorted(self._tenants):
            if len(found) < count:
                found += (job for *_, job in sorted(self._queue(tenant))[: count - len(found)])
        return found

    def take(self, charge: float) -> list[JobState]:
        """Return the next job, if there is any, and charge it so many seconds of the farm."""
        if not self._tenants:
            return []
        while (seconds := self._tenant_seconds(self._tenants[0][1])) > self._tenants[0][0]:
            heapq.heapreplace(self._tenants, (seconds, self._tenants[0][1]))
        queue = self._queue(self._tenants[0][1])
        while (entry := self._entry(queue[0][-1])) > queue[0]:
            heapq.heapreplace(queue, entry)
        job = queue[0][-1]
        self._paid.charge(job, charge)
        return [job]

    def _tenant_seconds(self, tenant: str) -> float:
        return self._groups[tenant][0].service.tenant_seconds + self._paid.tenants[tenant]

    def _entry(self, job: JobState) -> tuple[float, int, str, JobState]:
        """Return a job with what it has had; of equals the older one comes first."""
        seconds = job.service.job_seconds + self._paid.jobs[job.job]
        return seconds, job.status.created_ms, job.job, job

    def _queue(self, tenant: str) -> list[tuple[float, int, str, JobState]]:
        """Return the jobs of a tenant as a heap by service."""
        if tenant not in self._queues:
            queue = [self._entry(job) for job in self._groups[tenant]]
            heapq.heapify(queue)
            self._queues[tenant] = queue
        return self._queues[tenant]


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
            queue, excluded = draft.queue(worker.name), draft.state.exclusions(worker)
            small = {job.job for job in queue if not excluded.allow(job)}
            if small:
                others = (job for job in draft.jobs if job.waiting_blocks and job not in queue)
                fitting = (job for job in chain(queue, others) if excluded.allow(job))
                queues[worker.name] = tuple(islice(fitting, draft.width))
                said = f"{worker.name} cannot take {', '.join(sorted(small))}"
                words.append((said, worker.name))
        return replace(draft, queues=queues).note(self.name, words)
