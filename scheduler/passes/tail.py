"""What idle workers do when nothing is left to lease."""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgspec

from embedfarm.settings import Settings
from embedfarm.sizing import blocks_for
from scheduler.state import OVERDUE_SHARE, Draft, FarmState, JobState

COPY_MARGIN: Final = 1.2  # a copy must win by this factor, or two workers race for nothing
COPY_OVERHEAD_SECONDS: Final = 0.02


@dataclass(frozen=True)
class Tail:
    """When nothing waits, lets idle workers repeat the blocks that would be done last.

    LATE (Zaharia et al. 2008): copy from the lease with the longest time to its end, and only if
    the copy would win. Whoever commits first counts; the other one's commit changes nothing.
    Blocks of the dead are left to the rescue, which counts how often a block was tried: a block
    that brings workers down must not get around that count by being copied.
    """

    settings: Settings
    name: ClassVar[str] = "tail"

    def __call__(self, draft: Draft) -> Draft:
        """Add copies to the shares of idle workers."""
        idle = [] if draft.first else _idle(draft.state)
        if not idle:
            return draft
        shares = dict(draft.shares)
        takers: dict[str, list[str]] = defaultdict(list)
        for name in idle:
            for share in shares.get(name, ()):
                takers[share.job].append(name)
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
        """Stream IDs by idle worker: the latest block goes to who would end it first, and so on."""
        if job.status.state != "closed" or not job.leases:
            return {}
        rates = state.pace(job).rates
        speeds = {name: rates[name].tokens_per_second for name in takers if name in rates}
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
    """Workers that take work and hold nothing.

    What they hold is told by the leases: a heartbeat may be older than the end of the last
    micro-batch. One that repeats blocks already looks idle as well; it is told the same again.
    """
    holders = set[str]().union(*[job.held_blocks for job in state.jobs if job.held_blocks])
    return [worker.name for worker in state.takers if worker.name not in holders]
