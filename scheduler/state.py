"""State of a farm and drafts of plans, as plain data: no clock, no server, no sleep."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Final, NamedTuple

from embedfarm.contract.entries import Pending
from embedfarm.contract.job_spec import weights_of
from embedfarm.contract.records import JobShare, Rate
from embedfarm.contract.sizing import ROOMY, FarmRoom
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.ledger import Service

NO_SERVICE: Final = Service()
OVERDUE_SHARE: Final = 0.25  # share of the time passed that a late worker is taken to need still
SHARES_MIN: Final = 4  # jobs in a plan that have blocks to lease: one to work on, and some more
SHARES_MAX: Final = 64  # where jobs are so small that a few would not last
LAST_SECONDS: Final = 0.5  # until the next plan, at the latest


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker.

    Attributes:
        name: Name of the worker.
        held_seconds: Seconds since its current micro-batch began on the device, 0 when idle.
        draining: Whether it takes no more work.
        resident: Models that it has loaded, or is loading, by `weights_of` their keys.
        memory_bytes: Memory of its device; 0 where that is no limit.
        refused: Jobs that it could not embed a moment ago.
        loaded_seconds: Seconds since it last loaded a model: 0 while it does, infinity if it has
            not been seen to.
    """

    name: str
    held_seconds: float = 0.0
    draining: bool = False
    resident: frozenset[str] = frozenset()
    memory_bytes: int = 0
    refused: frozenset[str] = frozenset()
    loaded_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class JobState:
    """A job that is not finished.

    Attributes:
        job: Id of the job.
        model: Key of its model, under which rates are remembered; `weights_of` it, which jobs of
            other maximum lengths share, is the name of what workers load.
        length_class: Length class of its chunks (`embedfarm.contract.farm_client.length_class`).
        status: Counters and terms of the job.
        waiting_blocks: Blocks that nobody has leased.
        held_blocks: Blocks leased and not committed, by worker.
        leases: Every lease, oldest block first; only looked up when nothing waits. Pieces of
            blocks that failed are not among them: each goes alone, and no worker copies it.
        service: Service that the job had of the farm so far.
        copies: Worker that repeats a leased block, by ID of the entry.
        copies_lost: How many workers have ended while they were to repeat a leased block, by ID of
            the entry.
        idle_seconds: Seconds since it had blocks that were waiting or leased, 0 while it has some.
        stranded: Whether it has no room for results, and a lease that nobody renews.
    """

    job: str
    model: str
    status: JobStatus
    waiting_blocks: int
    length_class: int = 0
    held_blocks: Mapping[str, int] = field(default_factory=dict)
    leases: tuple[Pending, ...] = ()
    service: Service = NO_SERVICE
    copies: Mapping[str, str] = field(default_factory=dict)
    copies_lost: Mapping[str, int] = field(default_factory=dict)
    idle_seconds: float = math.inf
    stranded: bool = False

    @property
    def weights(self) -> str:
        """Name of what a worker loads for the job."""
        return weights_of(self.model)

    @property
    def waiting_tokens(self) -> float:
        """Tokens of blocks that are not leased."""
        return self.waiting_blocks * self.status.block_tokens_mean

    @property
    def tokens_left(self) -> int:
        """Tokens that are not done, as far as the producer has come."""
        return self.status.tokens_in - self.status.tokens_done


class Exclusions(NamedTuple):
    """What a worker cannot take.

    Attributes:
        models: Models that its device has no room for, by `weights_of` their keys.
        jobs: Jobs that it refused.
    """

    models: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()

    def allow(self, job: JobState) -> bool:
        """Tell whether the worker can take a job."""
        return job.job not in self.jobs and job.weights not in self.models


NO_EXCLUSIONS: Final = Exclusions()


class ClassSpeed(NamedTuple):
    """How fast a farm is on chunks of one model and length.

    Attributes:
        rates: Rates by worker, as far as they are known.
        tokens_per_second: Speed of all workers together that take work and have a rate.
        slowest: Least speed among these workers.
        fills: For each k, tokens that keep these workers busy for as long as the k-th of them is
            with what it holds; the workers are in the order of that time.
        speeds: For each k, tokens per second of the first k workers together.
        holds: For each k, tokens that the first k workers still have to do of what they hold.
    """

    rates: Mapping[str, Rate] = {}
    tokens_per_second: float = 0.0
    slowest: float = 0.0
    fills: Sequence[float] = ()
    speeds: Sequence[float] = ()
    holds: Sequence[float] = ()

    def end(self, tokens: float) -> float:
        """Return the seconds in which all workers that are not busy for longer do some tokens."""
        last = max(0, bisect_left(self.fills, tokens) - 1)
        return (tokens + self.holds[last]) / self.speeds[last]


