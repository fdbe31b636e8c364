"""The pass that decides how much a worker leases at a time."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final

from embedfarm.contract.records import JobShare
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import blocks_for
from embedfarm.scheduler.state import Draft, FarmState, JobState, WorkerState

FACTOR: Final = 0.6  # share of a worker's part of what is left that is handed out at once
OVERHEAD_SHARE: Final = 0.01  # of a full micro-batch: one that costs more to begin may be longer
CAP_FACTOR_MAX: Final = 7.5  # but not by more than this: it may be a wait, and not for us
OVERHEADS_MIN: Final = 6.0  # a micro-batch shorter than so many overheads is not worth it
CONFIRMED_SECONDS: Final = 60.0  # a rate measured longer ago is confirmed before it is relied on
RESCUES_MAX: Final = 4  # jobs in a plan whose blocks are all leased: their holders may be dead


@dataclass(frozen=True)
class Size:
    """Sizes each worker's micro-batch so that all of them end together.

        R   = sum of ( T - h_j ) * v_j  over all with  h_j < T
        L_i = max( 0, T - h_i )
        K_i = v_i * min( q_i,  f * L_i  if f * L_i >= 6 * a_i  else  L_i )

    R tokens that nobody has leased, v_i the worker's tokens per second, h_i the seconds that it
    still needs for what it holds, a_i its overhead per micro-batch in seconds. All who are not busy
    for longer than that need T seconds together, so that L_i seconds of work are left for this one,
    and all these parts make R. It gets the part f of them:
    the rest is kept to correct what is wrong with the rates, as in weighted factoring (AWF-C,
    Cariño and Banicescu 2008), which looks at R alone and so gives the same to a worker that has
    its hands full. When the next micro-batch would not be worth its overhead, this one takes all
    that is left for the worker. The cap q bounds the damage of drift; it grows with the overhead,
    so that this stays below a hundredth.

    A worker without a rate gets a probe: a short time's work of the slowest known worker, or one
    block. One whose rate is old gets as short a time's work of its own.
    """

    settings: Settings
    name: ClassVar[str] = "size"

    def __call__(self, draft: Draft) -> Draft:
        """Give every worker that asks its shares."""
        return give(draft, self.settings, self.name, partial(self._tokens, draft.state, {}))

    def _tokens(
        self, state: FarmState, ends: dict[str, float], worker: WorkerState, job: JobState
    ) -> float:
        """Return the size in tokens of a worker's next micro-batch of a job.

        Args:
            state: The farm.
            ends: The T of each job that was met in this decision, by the job's id.
            worker: Who leases it.
            job: Whose it is.
        """
        pace = state.pace(job)
        rate = pace.rates.get(worker.name)
        if rate is None:
            return self.settings.probe_seconds * pace.slowest
        overhead = rate.overhead_seconds
        cap = self.settings.micro_batch_seconds_max
        cap = min(max(cap, overhead / OVERHEAD_SHARE), CAP_FACTOR_MAX * cap)
        if state.now - rate.updated > CONFIRMED_SECONDS:
            cap = min(cap, max(self.settings.probe_seconds, OVERHEADS_MIN * overhead))
        if job.job not in ends:
            ends[job.job] = pace.end(job.waiting_tokens)
        left = max(0.0, ends[job.job] - state.busy_seconds.get(worker.name, 0.0))
        part = FACTOR * left
        return min(cap, part if part >= OVERHEADS_MIN * overhead else left) * rate.tokens_per_second


def give(
    draft: Draft, settings: Settings, name: str, tokens: Callable[[WorkerState, JobState], float]
) -> Draft:
    """Give every worker that asks shares of the given size, of the jobs in its queue.

    Jobs with nothing to lease are in some plans too: of some the leases are held by the dead, of
    some a worker may repeat what is late, and some get more blocks. No worker that has models loads
    another one for them, unless only that rescues what is leased.
    """
    leased = _leased(draft)
    without = _without_workers(draft.state, leased)
    shares, words = {}, []
    for place, worker in enumerate(draft.state.asking):
        turn = place * RESCUES_MAX
        looks = range(turn, turn + min(len(leased), RESCUES_MAX))
        rescues = (leased[look % len(leased)] for look in looks)
        made = []
        for job in (
            *draft.queue(worker.name),
            *(job for job in rescues if _looks(draft.state, worker, job, without)),
        ):
            size = tokens(worker, job)
            blocks = blocks_for(size, job.status, settings)
            still = job.status.state == "open"
            made.append(
                JobShare(
                    job=job.job,
                    tokens=int(size),
                    blocks=blocks,
                    open=still,
                    priority=job.status.priority,
                )
            )
        ahead = draft.ahead.get(worker.name)
        if ahead is not None:
            made.append(JobShare(job=ahead.job, tokens=0, blocks=1, ahead=True))
        shares[worker.name] = tuple(made)
        if draft.explain:
            may = f"{worker.name} may lease"
            words += [
                (f"{may} {each.tokens} tokens ({each.blocks} blocks) of {each.job}", worker.name)
                for each in made
                if not each.ahead
            ]
    return replace(draft, shares=shares).note(name, words)


def _leased(draft: Draft) -> list[JobState]:
    """List the jobs with nothing to lease and something to come, those that the dead hold first."""
    jobs = [job for tier in draft.tiers for job in tier if not job.waiting_blocks]
    held = [job for job in jobs if job.held_blocks]
    if draft.state.orphaned:
        held.sort(key=lambda job: job.job not in draft.state.orphaned)
    return held + [job for job in jobs if not job.held_blocks and job.status.state == "open"]


def _without_workers(state: FarmState, jobs: Iterable[JobState]) -> AbstractSet[str]:
    """Return the jobs whose model no worker has, or only some that do not take the job."""
    had = Counter(model for worker in state.takers for model in worker.resident)
    refused = Counter(
        (job, model)
        for worker in state.takers
        for job in worker.refused
        for model in worker.resident
    )
    return {job.job for job in jobs if had[job.weights] == refused[job.job, job.weights]}


def _looks(state: FarmState, worker: WorkerState, job: JobState, without: AbstractSet[str]) -> bool:
    """Tell whether a worker looks at a job that has nothing to lease now."""
    if not state.exclusions(worker).allow(job):
        return False
    ready = not worker.resident or job.weights in worker.resident
    return ready or (bool(job.held_blocks) and job.job in without)
