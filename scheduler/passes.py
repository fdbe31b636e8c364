"""From state to plan, in small named steps: the order of the list is the policy.

A pass may reorder, annotate or defer. It never drops a job's work: what no plan mentions stays in
the stream. Every live worker that is not draining gets a plan, be it an empty one: without a plan
it would help itself.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from embedfarm.jobs import JobStatus
from embedfarm.records import JobShare, Rate
from embedfarm.settings import Settings
from embedfarm.sizing import blocks_for, has_room
from scheduler.state import Draft, FarmState, JobState, WorkerState

Pass = Callable[[Draft], Draft]

COPY_MARGIN: Final = 1.2  # a copy must win by this factor, or two workers race for nothing
COPY_OVERHEAD_SECONDS: Final = 0.02
OVERHEAD_SHARE_MAX: Final = 0.25  # of a full micro-batch; above it a worker waits, and not for us
LEASES_AHEAD: Final = 2  # a worker may lease twice by one plan: for the device, and ahead


@dataclass(frozen=True)
class Defer:
    """Leaves out jobs that are paused, cancelled or done, or whose results are not collected."""

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Keep the jobs that can be worked on now."""
        reasons = {job.job: self._reason(job.status) for job in draft.jobs}
        notes = [f"{job} deferred: {reason}" for job, reason in reasons.items() if reason]
        kept = tuple(job for job in draft.jobs if not reasons[job.job])
        return replace(draft, jobs=kept, notes=(*draft.notes, *notes))

    def _reason(self, status: JobStatus) -> str:
        if status.state not in {"open", "closed"}:
            return status.state
        return "" if has_room(status, self.settings) else "results are not collected"


def oldest_first(draft: Draft) -> Draft:
    """Older jobs first."""
    ordered = sorted(draft.jobs, key=lambda job: (job.status.created_ms, job.job))
    return replace(draft, jobs=tuple(ordered))


@dataclass(frozen=True)
class Size:
    """Sizes each worker's micro-batch by weighted factoring with a floor and a cap.

        K_i = clamp( R/4 * v_i / sum(v),  floor 2*a_i*v_i,  cap q*v_i )

    R tokens that nobody has leased, v_i the worker's tokens per second, a_i its overhead per
    micro-batch in seconds, q the cap in seconds. AWF-C (Cariño and Banicescu 2008) hands out half
    of what is left and keeps the rest for correction; a worker leases ahead, so that its half
    comes as two micro-batches. The floor bounds overhead, the cap the damage of drift.
    An unknown worker gets a probe: a short time's work of the slowest known worker, or one block.
    """

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Give every worker a share of every job, in the jobs' order."""
        sizes = {job.job: self._sizes(draft.state, job) for job in draft.jobs}
        shares = {
            worker.name: tuple(
                JobShare(
                    job=job.job,
                    tokens=int(sizes[job.job][worker.name]),
                    blocks=blocks_for(sizes[job.job][worker.name], job.status, self.settings),
                )
                for job in draft.jobs
            )
            for worker in takers(draft.state)
        }
        notes = [
            f"{worker} may lease {share.tokens} tokens ({share.blocks} blocks) of {share.job}"
            for worker, each in shares.items()
            for share in each
        ]
        return replace(draft, shares=shares, notes=(*draft.notes, *notes))

    def _sizes(self, state: FarmState, job: JobState) -> Mapping[str, float]:
        """Tokens per worker for one job."""
        rates = known_rates(state, job)
        total = sum(rate.tokens_per_second for rate in rates.values())
        slowest = min((rate.tokens_per_second for rate in rates.values()), default=0.0)
        probe = self.settings.probe_seconds * slowest
        return {
            worker.name: self._size(job.waiting_tokens / total, rates[worker.name])
            if worker.name in rates
            else probe
            for worker in takers(state)
        }

    def _size(self, seconds_left: float, rate: Rate) -> float:
        """Tokens for a worker when all of them together need `seconds_left` for what waits."""
        cap = self.settings.micro_batch_seconds_max
        floor = 2 * min(rate.overhead_seconds, OVERHEAD_SHARE_MAX * cap)
        return min(cap, max(seconds_left / 2 / LEASES_AHEAD, floor)) * rate.tokens_per_second


