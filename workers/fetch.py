"""First stage: lease blocks as the plan says, rescue what others left, tokenise."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Final

import redis

from embedfarm import sizing, wire
from embedfarm.broker import BLOCK_SECONDS_MAX
from embedfarm.entries import Entry, Pending
from embedfarm.farm import Farm
from embedfarm.jobs import Job
from embedfarm.records import Block, ForeignVersion, JobShare, RecordError, decode
from embedfarm.settings import Settings
from embedfarm.status import JobGone, is_gone
from workers.engines import Chunk, Engine, Tokenised
from workers.leases import Holdings, Lease, MicroBatch
from workers.models import JOBS_MAX, Models
from workers.results import failure

PIECES: Final = 8  # a block that failed is split into this many
IDLE_SECONDS: Final = 0.25  # an idle worker looks for expired leases this often
PENDING_MAX: Final = 1024  # leases looked at in one go: more than a worker holds

log = logging.getLogger(__name__)


@dataclass
class Fetcher:
    """Leases work for one worker and makes it ready for the device.

    Attributes:
        tokens_per_second: The worker's own rate.
        when_idle: Called when there is no work; whether it found some of another kind.
    """

    farm: Farm
    worker: str
    holdings: Holdings
    models: Models
    settings: Settings
    stop: threading.Event
    tokens_per_second: float = 0.0
    when_idle: Callable[[], bool] = lambda: False
    _alone: bool = False
    _rescue_at: dict[str, float] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    def fetch(self) -> MicroBatch | None:
        """The next micro-batch, None after a short wait in which none came.

        Raises:
            redis.ConnectionError: The server is away; call `recover` when it is back.
        """
        if self._alone and not self.holdings.wait_empty(IDLE_SECONDS):
            return None
        self._alone = False
        shares = [share for share in self._shares() if not self.models.refused(share.job)]
        for share in sorted(shares, key=lambda share: self.models.ever_refused(share.job)):
            try:
                batch = self._fetch(share)
            except (JobGone, redis.ResponseError) as error:
                if not is_gone(error):
                    raise
                self.models.forget(share.job)
                self._begun.discard(share.job)
                continue
            if batch is not None or self._alone:
                return batch
        if not (self.holdings.wait_empty(0) and self.when_idle()):
            self._wait(shares)
        return None

    def recover(self) -> None:
        """Look for leases that a lost reply stranded, at the next fetch."""
        self._rescue_at.clear()

    def _fetch(self, share: JobShare) -> MicroBatch | None:
        """A micro-batch of one job; loading its model may take minutes."""
        job = self.farm.job(share.job)
        if self.models.swaps(job.id) and not self._may_swap(job):
            return None
        engine = self.models.prepare(job.id)
        if engine is None or self.stop.is_set():
            return None
        began = time.monotonic()
        leases = self._choose(job, self._lease(job, share))
        if not leases:
            return None
        if job.id not in self._begun:
            job.begin()
            if len(self._begun) >= JOBS_MAX:
                self._begun.clear()  # to begin once more changes nothing
            self._begun.add(job.id)
        # Not sooner: what an error above leaves behind must look stranded, or nobody rescues it.
        self.holdings.add(leases)
        return self._tokenise(job.id, engine, leases, began)

    def _may_swap(self, job: Job) -> bool:
        """Whether to load another model for a job: if it has work, and once the device is idle."""
        if not self._has_work(job):
            return False
        self._alone = not self.holdings.wait_empty(0)  # two models at a time may not fit
        return not self._alone

    def _choose(self, job: Job, leases: Sequence[Lease]) -> list[Lease]:
        """All that is healthy; else one suspect, if nothing else is held that could die with it.

        The rest is handed back, so that a delivery of a suspect always means that it was tried:
        beside one that kills the worker, the others would be counted out with it.
        """
        suspects = [lease for lease in leases if self._suspect(lease)]
        if not suspects:
            return list(leases)
        self._alone = True
        chosen = [lease for lease in leases if lease not in suspects]
        if not chosen and self.holdings.wait_empty(0):
            chosen = suspects[:1]
        for lease in leases:
            if lease not in chosen:
                job.release(lease.entry.stream, self.worker, [lease.entry.id])
        return chosen

    def _suspect(self, lease: Lease) -> bool:
        """Whether a block may bring the worker down."""
        retried = lease.entry.stream == wire.JobKeys(lease.job).retry
        return retried or lease.deliveries >= self.settings.deliveries_max

    # What to work on.

    def _shares(self) -> Sequence[JobShare]:
        """The plan; without a scheduler half of what is there, at our own last rate."""
        plan = self.farm.plan(self.worker)
        return plan.shares if plan is not None else list(self._own_shares())

    def _own_shares(self) -> Iterator[JobShare]:
        for name in self.farm.job_ids():
            try:
                status = self.farm.job(name).status()
            except JobGone:
                continue
            if status.state not in {"open", "closed"} or not sizing.has_room(status, self.settings):
                continue
            waiting = max(0, status.tokens_in - status.tokens_done)
            limit = self.tokens_per_second * self.settings.micro_batch_seconds_max
            tokens = min(limit, waiting / 2)
            yield JobShare(
                job=name,
                tokens=int(tokens),
                blocks=sizing.blocks_for(tokens, status, self.settings),
                open=status.state == "open",
            )

    def _has_work(self, job: Job) -> bool:
        """Whether there are blocks of a job that nobody works on: worth loading its model."""
        waiting, held = job.backlog()
        expired = (
            job.expired(stream, self.settings.lease_seconds, 1)
            for stream in (job.keys.retry, job.keys.blocks)
        )
        return waiting > 0 or (held > 0 and any(expired))

    def _wait(self, shares: Sequence[JobShare]) -> None:
        """Wait for the next block of a job that grows, else for news from the scheduler."""
        growing = next((share.job for share in shares if share.open), None)
        if growing is not None:
            self.farm.job(growing).wait_for_block(IDLE_SECONDS)
        else:
            seconds = IDLE_SECONDS if shares else BLOCK_SECONDS_MAX / 2
            self.farm.wait_for_plan(self.worker, seconds)

    # Leasing.

    def _lease(self, job: Job, share: JobShare) -> list[Lease]:
        """Expired leases first, then new blocks, then copies at the tail."""
        leases = []
        if time.monotonic() >= self._rescue_at.get(job.id, 0.0):
            leases = self._rescue(job, share.blocks)
        if not leases:
            leases = self._open(job.id, job.read(self.worker, share.blocks))
        if not leases and self.holdings.wait_empty(0):
            leases = self._rescue(job, share.blocks) or self._copy(job, share.copies)
        return leases

    def _rescue(self, job: Job, count: int) -> list[Lease]:
        """Take over leases nobody renewed, and our own that a lost reply or a crash stranded."""
        for stream in (job.keys.retry, job.keys.blocks):
            rows = job.pending(stream, self.worker, PENDING_MAX)
            rows += job.expired(stream, self.settings.lease_seconds, PENDING_MAX)
            found = {row.id: row for row in rows if not self.holdings.holds(stream, row.id)}
            if found:
                return self._claim(job, stream, dict(islice(found.items(), count)))
        if len(self._rescue_at) >= JOBS_MAX:
            self._rescue_at.clear()  # to look too early costs a round trip
        self._rescue_at[job.id] = time.monotonic() + self.settings.lease_seconds / 3
        return []

    def _claim(self, job: Job, stream: str, found: Mapping[str, Pending]) -> list[Lease]:
        """Lease pending entries by ID, each unless somebody else was quicker."""
        entries = job.claim(stream, self.worker, list(found), self.settings.lease_seconds)
        leases = self._open(job.id, entries, {e.id: found[e.id].deliveries for e in entries})
        if leases:
            log.info("rescued %d blocks of job %s", len(leases), job.id)
        return leases

    def _copy(self, job: Job, ids: Sequence[str]) -> list[Lease]:
        """Second tries of blocks that others hold."""
        wanted = [each for each in ids if not self.holdings.holds(job.keys.blocks, each)]
        return self._open(job.id, job.copies(wanted), copied=True) if wanted else []

    def _open(
        self,
        job: str,
        entries: Sequence[Entry],
        deliveries: Mapping[str, int] = MappingProxyType({}),
        *,
        copied: bool = False,
    ) -> list[Lease]:
        """Decode entries; those that may not be tried again are dealt with here.

        One of another version is handed back, with all others, for a worker that reads it.
        """
        leases = []
        for entry in entries:
            tries = deliveries.get(entry.id, 0) + 1
            try:
                lease = Lease(job, entry, _read(job, entry), tries, copied)
            except ForeignVersion as error:
                self.models.refuse(job, str(error))
                for each in entries:
                    self.farm.job(job).release(each.stream, self.worker, [each.id])
                return []
            except RecordError as error:
                self._put_aside(job, entry, tries, str(error))
                continue
            if self._may_try(lease):
                leases.append(lease)
        return leases

    def _put_aside(self, job: str, entry: Entry, tries: int, reason: str) -> None:
        """Fail the chunks of an entry that cannot be read; what is none of the job's just goes."""
        chunks = _place(job, entry)
        handle = self.farm.job(job)
        if chunks and chunks.stop <= handle.status().pushed_upto:
            block = Block(start=chunks.start, texts=[""] * len(chunks))
            self._give_up(Lease(job, entry, block, tries), reason)
        else:
            log.error("entry %s of %s is no block of the job: %s", entry.id, entry.stream, reason)
            handle.discard(entry)

    def _may_try(self, lease: Lease) -> bool:
        """Whether a block gets another try; if not it is split, or has failed."""
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
        """How often a block is tried."""
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
            self.farm.job(lease.job).split(lease.entry, parts, lease.attempts)

    def _can_read(self, lease: Lease) -> bool:
        """Whether the block has texts, or token ids of this job's recipe."""
        tokens = lease.block.tokens
        if tokens is None:
            return True
        engine = self.models.prepare(lease.job)
        return engine is None or engine.recipe == tokens.recipe

    def _give_up(self, lease: Lease, reason: str) -> None:
        """Commit a block as failed."""
        engine = self.models.prepare(lease.job)
        if engine is not None:
            spec = self.models.spec(lease.job)
            result = failure(lease, spec, engine.dimensions, self.worker, reason)
            self.farm.job(lease.job).commit([(lease.entry, result)])

    def _tokenise(self, job: str, engine: Engine, leases: list[Lease], began: float) -> MicroBatch:
        chunks = list(chain.from_iterable(lease.block.chunks() for lease in leases))
        started = time.monotonic()
        watchdog = self.models.watchdog
        with watchdog.watch("the tokenizer", lambda: watchdog.bound(0.0), leases):
            tokenised, reasons = tokenise(engine, chunks)
        spec = self.models.spec(job)
        batch = MicroBatch(job, spec, engine, leases, tokenised, reasons, began)
        batch.fetched = time.monotonic()
        batch.account.spend("tokenise", batch.fetched - started)
        return batch


