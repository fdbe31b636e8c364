"""The pass that decides which workers load another model."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Final

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.state import (
    NO_EXCLUSIONS,
    Draft,
    Exclusions,
    FarmState,
    JobState,
    WorkerState,
)

LOADS_WORTH: Final = 10.0  # times its loading that a model is worked with, where jobs take turns
TOLERANCE: Final = 1e-9


@dataclass(frozen=True)
class Affinity:
    """Lets a worker stay with its models, and spreads the models that work waits for.

    A swap costs seconds to minutes. So jobs of the models that a worker has loaded go first, among
    each other as they are, unless another one

    - is more urgent (priority, then deadline), or has waited until its priority rose, no worker
      has its model, and this one has worked ten times as long as its loading takes since it loaded
      a model;
    - has less than its part of the farm, also with this worker, and the swap brings both models
      nearer to their parts;
    - has less than its part, and the worker's own job is ahead of it by more than
      `affinity_seconds` of service, and by more than ten times what its loading takes.

    A job that grows, and whose last block was taken a moment ago, counts as one that waits: a
    worker is as long without work for it as the loading of its model would take.

    A worker whose own work will have come to its end by the time that another model is loaded loads
    that one meanwhile, if it has room for it beside its own.

    In any case no more workers load a model than its waiting work keeps busy for as long as the
    loading takes. Parts are shares of the workers' speed, by the weights of tenants and jobs.
    """

    settings: Settings
    name: ClassVar[str] = "affinity"

    def __call__(self, draft: Draft) -> Draft:
        """Put jobs of the worker's model in front, and leave out those that others will do."""
        waiting = _waiting(draft)
        models = waiting.keys()
        if not models or all(models <= worker.resident for worker in draft.state.asking):
            return draft
        placement = _Placement(draft, self.settings, waiting)
        queues, words = dict(draft.queues), []
        # Who has nothing to stay for is the first to load what is wanted.
        for worker in sorted(
            draft.state.asking, key=lambda one: not models.isdisjoint(one.resident)
        ):
            before = draft.queue(worker.name)
            queue, said = placement.choose(worker, before)
            if queue != before:
                queues[worker.name] = queue
            if said:
                words.append((f"{worker.name} {said}", worker.name))
        ahead = {}
        for worker in draft.state.asking:
            job = placement.load_ahead(worker, queues.get(worker.name, draft.queue(worker.name)))
            if job is not None:
                ahead[worker.name] = job
                said = f"{worker.name} loads {job.model} ahead for {job.job}, if there is room"
                words.append((said, worker.name))
        return replace(draft, queues=queues, ahead=ahead).note(self.name, words)


