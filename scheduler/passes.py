"""From state to plan, in small named steps: the order of the list is the policy.

A pass may reorder, annotate or defer. It never drops a job's work: what no plan mentions stays in
the stream.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from embedfarm.jobs import JobStatus
from embedfarm.records import JobShare, Rate
from embedfarm.settings import Settings
from embedfarm.sizing import blocks_for, has_room
from scheduler.state import Draft, FarmState, JobState, WorkerState

Pass = Callable[[Draft], Draft]

GUESSED_OVERHEAD_SECONDS = 0.02
COPIES_MAX = 64
COPY_MARGIN = 1.2  # a copy must win by this factor, or two workers race for nothing


@dataclass(frozen=True)
class Defer:
    """Leaves out jobs that are paused, cancelled or done, or whose results are not collected."""

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Keep the jobs that can be worked on now."""
        kept, notes = [], []
        for job in draft.jobs:
            reason = self._reason(job.status)
            if reason:
                notes.append(f"{job.job} deferred: {reason}")
            else:
                kept.append(job)
        return replace(draft, jobs=tuple(kept), notes=(*draft.notes, *notes))

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

        K_i = clamp( R/2 * v_i / sum(v),  floor 2*a_i*v_i,  cap q*v_i )

    R tokens that nobody has leased, v_i the worker's tokens per second, a_i its overhead per
    micro-batch in seconds, q the cap in seconds. The half of AWF-C (Cariño and Banicescu 2008)
    leaves the rest for correction; the floor bounds overhead, the cap the damage of drift.
    An unknown worker gets a probe: a short time's work of the slowest known worker.
    """

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Give every worker a share of every job, in the jobs' order."""
        shares: dict[str, list[JobShare]] = {worker.name: [] for worker in takers(draft.state)}
        notes = []
        for job in draft.jobs:
            for worker, tokens in self._sizes(draft.state, job).items():
                blocks = blocks_for(tokens, job.status, self.settings)
                shares[worker].append(JobShare(job=job.job, tokens=int(tokens), blocks=blocks))
                notes.append(f"{worker} may lease {tokens:.0f} tokens ({blocks} blocks)")
        sized = {worker: tuple(each) for worker, each in shares.items()}
        return replace(draft, shares=sized, notes=(*draft.notes, *notes))

    def _sizes(self, state: FarmState, job: JobState) -> Mapping[str, float]:
        """Tokens per worker for one job."""
        names = [worker.name for worker in takers(state)]
        rates = {
            name: state.rates[name, job.job] for name in names if (name, job.job) in state.rates
        }
        total = sum(rate.tokens_per_second for rate in rates.values())
        slowest = min((rate.tokens_per_second for rate in rates.values()), default=0.0)
        return {
            name: self._size(job, rates[name], total)
            if name in rates
            else self.settings.probe_seconds * slowest
            for name in names
        }

    def _size(self, job: JobState, rate: Rate, total: float) -> float:
        speed = rate.tokens_per_second
        overhead = min(rate.overhead_seconds, self.settings.micro_batch_seconds_max / 4)
        share = job.waiting_tokens / 2 * speed / total
        cap = self.settings.micro_batch_seconds_max * speed
        return min(cap, max(share, 2 * overhead * speed))


@dataclass(frozen=True)
class Tail:
    """When nothing waits, lets an idle worker repeat the blocks that would be done last.

    LATE (Zaharia et al. 2008): copy from the lease with the longest time to its end, and only if
    the copy would win. Whoever commits first counts; the other one's commit changes nothing.
    """

    settings: Settings

    def __call__(self, draft: Draft) -> Draft:
        """Add copies to the shares of idle workers, one idle worker for each late one."""
        shares = dict(draft.shares)
        notes = list(draft.notes)
        for job in draft.jobs:
            if job.status.state != "closed" or job.waiting_blocks or not job.leases:
                continue
            for idle, ids, owner in copies(draft.state, job):
                shares[idle] = tuple(
                    JobShare(job=s.job, tokens=s.tokens, blocks=s.blocks, copies=ids)
                    if s.job == job.job
                    else s
                    for s in shares.get(idle, ())
                )
                notes.append(f"{idle} repeats {len(ids)} blocks of {owner}")
        return replace(draft, shares=shares, notes=tuple(notes))


def copies(state: FarmState, job: JobState) -> list[tuple[str, list[str], str]]:
    """Which idle worker repeats which blocks of which owner."""
    speeds = {
        worker.name: state.rates[worker.name, job.job].tokens_per_second
        for worker in state.workers
        if (worker.name, job.job) in state.rates
    }
    idle = [w.name for w in takers(state) if not w.held_tokens and w.name in speeds]
    owners = sorted({lease.worker for lease in job.leases} - set(idle))
    ends = {owner: expected_end(state, owner, speeds.get(owner, 0.0)) for owner in owners}
    late = sorted(owners, key=lambda owner: -ends[owner])
    chosen = []
    for name, owner in zip(sorted(idle, key=lambda each: -speeds[each]), late, strict=False):
        block_seconds = job.status.block_tokens_mean / speeds[name]
        room = (ends[owner] / COPY_MARGIN - GUESSED_OVERHEAD_SECONDS) / block_seconds
        # The owner works from its oldest block on, so the newest is the one it reaches last.
        held = [lease.id for lease in job.leases if lease.worker == owner][::-1]
        ids = held[: int(min(room, COPIES_MAX, len(held)))]
        if ids:
            chosen.append((name, ids, owner))
    return chosen


def expected_end(state: FarmState, owner: str, speed: float) -> float:
    """Seconds until a lease holder is done; one that is gone or unknown takes for ever."""
    worker = next((each for each in state.workers if each.name == owner), None)
    if worker is None or not speed:
        return float("inf")
    left = worker.held_tokens / speed - worker.held_seconds
    return max(left, worker.held_seconds / 4)  # overdue: assume a quarter more of what it took


def takers(state: FarmState) -> Sequence[WorkerState]:
    """Workers that take work."""
    return [worker for worker in state.workers if not worker.draining]


def default_passes(settings: Settings) -> tuple[Pass, ...]:
    """The policy."""
    return (Defer(settings), oldest_first, Size(settings), Tail(settings))


def decide(state: FarmState, passes: Sequence[Pass]) -> Draft:
    """The plan for a state."""
    draft = Draft(state=state, jobs=state.jobs)
    for each in passes:
        draft = each(draft)
    return draft
