"""Modelled jobs: their blocks, and the worker that holds or has done each."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.entries import Pending
from embedfarm.contract.farm_client import length_class
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.ledger import Service
from embedfarm.scheduler.simulation.scenario import PAIRS_TOKENS, Work
from embedfarm.scheduler.state import JobState


@dataclass
class JobRun:
    """A job during a simulated run.

    Attributes:
        work: The job as the scenario describes it.
        tokens: Tokens of each block.
        costs: Cost of each block, in tokens of short chunks.
        block_chunks: Chunks in a block.
        next: First block that nobody ever leased.
        expired: Blocks whose lease nobody renewed.
        done: One byte for each block, 1 when it is done.
        leased_tokens: Tokens of all blocks that anybody ever leased.
        tokens_done: Tokens of the blocks that are done.
        holders: Name of the worker that leased each leased block that is not done.
        ended: Time in seconds when the last block was committed.
    """

    work: Work
    tokens: NDArray[np.float64]
    costs: NDArray[np.float64]
    block_chunks: int
    next: int = 0
    expired: list[int] = field(default_factory=list)
    done: bytearray = field(init=False)
    leased_tokens: float = 0.0
    tokens_done: float = 0.0
    holders: dict[int, str] = field(default_factory=dict)
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.done = bytearray(len(self.tokens))
        self._blocks_done = 0
        self.pairs = PAIRS_TOKENS * (self.costs - self.tokens)
        self._tokens_in = float(self.tokens.sum())
        self.chunk_tokens_mean = self._tokens_in / (len(self.tokens) * self.block_chunks)
        self.length_class = length_class(self.chunk_tokens_mean)

    @property
    def finished(self) -> bool:
        """Whether all blocks are done."""
        return self._blocks_done == len(self.tokens)

    def lease(self, worker: str, count: int) -> Sequence[int]:
        """Lease up to `count` blocks to a worker, first those whose leases have expired."""
        taken: Sequence[int] = [block for block in self.expired if not self.done[block]][:count]
        if taken:
            self.expired = [block for block in self.expired if block not in taken]
        else:
            self.next, first = min(self.next + count, len(self.tokens)), self.next
            taken = range(first, self.next)
            self.leased_tokens += float(self.tokens[first : self.next].sum())
        self.holders.update(dict.fromkeys(taken, worker))
        return taken

    def expire(self, worker: str) -> None:
        """Let the leases of a worker expire."""
        self.expired += [block for block, holder in self.holders.items() if holder == worker]

    def commit(self, blocks: Sequence[int], now: float) -> float:
        """Commit results, and return the tokens of those that were not committed before."""
        fresh = [block for block in blocks if not self.done[block]]
        for block in fresh:
            self.done[block] = 1
            del self.holders[block]
        tokens = float(self.tokens[fresh].sum())
        self.tokens_done += tokens
        self._blocks_done += len(fresh)
        if fresh:
            self.ended = now
        return tokens

    @property
    def waiting(self) -> int:
        """Blocks that were never leased."""
        return len(self.tokens) - self.next

    def state(self, service: Service, leases_max: int, copies: Mapping[str, str]) -> JobState:
        """Return the job as the scheduler sees it."""
        work = self.work
        due = work.arrives_seconds + work.deadline_seconds
        status = JobStatus(
            state="closed",
            created_ms=int(self.work.arrives_seconds * 1000),
            blocks_in=len(self.tokens),
            chunks_in=len(self.tokens) * self.block_chunks,
            tokens_in=int(self._tokens_in),
            blocks_done=self._blocks_done,
            tokens_done=int(self.tokens_done),
            priority=work.priority,
            tenant=work.tenant,
            weight=work.weight,
            deadline_ms=0 if math.isinf(due) else int(1000 * due),
        )
        leases = () if self.waiting or len(self.holders) > leases_max else self._leases()
        return JobState(
            work.name,
            work.model,
            status,
            self.waiting,
            length_class=self.length_class,
            held_blocks=Counter(self.holders.values()),
            leases=leases,
            service=service,
            copies=copies,
        )

    def _leases(self) -> tuple[Pending, ...]:
        return tuple(
            Pending("in", f"{block + 1}-0", holder, 0, 1)
            for block, holder in sorted(self.holders.items())
        )


def make_job(work: Work, speeds: Sequence[float], settings: Settings) -> JobRun:
    """Make a job, cut into blocks as a producer cuts them: by the slowest worker's speed."""
    lengths = np.asarray(work.lengths, dtype=np.float64)
    costs = lengths + lengths**2 / PAIRS_TOKENS
    chunks = round(settings.block_seconds * min(speeds) / lengths.mean())
    chunks = min(max(chunks, settings.block_chunks_min), settings.block_chunks_max)
    blocks = max(1, round(work.seconds * sum(speeds) / (costs.mean() * chunks)))
    return JobRun(work, _sums(lengths, blocks, chunks), _sums(costs, blocks, chunks), chunks)


def _sums(values: NDArray[np.float64], blocks: int, chunks: int) -> NDArray[np.float64]:
    """Return sums of `chunks` values for so many blocks; the values begin again at their end."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    rounds, places = np.divmod(np.arange(blocks + 1) * chunks, len(values))
    return np.diff(rounds * ends[-1] + ends[places])