@dataclass
class _Placement:
    """Spread of the models over the workers, with what this decision has changed so far.

    Attributes:
        waiting: Jobs with blocks to lease, or more to come, by model in the order of the tiers.
        have: Speed of the workers that have a model, or are loading it, by `weights_of` its key; 1
            is the mean. A worker that has several of those that work waits for is divided among
            them.
        free: How many of them will be free by the time that another one has loaded it.
    """

    draft: Draft
    settings: Settings
    waiting: Mapping[str, Sequence[JobState]]
    have: defaultdict[str, float] = field(init=False)
    free: defaultdict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.have, self.free = defaultdict(float), defaultdict(int)
        state = self.draft.state
        for worker in state.takers:
            for model, part in self._parts_of(worker).items():
                self.have[model] += part
                soon = self._load_seconds(model) + self.settings.micro_batch_seconds_max
                self.free[model] += state.busy_seconds.get(worker.name, 0.0) <= soon

    def _parts_of(self, worker: WorkerState) -> Mapping[str, float]:
        """Return the speed that a worker has for each of its models that work waits for."""
        wanted = worker.resident & self.waiting.keys()
        return dict.fromkeys(wanted, self._speed(worker) / max(1, len(wanted)))

    @cached_property
    def _tier(self) -> Mapping[str, int]:
        """The tier of each job."""
        return {job.job: n for n, tier in enumerate(self.draft.tiers) for job in tier}

    def choose(
        self, worker: WorkerState, queue: tuple[JobState, ...]
    ) -> tuple[tuple[JobState, ...], str]:
        """Return what a worker tries, in order, and what is to be said of it."""
        worth = [job for job in queue if job.weights in worker.resident or self._is_worth(job)]
        others = [job for job in worth if job.weights not in worker.resident]
        ending = self._ending(worker, others)
        stay = ending or self._own(worker)
        wanting = worth if ending is None else others
        first = next(iter(wanting), None) if stay is not None else self._most_wanting(worth)
        leaves = first is not None and (stay is None or self._moves(worker, stay, first))
        chosen = first if leaves else stay
        if chosen is None:
            return (), "waits: others have the models that work waits for" if queue else ""
        if not chosen.waiting_blocks:
            return (), f"stays with {chosen.model}: more is to come of {chosen.job}"
        if chosen.weights not in worker.resident:
            self._move(worker, chosen.weights)
            words = f"loads {chosen.model} for {chosen.job}"
        else:
            words = "" if chosen is first else f"stays with {chosen.model} and {chosen.job}"
        own = (job for job in worth if job.weights in worker.resident and job is not chosen)
        foreign = (job for job in others if job is not chosen)
        return (chosen, *own, *foreign)[: self.draft.width], words

    def _most_wanting(self, jobs: Sequence[JobState]) -> JobState | None:
        """Return the job of the first tier whose model lacks most of its part of the farm."""
        first = [job for job in jobs if self._tier[job.job] == self._tier[jobs[0].job]]
        return min(first, key=self._excess, default=None)

    def _move(self, worker: WorkerState, model: str) -> None:
        """Count a worker to the model that it is going to load."""
        for other, part in self._parts_of(worker).items():
            self.have[other] -= part
            self.free[other] -= 1
        self.have[model] += self._speed(worker)
        self.free[model] += 1

    def _own(self, worker: WorkerState) -> JobState | None:
        """Return the least served job of a worker's models, of the first tier that has any."""
        excluded = self.draft.state.exclusions(worker)
        if excluded != NO_EXCLUSIONS:
            return self._least([job for job in self._jobs(worker) if excluded.allow(job)])
        if worker.resident not in self._known_least:
            self._known_least[worker.resident] = self._least(self._jobs(worker))
        return self._known_least[worker.resident]

    @cached_property
    def _known_least(self) -> dict[frozenset[str], JobState | None]:
        return {}

    def _jobs(self, worker: WorkerState) -> Sequence[JobState]:
        """Return the waiting jobs of a worker's models, in the order of the tiers."""
        found = [job for model in worker.resident for job in self.waiting.get(model, ())]
        found = [job for job in found if job.waiting_blocks] or found
        return sorted(found, key=lambda job: self._tier[job.job])

    def _least(self, jobs: Sequence[JobState]) -> JobState | None:
        first = (job for job in jobs if self._tier[job.job] == self._tier[jobs[0].job])
        return min(first, key=_served, default=None)

    def _moves(self, worker: WorkerState, stay: JobState, job: JobState) -> bool:
        """Tell whether a worker takes a job instead of one of its own model."""
        if job.weights in worker.resident or _rank(job) < _rank(stay):
            return True
        before = self._tier[job.job] - self._tier[stay.job]
        if before > 0:
            return False
        if before < 0 and self.have[job.weights] < TOLERANCE and self._may_load(worker, stay, job):
            return True  # it has waited long
        here, there = self._excess(stay), self._excess(job)
        speed, lost = self._speed(worker), self._parts_of(worker)[stay.weights]
        nearer = abs(here - lost) + abs(there + speed) < abs(here) + abs(there) - TOLERANCE
        if nearer and there + speed <= TOLERANCE:
            return True
        return there < -TOLERANCE and _lead(stay, job) > self._patience(stay, job)

    def _may_load(self, worker: WorkerState, stay: JobState, job: JobState) -> bool:
        """Tell whether a worker has worked so long with what it loaded last that another one pays.

        All jobs whose models do not fit together have waited long after a few swaps; if that were
        enough, a worker would do nothing but load.
        """
        return worker.loaded_seconds >= self._worth_seconds(stay, job)

    def _patience(self, stay: JobState, job: JobState) -> float:
        """Return the seconds of the farm that a job may be ahead of one of another model."""
        least = self._worth_seconds(stay, job) / max(1, len(self.draft.state.takers))
        return max(self.settings.affinity_seconds, least)

    def _worth_seconds(self, stay: JobState, job: JobState) -> float:
        """Return the seconds of work for which a job's model is worth loading."""
        return LOADS_WORTH * self._next_load(stay, job)

    def _next_load(self, own: JobState, job: JobState) -> float:
        """Return the time that a job's model takes to load.

        One that nobody has loaded yet is taken to need as long as that of the worker's own job.
        """
        return self._load_seconds(job.weights) or self._load_seconds(own.weights)

    # What is loaded before its turn.

    def load_ahead(self, worker: WorkerState, queue: Sequence[JobState]) -> JobState | None:
        """Return the job whose model a worker is to load while it ends its own work, if any.

        It is the one that the worker would load then. Whether there is room beside the models that
        it works with is for the worker to see.
        """
        own = next(iter(queue), None)
        if own is None or own.weights not in worker.resident:
            return None
        others = (job for job in queue if job.weights not in worker.resident)
        following = self._most_wanting([job for job in others if self._is_worth(job)])
        if following is None or self._left_seconds(worker) > self._next_load(own, following):
            return None
        self.have[following.weights] += self._speed(worker)
        self.free[following.weights] += 1
        return following

    def _ending(self, worker: WorkerState, others: Sequence[JobState]) -> JobState | None:
        """Return the job that a worker ends first, so that its model makes room for another one.

        It is one that ends within the time that the first of the others, whose models the worker
        does not have, takes to load; unless it is far ahead of the worker's other jobs.
        """
        parts, own, following = self._parts_of(worker), self._own(worker), next(iter(others), None)
        if own is None or following is None or parts.keys() == {own.weights}:
            return None
        speed = self._speed(worker)
        left = {
            model: self._seconds(model) / (self.have[model] - part + speed)
            for model, part in parts.items()
        }
        soonest = min(left, key=left.__getitem__)
        jobs = [job for job in self.waiting[soonest] if self._tier[job.job] == self._tier[own.job]]
        ending = self._least(jobs)
        if ending is None or left[soonest] > self._next_load(own, following):
            return None
        return ending if _lead(ending, own) <= self._patience(ending, own) else None

    def _left_seconds(self, worker: WorkerState) -> float:
        """Return the time for which there is work left for the models that a worker has."""
        models = worker.resident & self.waiting.keys()
        have = sum(self.have[model] for model in models)
        return sum(map(self._seconds, models)) / max(TOLERANCE, have)

    def _seconds(self, model: str) -> float:
        """Return the time that a mean worker takes for what waits for a model.

        It is infinite where nobody knows how much is to come, or how fast it goes.
        """
        if model not in self._known_seconds:
            jobs = self.waiting[model]
            paces = [self.draft.state.pace(job) for job in jobs]
            known = all(pace.tokens_per_second for pace in paces)
            grows = any(job.status.state == "open" for job in jobs)
            self._known_seconds[model] = (
                math.inf
                if grows or not known
                else sum(
                    job.waiting_tokens * len(pace.rates) / pace.tokens_per_second
                    for job, pace in zip(jobs, paces, strict=True)
                )
            )
        return self._known_seconds[model]

    @cached_property
    def _known_seconds(self) -> dict[str, float]:
        return {}

    # How many workers a model is worth.

    def _is_worth(self, job: JobState) -> bool:
        """Tell whether one more worker is to load the model of a job.

        Those who have it and will soon be free are enough for what takes no longer than a loading.
        """
        refusing = sum(
            job.weights in models and not excluded.allow(job) for models, excluded in self._refusing
        )
        return self.free[job.weights] - refusing < self._workers_worth(job.weights)

    @cached_property
    def _refusing(self) -> list[tuple[frozenset[str], Exclusions]]:
        """The models of each worker that cannot take everything, and what it cannot take."""
        state = self.draft.state
        found = ((worker.resident, state.exclusions(worker)) for worker in state.takers)
        return [each for each in found if each[1] != NO_EXCLUSIONS]

    def _workers_worth(self, model: str) -> float:
        """Return how many workers the waiting work of a model keeps busy while it is loaded."""
        if model not in self._worth:
            self._worth[model] = self._count_worth(model)
        return self._worth[model]

    @cached_property
    def _worth(self) -> dict[str, float]:
        return {}

    def _count_worth(self, model: str) -> float:
        jobs, load = self.waiting[model], self._load_seconds(model)
        if any(job.status.state == "open" for job in jobs):
            return math.inf  # nobody knows how much is to come
        blocks, seconds = sum(job.waiting_blocks for job in jobs), self._seconds(model)
        return min(blocks, max(1, int(seconds / load))) if load and seconds < math.inf else blocks

    def _load_seconds(self, model: str) -> float:
        return self.draft.state.load_seconds.get(model, 0.0)

    # Parts of the farm.

    def _excess(self, job: JobState) -> float:
        """Return the speed of the workers that have a job's model, beyond the part it should have.

        The part is that among all jobs which are as urgent.
        """
        part = self._parts(_rank(job)).get(job.weights, 0.0)
        return self.have[job.weights] - self._total * part

    @cached_property
    def _total(self) -> float:
        return sum(map(self._speed, self.draft.state.takers))

    def _speed(self, worker: WorkerState) -> float:
        """Return the speed of a worker as a multiple of the mean."""
        return self._speeds.get(worker.name, 1.0)

    @cached_property
    def _speeds(self) -> Mapping[str, float]:
        """The mean over all kinds of work of each worker's speed beside that of the others."""
        sums: defaultdict[str, list[float]] = defaultdict(list)
        for pace in self.draft.state.paces.values():
            mean = pace.tokens_per_second / max(1, len(pace.rates))
            for name, rate in pace.rates.items() if mean else ():
                sums[name].append(rate.tokens_per_second / mean)
        return {name: sum(each) / len(each) for name, each in sums.items()}

    def _parts(self, rank: tuple[int, float]) -> Mapping[str, float]:
        """Return the part of the farm that each model should have, by the weights of its jobs."""
        if rank not in self._known_parts:
            tenants: defaultdict[str, list[JobState]] = defaultdict(list)
            for job in (job for jobs in self.waiting.values() for job in jobs):
                if _rank(job) == rank:
                    tenants[job.status.tenant].append(job)
            weights = {name: self.settings.tenant_weights.get(name, 1) for name in tenants}
            parts: defaultdict[str, float] = defaultdict(float)
            for name, jobs in tenants.items():
                share = weights[name] / sum(weights.values())
                among = sum(job.status.weight for job in jobs)
                for job in jobs:
                    parts[job.weights] += share * job.status.weight / among
            self._known_parts[rank] = parts
        return self._known_parts[rank]

    @cached_property
    def _known_parts(self) -> dict[tuple[int, float], Mapping[str, float]]:
        return {}


