"""First stage: lease blocks as the plan says, rescue what others left, tokenise."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, takewhile
from types import MappingProxyType
from typing import Final

import redis

from embedfarm.contract import block_stream
from embedfarm.contract.broker import BLOCK_SECONDS_MAX, UNAVAILABLE
from embedfarm.contract.encoding import ForeignVersion, RecordError
from embedfarm.contract.entries import Entry, Pending
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import JobShare
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, is_gone
from embedfarm.contract.stored_results import StorageRefused
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.job_engines import JOBS_MAX, JobEngines, reason_of
from embedfarm.workers.leased_blocks import read_block
from embedfarm.workers.leases import Holdings, Lease, MicroBatch
from embedfarm.workers.own_shares import own_shares
from embedfarm.workers.source_texts import SourceRefused, read_texts
from embedfarm.workers.texts import tokenise
from embedfarm.workers.tries import Tries

IDLE_SECONDS: Final = 0.25  # an idle worker looks for expired leases this often
YIELD_SECONDS: Final = 0.05  # until requests in hand have ended as well
SHARED_SECONDS: Final = 0.25  # of work that jobs share at most
JOINED_MAX: Final = 63  # jobs beside the first of a micro-batch
PENDING_MAX: Final = 1024  # leases looked at in one go: more than a worker holds

log = logging.getLogger(__name__)


@dataclass
class Fetcher:
    """Leases work for one worker and makes it ready for the device.

    Attributes:
        own_rate: Returns the tokens per second that the worker did lately, by `model_key`.
        look_for_requests: Has models loaded that requests wait for; tells whether what is held has
            to end first.
    """

    farm: FarmClient
    worker: str
    holdings: Holdings
    engines: JobEngines
    settings: Settings
    stop: threading.Event
    own_rate: Callable[[str], float] = lambda _model: 0.0
    look_for_requests: Callable[[], bool] = lambda: False
    tries: Tries = field(init=False)
    _alone: bool = False
    _yields: bool = False
    _rescue_at: dict[str, float] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tries = Tries(self.farm, self.worker, self.holdings, self.engines, self.settings)

    def look(self) -> None:
        """Look for models that people or requests want; lease nothing while work is in the way.

        Raises:
            redis.ConnectionError: The server is away.
        """
        self.engines.models.follow_orders()
        self.engines.models.forget_loads()
        self._yields = self.look_for_requests()

    def fetch(self) -> MicroBatch | None:
        """Fetch the next micro-batch, None after a short wait in which none came.

        Raises:
            redis.ConnectionError: The server is away; call `recover` when it is back.
        """
        if (self._alone or self._yields) and not self.holdings.wait_empty(IDLE_SECONDS):
            return None
        if self._yields:
            self.stop.wait(YIELD_SECONDS)
            return None
        self._alone = False
        self.engines.models.room.unload_idle()
        plan = [share for share in self._shares() if not self.engines.refused(share.job)]
        shares = [share for share in plan if not share.ahead]
        self._load_ahead([share.job for share in plan if share.ahead], shares)
        shares.sort(key=lambda share: self.engines.ever_refused(share.job))
        # What nobody renews comes before what is new of other jobs, which may never end. Where some
        # jobs have such blocks the plan decides: they may need models of which only one has room.
        found = self._stranded([each.job for each in shares if self._may_rescue(each.job)])
        order = sorted(shares, key=lambda share: share.job not in found)
        for place, share in enumerate(order, start=1):
            batch = None
            with self._unless_gone(share.job):
                batch = self._fetch(share, order[place:])
            if batch is not None or self._alone:
                return batch
        self._wait(shares)
        return None

    @contextmanager
    def _unless_gone(self, job: str) -> Iterator[None]:
        """Let the body end, and forget the job, where that was deleted or made anew."""
        try:
            yield
        except (JobGone, redis.ResponseError) as error:
            if not is_gone(error):
                raise
            self.engines.forget(job)
            self._begun.discard(job)

    def wake(self) -> None:
        """End the wait for a plan, as far as the server lets us; any thread may call it."""
        try:
            self.farm.plans.wake(self.worker)
        except (*UNAVAILABLE, redis.exceptions.NoPermissionError) as error:
            log.warning("the wait for a plan goes on: %s", error)

    def recover(self) -> None:
        """Look for leases that a lost reply stranded, and for loads that are counted again."""
        self._rescue_at.clear()
        self.engines.models.recover()

    def _fetch(self, share: JobShare, others: Sequence[JobShare]) -> MicroBatch | None:
        """Fetch a micro-batch of a job, and perhaps others; to load a model may take minutes."""
        job = self.farm.job(share.job)
        if self.engines.needs_load(job.id) and not self._may_load(job):
            return None
        engine = self.engines.prepare(job.id)
        if engine is None or self.stop.is_set():
            return None
        began = time.monotonic()
        leases = self._choose(job, self._lease(job, share))
        if not leases:
            return None
        self._begin({job.id})
        leases += self._join(engine, leases, share.priority, others)
        # Not sooner: what an error above leaves behind must look stranded, or nobody rescues it.
        self.holdings.add(leases)
        return self._tokenise(engine, leases, began)

    def _begin(self, jobs: AbstractSet[str]) -> None:
        """Note that jobs have begun."""
        new = jobs - self._begun
        if new:
            block_stream.begin(self.farm.client, sorted(new))
            if len(self._begun) + len(new) > JOBS_MAX:
                self._begun.clear()  # to begin once more changes nothing
            self._begun |= new

    def _join(
        self, engine: Engine, first: Sequence[Lease], priority: int, others: Iterable[JobShare]
    ) -> list[Lease]:
        """Lease blocks of further jobs, to be embedded with those of the first one.

        Jobs are joined as long as all of it is done in a moment, at the rate that this worker has
        for them; those who have another model wait for their turn. Who is more urgent than others
        does not wait for them, and blocks that were tried before are none of them.
        """
        room = SHARED_SECONDS * self._rate(first[0].job) - sum(each.entry.tokens for each in first)
        joined: list[Lease] = []
        if self._alone or any(each.deliveries > 1 or each.copied for each in first):
            return joined
        try:
            for share in self._company(engine, first[0].job, room, priority, others):
                if share.tokens > room or self._alone:
                    break
                with self._unless_gone(share.job):
                    taken = self._take_new(share, engine)
                    joined += taken
                    room -= sum(each.entry.tokens for each in taken)
            self._begin({each.job for each in joined})
        except UNAVAILABLE as error:
            log.warning("no more jobs joined, server away: %s", error)
            self.recover()
        return joined

    def _company(
        self, engine: Engine, first: str, room: float, priority: int, others: Iterable[JobShare]
    ) -> list[JobShare]:
        """List jobs that are likely to be joined to the first one, in order."""
        few = list(islice((each for each in others if each.job != first), JOINED_MAX))
        sums = accumulate(each.tokens for each in few)
        fitting = takewhile(
            lambda pair: pair[0].priority == priority and pair[1] <= room,
            zip(few, sums, strict=True),
        )
        likely = [each for each, _ in fitting]
        known = self.engines.meet([each.job for each in likely])
        alike = [s for s in likely if s.job in known and self.engines.alike(s.job, first)]
        self.engines.agree_together([each.job for each in alike], engine)
        return alike

    def _take_new(self, share: JobShare, engine: Engine) -> list[Lease]:
        """Lease new blocks of a job, if they are embedded and stored like those of the first."""
        if self.engines.prepare(share.job) is not engine:
            return []
        job = self.farm.job(share.job)
        leases = self._open(job.id, job.stream.read(self.worker, share.blocks))
        return self._choose(job, leases, beside=True)

    def _may_load(self, job: Job) -> bool:
        """Tell whether to load the model of a job at once: only as long as there is no other.

        If it has work, the model is loaded beside the others, which are at work meanwhile. Where it
        does not fit beside those that are needed for what is held, nothing more is leased until
        that is done.
        """
        if not self.engines.models.has_any:
            return True
        if self._has_work(job) and not self.engines.load_beside(job.id):
            self._alone = not self.holdings.wait_empty(0)
        return False

    def _load_ahead(self, jobs: Sequence[str], shares: Sequence[JobShare]) -> None:
        """Have models loaded before their turn, where there is room beside those of the shares."""
        for job in jobs:
            with self._unless_gone(job):
                if self.engines.models.has_any and self.engines.needs_load(job):
                    known = self.engines.meet([share.job for share in shares])
                    self.engines.load_beside(job, set(map(self.engines.key, known)))

    def _choose(self, job: Job, leases: Sequence[Lease], *, beside: bool = False) -> list[Lease]:
        """Choose the healthy leases, else one possible poison message if nothing else is held.

        With `beside`, something else is leased already.

        The rest is handed back, so that each delivery of such a block means that it was tried:
        beside one that kills the worker, the others would be counted out with it.
        """
        poisonous = [lease for lease in leases if self.tries.may_be_poison(lease)]
        if not poisonous:
            return list(leases)
        self._alone = True
        chosen = [lease for lease in leases if lease not in poisonous]
        if not chosen and not beside and self.holdings.wait_empty(0):
            chosen = poisonous[:1]
        for lease in leases:
            if lease not in chosen:
                job.stream.release(lease.entry.stream, self.worker, [lease.entry.id])
        return chosen

    # What to work on.

    def _shares(self) -> Sequence[JobShare]:
        """Return the plan's shares; without a plan half of what is there, at our own last rate."""
        plan = self.farm.plans.plan(self.worker)
        if plan is not None:
            return plan.shares
        return list(own_shares(self.farm, self.settings, self._rate))

    def _rate(self, job: str) -> float:
        """Return the tokens per second that the worker did lately for such a job, 0 if unknown."""
        try:
            return self.own_rate(model_key(self.engines.spec(job)))
        except RecordError:
            return 0.0  # `prepare` refuses it

    def _has_work(self, job: Job) -> bool:
        """Tell whether a job has blocks that nobody works on: worth loading its model."""
        waiting, held = job.stream.backlog()
        return waiting > 0 or (held > 0 and job.stream.has_expired(self.settings.lease_seconds))

    def _wait(self, shares: Sequence[JobShare]) -> None:
        """Wait for the next block of a job that grows, else for news from the scheduler."""
        growing = next((share.job for share in shares if share.open), None)
        if growing is not None:
            self.farm.job(growing).stream.wait_for_block(IDLE_SECONDS)
        else:
            seconds = IDLE_SECONDS if shares else BLOCK_SECONDS_MAX / 2
            self.farm.plans.wait_for_plan(self.worker, seconds)

    # Leasing.

    def _lease(self, job: Job, share: JobShare) -> list[Lease]:
        """Lease blocks: expired leases first, then new blocks, then copies at the tail."""
        leases = []
        if self._may_rescue(job.id):
            leases = self._rescue(job, share.blocks)
        if not leases:
            leases = self._open(job.id, job.stream.read(self.worker, share.blocks))
        if not leases and self.holdings.wait_empty(0):
            leases = self._rescue(job, share.blocks) or self._copy(job, share.copies)
        return leases

    def _rescue(self, job: Job, count: int) -> list[Lease]:
        """Take over leases that nobody renews."""
        stream, found = self._stranded([job.id]).get(job.id, ("", {}))
        return self._claim(job, stream, dict(islice(found.items(), count))) if found else []

    def _may_rescue(self, job: str) -> bool:
        """Tell whether it is time to look for leases of a job that nobody renews."""
        return time.monotonic() >= self._rescue_at.get(job, 0.0)

    def _stranded(self, jobs: Sequence[str]) -> dict[str, tuple[str, dict[str, Pending]]]:
        """Find leases that nobody renewed, and our own that a lost reply or a crash stranded.

        Returns:
            By job the stream that they are of, and the leases by ID of the entry; jobs without any
            are not looked at again for a third of a lease.
        """
        seconds, stranded = self.settings.lease_seconds, {}
        left = block_stream.left_leases(self.farm.client, jobs, self.worker, seconds, PENDING_MAX)
        for job, rows in left.items():
            found = [row for row in rows if not self.holdings.holds(row.stream, row.id)]
            if found:
                stream = found[0].stream
                stranded[job] = stream, {row.id: row for row in found if row.stream == stream}
                continue
            if len(self._rescue_at) >= JOBS_MAX:
                self._rescue_at.clear()  # to look too early costs a round trip
            self._rescue_at[job] = time.monotonic() + seconds / 3
        return stranded

    def _claim(self, job: Job, stream: str, found: Mapping[str, Pending]) -> list[Lease]:
        """Lease pending entries by ID, each unless somebody else was quicker."""
        entries = job.stream.claim(stream, self.worker, list(found), self.settings.lease_seconds)
        leases = self._open(job.id, entries, {e.id: found[e.id].deliveries for e in entries})
        if leases:
            log.info("rescued %d blocks of job %s", len(leases), job.id)
        return leases

    def _copy(self, job: Job, ids: Sequence[str]) -> list[Lease]:
        """Make speculative copies of blocks that others hold."""
        wanted = [each for each in ids if not self.holdings.holds(job.keys.blocks, each)]
        return self._open(job.id, job.stream.copies(wanted), copied=True) if wanted else []

    def _open(
        self,
        job: str,
        entries: Sequence[Entry],
        deliveries: Mapping[str, int] = MappingProxyType({}),
        *,
        copied: bool = False,
    ) -> list[Lease]:
        """Decode entries; put aside or split those that cannot be read or were tried too often.

        All are handed back, for other workers, where one is of another version, or where the texts
        that they refer to cannot be read here.
        """
        leases = []
        try:
            for entry in self._current(job, entries):
                tries = deliveries.get(entry.id, 0) + 1
                try:
                    block, key = read_block(job, entry), self.engines.key(job)
                    agreed, stored = self.engines.agreed(job), self.engines.spec(job).stored
                    lease = Lease(
                        job, entry, block, tries, copied, engine=key, agreed=agreed, stored=stored
                    )
                    leases.append(lease)
                except ForeignVersion:
                    raise
                except RecordError as error:
                    self.tries.put_aside(job, entry, tries, str(error))
            read_texts(leases, self.settings.source_roots, self.stop)
        except (ForeignVersion, ModelError, SourceRefused, StorageRefused) as error:
            self.engines.refuse(job, reason_of(error))
            self._release(job, entries)
            return []
        return [lease for lease in leases if self.tries.may_try(lease)]

    def _current(self, job: str, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries of the generation whose model was looked at; discard those of others.

        Raises:
            JobGone: The job was made anew since; all are handed back, and it is looked at afresh.
        """
        current = []
        for entry in entries:
            if self.engines.knows(job, entry.generation):
                current.append(entry)
            elif self.engines.knows(job, entry.generation):  # as the server has it now
                self._release(job, entries)
                raise JobGone(f"job {job} was made anew")
            else:
                other = "entry %s of %s is no block of the job: another generation"
                log.error(other, entry.id, entry.stream)
                self.farm.job(job).stream.discard(entry)
        return current

    def _release(self, job: str, entries: Sequence[Entry]) -> None:
        """Hand entries back that were not tried."""
        for entry in entries:
            self.farm.job(job).stream.release(entry.stream, self.worker, [entry.id])

    def _tokenise(self, engine: Engine, leases: list[Lease], began: float) -> MicroBatch:
        chunks = list(chain.from_iterable(lease.block.chunks() for lease in leases))
        started = time.monotonic()
        watchdog = self.engines.models.watchdog
        with watchdog.watch("the tokenizer", lambda: watchdog.bound(0.0), leases):
            tokenised, reasons = tokenise(engine, chunks)
        spec = self.engines.spec(leases[0].job)
        batch = MicroBatch(spec, engine, leases, tokenised, reasons, began)
        batch.fetched = time.monotonic()
        batch.account.spend("tokenise", batch.fetched - started)
        return batch
