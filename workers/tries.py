"""How often blocks are tried, and what becomes of those that were tried in vain."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from embedfarm.contract import wire
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import Block
from embedfarm.contract.settings import Settings
from embedfarm.workers.cut_results import failure
from embedfarm.workers.job_engines import JobEngines
from embedfarm.workers.leased_blocks import pieces, place_of
from embedfarm.workers.leases import Holdings, Lease

PIECES: Final = 8  # a block that failed is split into this many

log = logging.getLogger(__name__)


@dataclass
class Tries:
    """Counts the tries of a worker's blocks; splits blocks and fails chunks that had enough."""

    farm: FarmClient
    worker: str
    holdings: Holdings
    engines: JobEngines
    settings: Settings

    def may_be_poison(self, lease: Lease) -> bool:
        """Tell whether a block may bring the worker down."""
        retried = lease.entry.stream == wire.JobKeys(lease.job).retry
        return retried or lease.deliveries >= self.settings.deliveries_max

    def put_aside(self, job: str, entry: Entry, tries: int, reason: str) -> None:
        """Fail the chunks of an entry that cannot be read; discard an entry that is no block."""
        chunks = place_of(job, entry)
        handle = self.farm.job(job)
        if chunks and chunks.stop <= handle.status().pushed_upto:
            block = Block(start=chunks.start, texts=[""] * len(chunks))
            self._give_up(Lease(job, entry, block, tries), reason)
        else:
            log.error("entry %s of %s is no block of the job: %s", entry.id, entry.stream, reason)
            handle.stream.discard(entry)

    def may_try(self, lease: Lease) -> bool:
        """Tell whether a block gets another try; if not, split it or fail it."""
        if not self._can_read(lease):
            self._give_up(lease, "its token ids were made for another model, or in another way")
            return False
        if lease.deliveries <= self._tries_max(lease):
            return True
        tried = replace(lease, deliveries=lease.deliveries - 1)  # this one is none
        times = f"{tried.deliveries} times"
        self._end_tries(tried, f"the worker died or hung {times} while embedding it")
        return False

    def _tries_max(self, lease: Lease) -> int:
        """Return how often a block is tried at most."""
        piece = lease.entry.stream == wire.JobKeys(lease.job).retry
        return 1 if piece and lease.block.count > 1 else self.settings.deliveries_max

    def conclude(self, leases: Sequence[Lease], reason: str) -> None:
        """Count a try that has just failed; where it was the last one, split the block or fail it.

        Otherwise the next worker would have to, and would not know why. Requests in the lane are
        left to it.
        """
        for lease in leases:
            lease.tried = True
            ours = self.holdings.holds(lease.entry.stream, lease.entry.id) and not lease.copied
            if ours and lease.deliveries >= self._tries_max(lease):
                self._end_tries(lease, f"{reason}, {lease.deliveries} times")

    def _end_tries(self, lease: Lease, reason: str) -> None:
        """Split a block that was tried as often as may be; a single chunk has failed."""
        if lease.block.count == 1:
            self._give_up(lease, reason)
        else:
            log.warning("block %d of job %s failed; split", lease.block.start, lease.job)
            parts = pieces(lease.block, PIECES)
            self.farm.job(lease.job).stream.split(lease.entry, parts, lease.attempts)

    def _can_read(self, lease: Lease) -> bool:
        """Tell whether the block has texts, or token ids made as this job's are."""
        tokens = lease.block.tokens
        if tokens is None:
            return True
        engine = self.engines.prepare(lease.job)
        return engine is None or engine.tokenisation == tokens.tokenisation

    def _give_up(self, lease: Lease, reason: str) -> None:
        """Commit a block as failed."""
        engine = self.engines.prepare(lease.job)
        if engine is not None:
            spec = self.engines.spec(lease.job)
            result = failure(lease, spec, engine.dimensions, self.worker, reason)
            self.farm.job(lease.job).stream.commit([(lease.entry, result)])