def _waiting(draft: Draft) -> Mapping[str, Sequence[JobState]]:
    """Return the jobs with blocks to lease, or more to come, by model in the order of the tiers."""
    found: defaultdict[str, list[JobState]] = defaultdict(list)
    for job in draft.jobs:
        if job.waiting_blocks or _grows(draft.state, job):
            found[job.weights].append(job)
    return found


def _grows(state: FarmState, job: JobState) -> bool:
    """Tell whether a job without blocks is likely to get some before its model were back."""
    seconds = state.load_seconds.get(job.weights, 0.0)
    return job.status.state == "open" and job.idle_seconds < seconds


def _rank(job: JobState) -> tuple[int, float]:
    """Return how urgent a job is, the most urgent one least: by priority, then by deadline."""
    return -job.status.priority, job.status.deadline_ms or math.inf


def _served(job: JobState) -> tuple[float, float, str]:
    """Return the sort key of a job in a tier: service of the tenant, then of the job."""
    return job.service.tenant_seconds, job.service.job_seconds, job.job


def _lead(one: JobState, other: JobState) -> float:
    """Return the seconds of the farm that a job, or its tenant, is ahead of another."""
    if one.status.tenant != other.status.tenant:
        return one.service.tenant_seconds - other.service.tenant_seconds
    return one.service.job_seconds - other.service.job_seconds
