"""Rules of size that others use, to be compared with: none of them is the default."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.passes.size import give
from embedfarm.scheduler.state import Draft, JobState, WorkerState

BATCH_CHUNKS: Final = 100  # what a worker gets at a time, and an unknown one at first
BATCH_CHUNKS_MIN: Final = 50
BATCH_CHUNKS_MAX: Final = 500


@dataclass(frozen=True)
class Rounds:
    """Pass that gives everybody equally many chunks, and the next ones when all are done.

    A worker leases twice by one plan, so that a round is two micro-batches of each.
    """

    settings: Settings
    name: ClassVar[str] = "rounds"

    def __call__(self, draft: Draft) -> Draft:
        """Give shares to all workers once none of them holds anything, and to none before."""
        alive = {worker.name for worker in draft.state.workers}
        if any(alive & job.held_blocks.keys() for job in draft.jobs):
            nothing = {worker.name: () for worker in draft.state.asking}
            return replace(draft, shares=nothing).note(self.name, ["the round is not over"])
        return give(draft, self.settings, self.name, _hundred)


@dataclass(frozen=True)
class Fixed:
    """Pass that gives everybody equally many chunks at any time: no barrier, no measuring."""

    settings: Settings
    name: ClassVar[str] = "fixed"

    def __call__(self, draft: Draft) -> Draft:
        """Give shares of equal size."""
        return give(draft, self.settings, self.name, _hundred)


@dataclass(frozen=True)
class Adaptive:
    """Pass that shares what is left by speed, 50 to 500 chunks each; 100 while it is unknown."""

    settings: Settings
    name: ClassVar[str] = "adaptive"

    def __call__(self, draft: Draft) -> Draft:
        """Give shares by speed."""

        def tokens(worker: WorkerState, job: JobState) -> float:
            pace = draft.state.pace(job)
            if worker.name not in pace.rates:
                return _hundred(worker, job)
            chunk = job.status.chunk_tokens_mean
            part = pace.rates[worker.name].tokens_per_second / pace.tokens_per_second
            chunks = min(max(BATCH_CHUNKS_MIN, part * job.waiting_tokens / chunk), BATCH_CHUNKS_MAX)
            return min(chunks * chunk, job.waiting_tokens)

        return give(draft, self.settings, self.name, tokens)


def _hundred(_worker: WorkerState, job: JobState) -> float:
    return BATCH_CHUNKS * job.status.chunk_tokens_mean