@dataclass(frozen=True)
class Tail:
    """When nothing waits, lets idle workers repeat the blocks that would be done last.

    LATE (Zaharia et al. 2008): copy from the lease with the longest time to its end, and only if
    the copy would win. Whoever commits first counts; the other one's commit changes nothing.
    Blocks of the dead are left to the rescue, which counts how often a block was tried: a block
    that brings workers down must not get around that count by being copied.
    """

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Add copies to the shares of idle workers."""
        if any(job.waiting_blocks for job in draft.jobs):
            return draft
        shares = dict(draft.shares)
        notes = []
        for job in draft.jobs:
            for idle, ids in self._copies(draft.state, job).items():
                shares[idle] = tuple(
                    msgspec.structs.replace(share, copies=ids) if share.job == job.job else share
                    for share in shares.get(idle, ())
                )
                notes.append(f"{idle} repeats {len(ids)} blocks of {job.job}")
        return replace(draft, shares=shares, notes=(*draft.notes, *notes))

    def _copies(self, state: FarmState, job: JobState) -> Mapping[str, list[str]]:
        """Stream IDs by idle worker: the latest block goes to who would end it first, and so on."""
        if job.status.state != "closed":
            return {}
        speeds = idle_speeds(state, job)
        tokens = job.status.block_tokens_mean
        ends = [(COPY_OVERHEAD_SECONDS + tokens / speed, name) for name, speed in speeds.items()]
        heapq.heapify(ends)
        copies: dict[str, list[str]] = {}
        for late, identifier in sorted(self._late(state, job), reverse=True):
            if not ends or ends[0][0] * COPY_MARGIN >= late:
                break
            end, name = heapq.heappop(ends)
            copies.setdefault(name, []).append(identifier)
            cap = self.settings.micro_batch_seconds_max * speeds[name]
            if len(copies[name]) < blocks_for(cap, job.status, self.settings):
                heapq.heappush(ends, (end + tokens / speeds[name], name))
        return copies

    def _late(self, state: FarmState, job: JobState) -> Iterator[tuple[float, str]]:
        """Seconds until its end, and stream ID, of each block that a live worker holds."""
        held: dict[str, list[str]] = defaultdict(list)
        for lease in job.leases:
            if lease.deliveries < self.settings.deliveries_max:
                held[lease.worker].append(lease.id)
        for worker in state.workers:
            rate = state.rates.get((worker.name, job.job))
            block_seconds = job.status.block_tokens_mean / rate.tokens_per_second if rate else 0.0
            overdue = worker.held_seconds / 4  # assume a quarter more of what it took
            for place, identifier in enumerate(held[worker.name], start=1):
                yield max(place * block_seconds - worker.held_seconds, overdue), identifier


def idle_speeds(state: FarmState, job: JobState) -> Mapping[str, float]:
    """Tokens per second of the workers that hold nothing, by name.

    What they hold is told by the leases: a heartbeat may be older than the end of the last
    micro-batch. One that repeats blocks already looks idle as well; it is told the same again.
    """
    owners = {lease.worker for each in state.jobs for lease in each.leases}
    rates = known_rates(state, job)
    return {name: rate.tokens_per_second for name, rate in rates.items() if name not in owners}


def takers(state: FarmState) -> Sequence[WorkerState]:
    """Workers that take work."""
    return [worker for worker in state.workers if not worker.draining]


def known_rates(state: FarmState, job: JobState) -> Mapping[str, Rate]:
    """Rates for a job by worker, of those that take work and were measured before."""
    return {
        worker.name: state.rates[worker.name, job.job]
        for worker in takers(state)
        if (worker.name, job.job) in state.rates
    }


def default_passes(settings: Settings) -> tuple[Pass, ...]:
    """The policy."""
    return (Defer(settings), oldest_first, Size(settings), Tail(settings))


def decide(state: FarmState, passes: Sequence[Pass]) -> Draft:
    """The plan for a state."""
    draft = Draft(state=state, jobs=state.jobs)
    for each in passes:
        draft = each(draft)
    return draft