NO_PACE: Final = ClassSpeed()


@dataclass(frozen=True)
class FarmState:
    """All that a decision looks at; sums over all workers are computed when it is made.

    Attributes:
        jobs: Unfinished jobs.
        workers: Live workers.
        rates: Known rates by model and length class, and then by worker.
        now: Unix time in seconds, to tell how old a rate is.
        planned: Names of the workers that a plan is wanted for; None for all.
        model_bytes: Device memory that a model needs, by `weights_of` its key, where it is known.
        load_seconds: Time that a model takes to load, as above.
        room: Room that is used and left in the farm's window.
        takers: Workers that take work.
        asking: Workers that take work and that a plan is wanted for.
        held_seconds: `WorkerState.held_seconds` of each live worker, by name.
        busy_seconds: Seconds that a worker still needs for what it holds, if it holds anything.
        busy: `busy_seconds` and name of each worker that takes work, the least busy first.
        paces: Pace of the farm by model and length class.
        orphaned: Jobs with blocks that are held by a worker that is gone, or by nobody any more.
    """

    jobs: tuple[JobState, ...]
    workers: tuple[WorkerState, ...]
    rates: Mapping[tuple[str, int], Mapping[str, Rate]]
    now: float = 0.0
    planned: frozenset[str] | None = None
    model_bytes: Mapping[str, int] = field(default_factory=dict)
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    room: FarmRoom = ROOMY
    takers: Sequence[WorkerState] = field(init=False)
    asking: Sequence[WorkerState] = field(init=False)
    held_seconds: Mapping[str, float] = field(init=False)
    busy_seconds: Mapping[str, float] = field(init=False)
    busy: Sequence[tuple[float, str]] = field(init=False)
    paces: Mapping[tuple[str, int], ClassSpeed] = field(init=False)
    orphaned: AbstractSet[str] = field(init=False)

    def __post_init__(self) -> None:
        # The way to set what a frozen object derives from itself.
        made = object.__setattr__
        made(self, "takers", [worker for worker in self.workers if not worker.draining])
        wanted = self.planned
        asking = [each for each in self.takers if wanted is None or each.name in wanted]
        made(self, "asking", asking)
        made(self, "held_seconds", {each.name: each.held_seconds for each in self.workers})
        made(self, "busy_seconds", self._add_up())
        alive = self.held_seconds.keys()
        orphaned = {
            job.job for job in self.jobs if job.stranded or not job.held_blocks.keys() <= alive
        }
        made(self, "orphaned", orphaned)
        busy = sorted((self.busy_seconds.get(each.name, 0.0), each.name) for each in self.takers)
        made(self, "busy", busy)
        made(self, "paces", {kind: _pace(rates, busy) for kind, rates in self.rates.items()})

    def pace(self, job: JobState) -> ClassSpeed:
        """Return how fast the farm is on the chunks of a job."""
        return self.paces.get((job.model, job.length_class), NO_PACE)

    def exclusions(self, worker: WorkerState) -> Exclusions:
        """Return what a worker cannot take, as far as is known."""
        memory = worker.memory_bytes
        sizes = self.model_bytes if memory else {}
        if not sizes and not worker.refused:
            return NO_EXCLUSIONS
        too_big = frozenset(model for model, size in sizes.items() if size > memory)
        return Exclusions(too_big, worker.refused)

    def _add_up(self) -> Mapping[str, float]:
        """Return the seconds of work that each worker holds, less the time passed on the device."""
        passed = self.held_seconds
        held: defaultdict[str, float] = defaultdict(float)
        for job in self.jobs:
            rates = self.rates.get((job.model, job.length_class), {})
            for worker, blocks in job.held_blocks.items():
                if worker in rates and worker in passed:
                    tokens = blocks * job.status.block_tokens_mean
                    held[worker] += tokens / rates[worker].tokens_per_second
        return {
            worker: max(seconds - passed[worker], OVERDUE_SHARE * passed[worker])
            for worker, seconds in held.items()
        }


