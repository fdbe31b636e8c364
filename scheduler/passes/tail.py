"""The pass that lets idle workers make speculative copies when nothing is left to lease."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgspec

from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import blocks_for
from embedfarm.scheduler.state import OVERDUE_SHARE, Draft, FarmState, JobState

COPY_MARGIN: Final = 1.2  # a copy must win by this factor, or two workers race for nothing
COPY_OVERHEAD_SECONDS: Final = 0.02
PATIENCE: Final = 2.0  # times what copies should take, after which their maker hangs
PATIENCE_SECONDS: Final = 0.5  # on top of that


@dataclass(frozen=True)
class Tail:
    """Lets idle workers repeat the blocks that would be done last, when nothing waits.

    LATE (Zaharia et al. 2008): copy from the lease with the longest time to its end, and only if
    the copy would win. Whoever commits first counts; the other one's commit changes nothing.
    No block is repeated by two, unless the first one hangs: one that comes later and is faster
    would make it a third run.
    Blocks of the dead are left to the rescue, which counts how often a block was tried: a block
    that brings workers down must not get around that count by being copied. So a worker that ends
    while it repeats a block counts as well.
    """

    settings: Settings
    name: ClassVar[str] = "tail"

    def __call__(self, draft: Draft) -> Draft:
        """Add copies to the shares of idle workers."""
        idle = [] if draft.first else _idle(draft.state)
        if not idle:
            return draft
        shares = dict(draft.shares)
        takers: dict[str, dict[str, None]] = defaultdict(dict)
        for name in idle:
            for share in shares.get(name, ()):
                takers[share.job][name] = None
        words = []
        for job in (job for job in draft.jobs if job.job in takers):
            for name, ids in self._copies(draft.state, job, takers[job.job]).items():
                shares[name] = tuple(
                    msgspec.structs.replace(each, copies=ids) if each.job == job.job else each
                    for each in shares[name]
                )
                words.append((f"{name} repeats {len(ids)} blocks of {job.job}", name))
        return replace(draft, shares=shares).note(self.name, words)

    def _copies(
        self, state: FarmState, job: JobState, takers: Collection[str]
    ) -> Mapping[str, list[str]]:
        """Return stream IDs to copy by idle worker; a block being repeated stays with its worker.

        That worker gets no others until it is done with those. If it hangs in them, other workers
        may have them.
        """
        if job.status.state != "closed" or not job.leases:
            return {}
        late = {identifier: seconds for seconds, identifier in self._late(state, job)}
        copies: defaultdict[str, list[str]] = defaultdict(list)
        for identifier, name in _repeated(state, job, takers).items():
            if identifier in late:
                del late[identifier]
                copies[name].append(identifier)
        rates, passed = state.pace(job).rates, state.held_seconds
        free = [
            name
            for name in takers
            if name not in copies and name in rates and passed[name] <= PATIENCE_SECONDS
        ]
        for name, identifier in self._race(state, job, free, late) if free else ():
            copies[name].append(identifier)
        return {name: copies[name] for name in takers if name in copies}

    def _race(
        self, state: FarmState, job: JobState, free: Collection[str], late: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yield pairs of worker and block: the latest block for the worker that would end it first.

        That may be a worker that is busy a little longer, to which the block is left: a worker
        that is idle before the others does not take all.
        """
        rates, tokens = state.pace(job).rates, job.status.block_tokens_mean
        speeds = {name: rates[name].tokens_per_second for name in free}
        caps = {n: self.settings.micro_batch_seconds_max * speed for n, speed in speeds.items()}
        left = {n: blocks_for(cap, job.status, self.settings) for n, cap in caps.items()}
        ends = [(COPY_OVERHEAD_SECONDS + tokens / speed, name) for name, speed in speeds.items()]
        heapq.heapify(ends)
        busy = (each for each in state.busy if each[0] and each[1] in rates)
        begin, other = next(busy, (math.inf, ""))
        for seconds, identifier in sorted(zip(late.values(), late, strict=True), reverse=True):
            while ends and begin < ends[0][0]:
                speeds[other] = rates[other].tokens_per_second
                end = begin + COPY_OVERHEAD_SECONDS + tokens / speeds[other]
                heapq.heappush(ends, (end, other))
                begin, other = next(busy, (math.inf, ""))
            if not ends or ends[0][0] * COPY_MARGIN >= seconds:
                break
            end, name = heapq.heappop(ends)
            if name in left:
                yield name, identifier
                left[name] -= 1
            if left.get(name) != 0:
                heapq.heappush(ends, (end + tokens / speeds[name], name))

    def _late(self, state: FarmState, job: JobState) -> Iterator[tuple[float, str]]:
        """Yield the seconds to its end, and the stream ID, of each block a live worker holds."""
        held: dict[str, list[str]] = defaultdict(list)
        for lease in job.leases:
            if lease.deliveries + job.copies_lost.get(lease.id, 0) < self.settings.deliveries_max:
                held[lease.worker].append(lease.id)
        rates, tokens = state.pace(job).rates, job.status.block_tokens_mean
        for name, ids in held.items():
            passed = state.held_seconds.get(name)
            if passed is None:
                continue
            rate = rates.get(name)
            block_seconds = tokens / rate.tokens_per_second if rate else 0.0
            for place, identifier in enumerate(ids, start=1):
                yield max(place * block_seconds - passed, OVERDUE_SHARE * passed), identifier


def _idle(state: FarmState) -> Collection[str]:
    """Return the workers that take work and hold nothing.

    What workers hold is told by the leases: a heartbeat may be older than the end of the last
    micro-batch. One that repeats blocks already looks idle as well.
    """
    holders = set[str]().union(*[job.held_blocks for job in state.jobs if job.held_blocks])
    return [worker.name for worker in state.takers if worker.name not in holders]


def _repeated(state: FarmState, job: JobState, takers: Collection[str]) -> Mapping[str, str]:
    """Return the worker that repeats each block, without workers that are gone, idle, or hang."""
    if not job.copies:
        return {}
    rates, tokens = state.pace(job).rates, job.status.block_tokens_mean
    seconds = {
        name: count * tokens / rates[name].tokens_per_second if name in rates else 0.0
        for name, count in Counter(job.copies.values()).items()
    }
    at_it = {
        name
        for name, needed in seconds.items()
        if (passed := state.held_seconds.get(name)) is not None
        and (passed or name in takers)
        and passed <= PATIENCE_SECONDS + PATIENCE * needed
    }
    return {identifier: name for identifier, name in job.copies.items() if name in at_it}
