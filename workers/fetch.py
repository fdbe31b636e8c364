"""First stage: lease blocks as the plan says, rescue what others left, tokenise."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import redis

from embedfarm import sizing
from embedfarm.broker import BLOCK_SECONDS_MAX
from embedfarm.farm import Farm
from embedfarm.jobs import Entry, Job, JobGone, Pending
from embedfarm.records import Block, JobShare, RecordError, decode
from embedfarm.settings import Settings
from workers.embed import failure
from workers.engines import Engine, Tokenised
from workers.leases import Holdings, Lease, MicroBatch
from workers.models import Models

PIECES: Final = 8  # a block that failed is split into this many
IDLE_SECONDS: Final = 0.25  # an idle worker looks for expired leases this often
RESCUE_ENTRIES_MAX: Final = 64

log = logging.getLogger(__name__)


@dataclass
class Fetcher:
    """Leases work for one worker and makes it ready for the device."""

    farm: Farm
    worker: str
    holdings: Holdings
    models: Models
    settings: Settings
    tokens_per_second: float = 0.0
    tokenise_seconds: float = 0.0
    _rescue_at: float = 0.0
    _events_seen: str = "$"
    _begun: set[str] = field(default_factory=set)

    def fetch(self) -> list[MicroBatch]:
        """Micro-batches that are ready, empty after a short wait in which none came.

        Raises:
            redis.ConnectionError: The server is away; call `recover` when it is back.
        """
        shares = [share for share in self._shares() if not self.models.refused(share.job)]
        for share in shares:
            try:
                if self.models.prepare(share.job) is None:
                    continue
                began = time.monotonic()
                leases = self._lease(share)
                if leases:
                    return self._prepare(share.job, leases, began)
            except (JobGone, redis.ResponseError) as error:
                if not _is_gone(error):
                    raise
        self._wait([share.job for share in shares])
        return []

    def recover(self) -> None:
        """Look for leases that a lost reply stranded, at the next fetch."""
        self._rescue_at = 0.0

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
            )

    def _wait(self, jobs: Sequence[str]) -> None:
        """Wait for the first block of the first job, or without jobs for one to be created."""
        if jobs:
            self.farm.job(jobs[0]).wait_for_block(IDLE_SECONDS)
        else:
            self._events_seen, _ = self.farm.events(self._events_seen, BLOCK_SECONDS_MAX / 2)

    # Leasing.

    def _lease(self, share: JobShare) -> list[Lease]:
        """Expired leases first, then new blocks, then copies at the tail."""
        job = self.farm.job(share.job)
        leases = []
        if time.monotonic() >= self._rescue_at:
            leases = self._rescue(job)
        if not leases:
            leases = self._open(share.job, job.read(self.worker, share.blocks))
        if not leases and not self.holdings.tokens:
            leases = self._rescue(job) or self._copy(job, share.copies)
        return leases

    def _rescue(self, job: Job) -> list[Lease]:
        """Take over leases nobody renewed, and our own that a lost reply or a crash stranded."""
        self._rescue_at = time.monotonic() + self.settings.lease_seconds / 3
        for stream in (job.keys.retry, job.keys.blocks):
            mine = job.pending(stream, self.worker, RESCUE_ENTRIES_MAX + 1024)
            rows = [row for row in mine if not self.holdings.holds(stream, row.id)]
            rows += job.expired(stream, self.settings.lease_seconds, RESCUE_ENTRIES_MAX)
            found = {row.id: row for row in rows if not self.holdings.holds(stream, row.id)}
            if found:
                return self._claim(job, stream, list(found.values())[:RESCUE_ENTRIES_MAX])
        return []

    def _claim(self, job: Job, stream: str, rows: Sequence[Pending]) -> list[Lease]:
        """Lease pending entries, each unless somebody else was quicker."""
        leases = []
        for stranded in (True, False):
            chosen = {row.id: row for row in rows if (row.worker == self.worker) is stranded}
            idle = 0.0 if stranded else self.settings.lease_seconds
            entries = job.claim(stream, self.worker, list(chosen), idle)
            leases += self._open(job.id, entries, {e.id: chosen[e.id].deliveries for e in entries})
        log.info("rescued %d blocks of job %s", len(leases), job.id)
        return leases

    def _copy(self, job: Job, ids: Sequence[str]) -> list[Lease]:
        """Second tries of blocks that others hold."""
        wanted = [each for each in ids if not self.holdings.holds(job.keys.blocks, each)]
        leases = self._open(job.id, job.copies(wanted)) if wanted else []
        for lease in leases:
            lease.copied = True
        return leases

    def _open(
        self, job: str, entries: Sequence[Entry], deliveries: dict[str, int] | None = None
    ) -> list[Lease]:
        """Decode entries, and hold those that may be tried (again)."""
        leases = []
        for entry in entries:
            before = (deliveries or {}).get(entry.id, 0)
            try:
                lease = Lease(job, entry, decode(Block, entry.data), before + 1)
            except RecordError as error:
                self._give_up(_unreadable(job, entry, before + 1), str(error))
                continue
            if self._may_try(lease):
                leases.append(lease)
        self.holdings.add(leases)
        return leases

    def _may_try(self, lease: Lease) -> bool:
        """Whether a block gets another try; if not it is split, or its one chunk has failed."""
        piece = lease.entry.stream == self.farm.job(lease.job).keys.retry
        chunks = len(lease.block.texts)
        allowed = 1 if piece and chunks > 1 else self.settings.deliveries_max
        if lease.deliveries <= allowed:
            return True
        if chunks == 1:
            tries = lease.deliveries - 1
            self._give_up(lease, f"the worker died or hung {tries} times while embedding it")
        else:
            log.warning("block %d of job %s failed; split", lease.block.start, lease.job)
            self.farm.job(lease.job).split(lease.entry, pieces(lease.block, PIECES))
        return False

    def _give_up(self, lease: Lease, reason: str) -> None:
        """Commit a block as failed."""
        engine = self.models.prepare(lease.job)
        if engine is not None:
            dtype = self.models.spec(lease.job).vector_dtype
            result = failure(lease, engine.dimensions, dtype, self.worker, reason)
            self.farm.job(lease.job).commit([(lease.entry, result)])

    # Getting ready.

    def _prepare(self, job: str, leases: Sequence[Lease], began: float) -> list[MicroBatch]:
        """One micro-batch of all that is healthy, and one for each block that failed before."""
        engine = self.models.prepare(job)
        if engine is None:
            return []
        if job not in self._begun:
            self.farm.job(job).begin()
            self._begun.add(job)
        healthy = [lease for lease in leases if not self._suspect(lease)]
        groups = ([healthy] if healthy else []) + [[s] for s in leases if self._suspect(s)]
        return [self._tokenise(job, engine, group, began) for group in groups]

    def _suspect(self, lease: Lease) -> bool:
        """Whether a block may bring the worker down, and so should go alone."""
        retried = lease.entry.stream == self.farm.job(lease.job).keys.retry
        return retried or lease.deliveries >= self.settings.deliveries_max

    def _tokenise(self, job: str, engine: Engine, leases: list[Lease], began: float) -> MicroBatch:
        texts = [text for lease in leases for text in lease.block.texts]
        started = time.monotonic()
        reasons: dict[int, str] = {}
        try:
            tokenised = engine.tokenise(texts)
        except Exception as error:  # noqa: BLE001 # a tokenizer may raise anything; the chunk pays
            log.warning("tokenising failed, trying texts one by one: %r", error)
            tokenised, reasons = _tokenise_each(engine, texts)
        self.tokenise_seconds += time.monotonic() - started
        spec = self.models.spec(job)
        return MicroBatch(job, spec, engine, leases, tokenised, reasons, began)


def pieces(block: Block, count: int) -> list[Block]:
    """`block` cut into about `count` blocks of consecutive chunks."""
    size = -(-len(block.texts) // count)
    return [
        Block(
            start=block.start + first,
            texts=block.texts[first : first + size],
            ids=None if block.ids is None else block.ids[first : first + size],
            token_count=-(-block.token_count // count),
        )
        for first in range(0, len(block.texts), size)
    ]


def _tokenise_each(engine: Engine, texts: Sequence[str]) -> tuple[Tokenised, dict[int, str]]:
    """All texts, with an empty one in place of each that cannot be tokenised."""
    reasons = {}
    kept = list(texts)
    for row, text in enumerate(texts):
        try:
            engine.tokenise([text])
        except Exception as error:  # noqa: BLE001 # as above
            reasons[row] = f"the tokenizer raised {type(error).__name__}: {error}"
            kept[row] = ""
    return engine.tokenise(kept), reasons


def _unreadable(job: str, entry: Entry, deliveries: int) -> Lease:
    """A lease on a block that cannot be decoded; its place is known from the stream ID."""
    start = int(entry.id.split("-")[0]) - 1
    return Lease(job, entry, Block(start=start, texts=[""] * entry.chunks), deliveries)


def _is_gone(error: Exception) -> bool:
    """Whether an error says that the job was deleted under us."""
    return isinstance(error, JobGone) or str(error).startswith("NOGROUP")