def pieces(block: Block, count: int) -> list[Block]:
    """`block` cut into at most `count` blocks of consecutive chunks."""
    size = -(-block.count // count)
    firsts = range(0, block.count, size)
    return [block.piece(first, min(first + size, block.count)) for first in firsts]


def tokenise(engine: Engine, chunks: Sequence[Chunk]) -> tuple[Tokenised, dict[int, str]]:
    """All chunks as tokens, and why single ones cannot be embedded; those are empty."""
    reasons: dict[int, str] = {}
    try:
        tokenised = engine.tokenise(chunks)
    except Exception as error:  # noqa: BLE001 # a tokenizer may raise anything; the chunk pays
        log.warning("tokenising failed, trying chunks one by one: %r", error)
        tokenised, reasons = _tokenise_each(engine, chunks)
    return tokenised, reasons | dict(tokenised.reasons)


def _tokenise_each(engine: Engine, chunks: Sequence[Chunk]) -> tuple[Tokenised, dict[int, str]]:
    """All chunks, with an empty text in place of each that cannot be tokenised."""
    reasons = {}
    kept = list(chunks)
    for row, chunk in enumerate(chunks):
        try:
            engine.tokenise([chunk])
        except Exception as error:  # noqa: BLE001 # as above
            reasons[row] = f"the tokenizer raised {type(error).__name__}: {error}"
            kept[row] = ""
    return engine.tokenise(kept), reasons


def _read(job: str, entry: Entry) -> Block:
    """The block of an entry.

    Raises:
        RecordError: There is none, or not the one that the entry's ID names.
    """
    block = decode(Block, entry.data)
    place = _place(job, entry)
    if block.count < 1:
        raise RecordError("a block of no chunks")
    if place is not None and place != range(block.start, block.end):
        named = wire.entry_id(block.start, block.count)
        raise RecordError(f"entry {entry.id} holds the block of {named}")
    if block.ids is not None and len(block.ids) != block.count:
        raise RecordError(f"{len(block.ids)} ids for {block.count} chunks")
    return block


def _place(job: str, entry: Entry) -> range | None:
    """Chunks that an entry is about, by what is beside its block; None where nothing says."""
    if entry.stream == wire.JobKeys(job).blocks:
        after, count = map(int, entry.id.split("-"))
        return range(after - 1, after - 1 + count)
    return None if entry.start < 0 else range(entry.start, entry.start + entry.chunks)