def _pace(rates: Mapping[str, Rate], busy: Sequence[tuple[float, str]]) -> ClassSpeed:
    """Compute the pace of the workers whose rates are known; `busy` has the least busy first."""
    known = [(seconds, rates[name].tokens_per_second) for seconds, name in busy if name in rates]
    sums = list(accumulate([speed for _, speed in known]))
    holds = list(accumulate([seconds * speed for seconds, speed in known]))
    fills = [known[k][0] * sums[k] - holds[k] for k in range(len(known))]
    slowest = min([speed for _, speed in known], default=0.0)
    return ClassSpeed(rates, sums[-1] if sums else 0.0, slowest, fills, sums, holds)


class Note(NamedTuple):
    """Note of a pass about what it did: its name, words, and the worker they are about, or ""."""

    name: str
    words: str
    worker: str = ""


@dataclass(frozen=True)
class Draft:
    """A plan in the making: what every pass takes and gives.

    Attributes:
        state: What the decision is about; no pass changes it.
        tiers: Jobs that may be worked on: any of the first tier before all of the second. A pass
            that orders jobs splits tiers, and so leaves the order of the passes before it alone.
        queues: Per worker the jobs with blocks to lease that it tries, in this order, where that is
            not the order of the tiers.
        ahead: Per worker the job whose model it loads before its own work has come to its end.
        shares: Per worker, how much of which job it may lease.
        explain: Whether notes are wanted.
        notes: What each pass did.
    """

    state: FarmState
    tiers: tuple[tuple[JobState, ...], ...]
    queues: Mapping[str, tuple[JobState, ...]] = field(default_factory=dict)
    ahead: Mapping[str, JobState] = field(default_factory=dict)
    shares: Mapping[str, tuple[JobShare, ...]] = field(default_factory=dict)
    explain: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def jobs(self) -> Iterable[JobState]:
        """Jobs of all tiers, in order."""
        return (job for tier in self.tiers for job in tier)

    @cached_property
    def waiting(self) -> Sequence[JobState]:
        """Jobs with blocks to lease of the first tier that has any."""
        lists = ([job for job in tier if job.waiting_blocks] for tier in self.tiers)
        return next((jobs for jobs in lists if jobs), [])

    def waiting_for(self, excluded: Exclusions) -> Sequence[JobState]:
        """Return the jobs to lease that a worker can take, of the first tier that has any."""
        if excluded == NO_EXCLUSIONS:
            return self.waiting
        fitting = ([job for job in tier if excluded.allow(job)] for tier in self.tiers)
        lists = ([job for job in tier if job.waiting_blocks] for tier in fitting)
        return next((jobs for jobs in lists if jobs), [])

    @cached_property
    def width(self) -> int:
        """Number of jobs with blocks to lease in a plan: few, and more where those are small.

        So many of the first ones last the whole farm until the next plan.
        """
        seconds, count = 0.0, 0
        for job in self.jobs:
            if job.waiting_blocks:
                count += 1
                speed = self.state.pace(job).tokens_per_second
                seconds += job.waiting_tokens / speed if speed else LAST_SECONDS
            if seconds >= LAST_SECONDS or count == SHARES_MAX:
                break
        return max(count, SHARES_MIN)

    @cached_property
    def first(self) -> tuple[JobState, ...]:
        """The first `width` jobs with blocks to lease, in the order of the tiers."""
        return tuple(islice((job for job in self.jobs if job.waiting_blocks), self.width))

    @cached_property
    def late(self) -> Mapping[str, float]:
        """Seconds by which jobs miss their deadlines if they are done in this order.

        A job is done when its tier is, and those before it: as far as work was sent, by the rates
        that are known.
        """
        end = self.state.now
        late: dict[str, float] = {}
        for tier in self.tiers:
            for job in tier:
                speed = self.state.pace(job).tokens_per_second
                end += job.tokens_left / speed if speed else 0.0
            undone = (job for job in tier if not job.status.embedded)
            ends = ((job.job, job.status.deadline_ms / 1000) for job in undone)
            late |= {name: end - deadline for name, deadline in ends if 0 < deadline < end}
        return late

    def queue(self, worker: str) -> tuple[JobState, ...]:
        """Return the jobs that a worker tries, in order."""
        return self.queues.get(worker, self.first)

    def note(self, name: str, words: Iterable[str | tuple[str, str]]) -> "Draft":
        """Add a note of what a pass did, if notes are wanted.

        Args:
            name: Name of the pass.
            words: Sentences, each alone or with the worker that it is about.
        """
        if not self.explain:
            return self
        added = [Note(name, each) if isinstance(each, str) else Note(name, *each) for each in words]
        return replace(self, notes=(*self.notes, *added))
