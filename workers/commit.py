"""Third stage: results to the server, each block at once stored and acknowledged."""

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract import block_stream, tracing
from embedfarm.contract.block_stream import Commit
from embedfarm.contract.broker import UNAVAILABLE, persist
from embedfarm.contract.canaries import Canaries
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import model_key
from embedfarm.contract.records import Completion, Result
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.contract.usage import Account
from embedfarm.workers.cut_results import results_of
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.leases import Holdings, JobPart, Lease, Making, MicroBatch
from embedfarm.workers.result_storage import PartFile, ResultStorage, StorageGone

ACCOUNTS_MAX: Final = 1000  # jobs that this worker may come back to
RATES_MAX: Final = 64  # models, the last ones
PIPELINE_BYTES: Final = 4 << 20  # results sent in one round trip
# Answers to a first call after which there is no receipt.
NOT_KEPT: Final = frozenset({"cancelled", "gone", "duplicate"})
CACHED_SHARE_MAX: Final = 0.5  # of the first tokens by which a worker knows its speed

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class Committer:
    """Commits the results of one worker, and tells the scheduler how fast it is.

    Attributes:
        devices: Number of devices that the worker has as one.
        agree_again: Agrees once more with a job's other workers on the engine that has embedded
            chunks of it; returns the fingerprint, or nothing where they have another.
        refuse: Leaves a job to others, for a reason.
        measured: Set once the worker knows how fast it is.
    """

    farm: FarmClient
    worker: str
    holdings: Holdings
    settings: Settings
    stop: threading.Event
    incarnation: str
    device: str
    devices: int = 1
    agree_again: Callable[[str, str, Engine], bytes] = lambda _job, _generation, _engine: b""
    refuse: Callable[[str, str], None] = lambda _job, _reason: None
    tokens_per_second: float = 0.0
    measured: threading.Event = field(default_factory=threading.Event)
    total: Account = field(default_factory=Account)
    _accounts: OrderedDict[Making, Account] = field(default_factory=OrderedDict)
    _canaries: OrderedDict[Making, tuple[Canaries, str]] = field(default_factory=OrderedDict)
    _rates: dict[str, float] = field(default_factory=dict)  # by `model_key`
    _last_end: float = 0.0
    _storage: ResultStorage = field(init=False)

    def __post_init__(self) -> None:
        self._storage = ResultStorage(self.stop, self._say)

    def rate(self, model: str) -> float:
        """Return the tokens per second done lately for a model, 0 if unknown."""
        return self._rates.get(model, 0.0)

    def commit(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Store the results of all leases that are still held; a stored result does not change.

        Raises:
            redis.ConnectionError: The server stayed away, or `stop` was set while it was; the
                leases will expire.
        """
        began = time.monotonic()
        self._agree_on_canaries(batch)
        accounts = self._note(batch)
        done: Counter[str] = Counter()  # chunks by job
        tokens = 0
        price = self.settings.device_cost_per_hour
        files = self._put(batch, vectors)
        answered: defaultdict[Making, set[str]] = defaultdict(set)
        results = results_of(batch, vectors, self.worker, self.devices, price, files)
        for group in _groups(results):
            answers, repeated = self._send(group, batch)
            for answer, (lease, result) in zip(answers, group, strict=True):
                answered[lease.making].add("" if repeated else answer)
                for each in (accounts[lease.making], self.total):
                    each.duplicates += answer == "duplicate"
                    each.chunks += result.embedded if answer == "committed" else 0
                done[lease.job] += result.embedded
                tokens += lease.entry.tokens
        self.holdings.remove(batch.leases)
        for making, file in files.items():
            if answered[making] <= NOT_KEPT and self._is_over(making[0]):
                self._storage.take_back(file)
        ended = time.monotonic()
        self.total.spend("commit", ended - began)
        for part in batch.parts:
            share = len(part.leases) / len(batch.leases)
            accounts[part.making].spend("commit", share * (ended - began))
        if tokens:
            self._report(batch, done, tokens, ended)
        if tracing.enabled():
            for part in batch.parts:
                self._trace(batch, part, done[part.job], (began, ended))

    def _put(self, batch: MicroBatch, vectors: NDArray[Any]) -> dict[Making, PartFile]:
        """Store the vectors of the jobs that want it, so that only receipts are committed.

        Leases of a job whose vectors cannot be stored are given up: where its place is not to be
        had here, for others to take.
        """
        files: dict[Making, PartFile] = {}
        for part in batch.parts:
            if part.leases[0].stored and not part.lost:
                try:
                    file = self._storage.put(part, vectors)
                except StorageGone as error:
                    if not self._is_over(part.job):
                        self._give_back(part, f"its vectors cannot be stored: {error}")
                    file = None
                if file is not None:
                    files[part.making] = file
                    continue
                for lease in part.leases:
                    lease.lost = True
        return files

    def _is_over(self, job: str) -> bool:
        """Tell whether a job has ended, so that nobody keeps a place for its vectors."""
        try:
            return self._persist(self.farm.job(job).status).over
        except JobGone:
            return True

    def _say(self, job: str, reason: str) -> None:
        """Note with a job what it waits for, if the server is there."""
        with contextlib.suppress(*UNAVAILABLE):
            self.farm.job(job).note("reason", reason)

    def _agree_on_canaries(self, batch: MicroBatch) -> None:
        """See that the engine makes the vectors that the jobs' other workers make.

        Leases of a job whose canaries are others go back untouched, and others embed it. With a
        job that this was agreed on, each commit asks whether the server has it still.

        Raises:
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        canaries = batch.canaries
        if canaries is None:
            return
        parts = {part.making: part for part in batch.parts}
        asked = [making for making in parts if not self._canaries_digest(making, batch)]
        if not asked:
            return
        found = self._persist(
            lambda: self.farm.reports.agree_on_canaries(asked, canaries, batch.dtype)
        )
        for making, (difference, digest) in found.items():
            if difference:
                reason = f"this worker makes other vectors than the job has: {difference}"
                self._give_back(parts[making], reason)
                continue
            self._canaries[making] = canaries, digest
            while len(self._canaries) > ACCOUNTS_MAX:
                self._canaries.popitem(last=False)

    def _canaries_digest(self, making: Making, batch: MicroBatch) -> str:
        """Return the digest of a job's canaries, with which those of the engine agreed, or ""."""
        canaries, digest = self._canaries.get(making, (None, ""))
        return digest if canaries is batch.canaries else ""

    def _give_back(self, part: JobPart, reason: str) -> None:
        """Refuse a job, and hand back what was leased of it: nobody has tried that."""
        self._persist(lambda: self.refuse(part.job, reason))
        stream = self.farm.job(part.job).stream
        for lease in part.leases:
            lease.lost = True
            if not lease.copied:
                entry = lease.entry
                self._persist(partial(stream.release, entry.stream, self.worker, [entry.id]))

    def _trace(
        self, batch: MicroBatch, part: JobPart, chunks: int, committed: tuple[float, float]
    ) -> None:
        """Record traces of a job's part of a micro-batch and its stages, below what submitted it.

        Args:
            batch: The micro-batch.
            part: The job's part.
            chunks: Chunks of it for which there were results.
            committed: Monotonic times at which committing began and ended.
        """
        began, ended = committed
        parent = self._persist(lambda: self.farm.job(part.job).noted(tracing.NOTE))
        whole = tracing.record(
            "micro-batch", parent, batch.fetch_began, ended,
            job=part.job, worker=self.worker, chunks=chunks, blocks=len(part.leases),
            tokens=part.account.real_tokens, padded_tokens=part.account.padded_tokens,
            **{f"{name}_seconds": spent for name, spent in part.account.seconds.items()},
        )  # fmt: skip
        forwarded = batch.forward_began + batch.forward_seconds
        tracing.record("fetch", whole, batch.fetch_began, batch.fetched)
        tracing.record("forward", whole, batch.forward_began, forwarded)
        tracing.record("commit", whole, began, ended)

    def _note(self, batch: MicroBatch) -> dict[Making, Account]:
        """Note and return the jobs' accounts, before results: with its last one a job may end."""
        engine = batch.engine
        batch.account.engine = f"{engine.name} {batch.dtype}"
        batch.account.peak_flops_per_second = engine.peak_flops_per_second
        self.total.add(batch.account)
        batch.share_account()
        noted = {}
        for part in batch.parts:
            account = self._accounts.setdefault(part.making, Account(device=self.device))
            self._accounts.move_to_end(part.making)
            account.add(part.account)
            noted[part.making] = account
        while len(self._accounts) > ACCOUNTS_MAX:
            self._accounts.popitem(last=False)
        self._persist(lambda: self.farm.reports.account(self.worker, self.incarnation, noted))
        return noted

    def _send(
        self, group: Sequence[tuple[Lease, Result]], batch: MicroBatch
    ) -> tuple[list[str], bool]:
        """Commit in one round trip, repeated while the server is away: a repeat is a duplicate.

        Returns:
            What `block_stream.commit` says of each result, and whether it was called more than
            once, so that an earlier call, whose answer was lost, may have stored the results.
        """
        answers, repeated = self._store(group, batch)
        unsettled = [place for place, answer in enumerate(answers) if answer == "unsettled"]
        settled = [place for place in unsettled if self._settle(group[place][0], batch)]
        if settled:
            again, once_more = self._store([group[place] for place in settled], batch)
            repeated = repeated or once_more
            for place, answer in zip(settled, again, strict=True):
                answers[place] = answer
        pairs = zip(group, answers, strict=True)
        gone = Counter(lease.job for (lease, _), answer in pairs if answer == "gone")
        for job, count in gone.items():
            log.info("job %s was deleted; %d results dropped", job, count)
        return answers, repeated

    def _store(
        self, group: Sequence[tuple[Lease, Result]], batch: MicroBatch
    ) -> tuple[list[str], bool]:
        """Commit in one round trip, which may be repeated; return what `_send` does."""
        commits = [
            Commit(
                lease.job, lease.entry, result, lease.agreed,
                self._canaries_digest(lease.making, batch),
            )
            for lease, result in group
        ]  # fmt: skip
        calls = 0

        def call() -> list[str]:
            nonlocal calls
            calls += 1
            return block_stream.commit(self.farm.client, commits)

        answers = self._persist(call)
        return answers, calls > 1

    def _settle(self, lease: Lease, batch: MicroBatch) -> bool:
        """Agree once more on the engine of a lease; without it the lease is left to others."""
        self._canaries.pop(lease.making, None)
        job, generation = lease.making
        lease.agreed = self._persist(lambda: self.agree_again(job, generation, batch.engine))
        self._agree_on_canaries(batch)
        return bool(lease.agreed) and not lease.lost

    def _persist(self, call: Callable[[], T]) -> T:
        """Make a call, again and again while the server is away."""
        return persist(call, self.stop, self.settings.reconnect_seconds_max)

    def _report(
        self, batch: MicroBatch, done: Mapping[str, int], tokens: int, ended: float
    ) -> None:
        """Update the rate: tokens per second of the whole pipeline while it was busy."""
        spent = batch.account.seconds
        # What is done once a job, and what others asked for, is no part of its speed.
        aside = spent.get("check", 0.0) + spent.get("lane", 0.0)
        seconds = max(1e-6, ended - max(self._last_end, batch.fetch_began) - aside)
        first, self._last_end = not self._last_end, ended
        overhead_seconds = max(0.0, seconds - batch.forward_seconds)
        model = model_key(batch.spec)
        # What was in the cache is no speed. It counts as the time that the device would have taken,
        # which a worker does not know before it has embedded something.
        if batch.cached is not None:
            seconds = max(seconds, batch.forward_seconds + batch.cached.spared_seconds)
        if batch.cached_share <= CACHED_SHARE_MAX or model in self._rates:
            self._learn(model, tokens / seconds, seconds)
        else:
            tokens = 0
        lengths = batch.tokenised.text_lengths.astype(np.float64)
        part = tokens / max(1, sum(lease.entry.tokens for lease in batch.leases))
        jobs = {
            each.job: (each.account.real_tokens, done[each.job])
            for each in batch.parts
            if each.job in done
        }
        completion = Completion(
            worker=self.worker,
            model=model,
            job=next(iter(done)),
            chunks=sum(done.values()),
            tokens=tokens,
            padded_tokens=batch.account.padded_tokens,
            real_tokens=batch.account.real_tokens,
            seconds=seconds,
            overhead_seconds=overhead_seconds,
            pairs=int(part * (lengths @ lengths)),
            first=first,
            jobs=jobs if len(jobs) > 1 else {},
        )
        try:
            self.farm.statistics.report(completion, self.settings.events_max)
        except UNAVAILABLE as error:  # statistics are not waited for: the next results go on
            log.warning("micro-batch not reported, server away: %s", error)

    def _learn(self, model: str, rate: float, seconds: float) -> None:
        """Take the rate of so many seconds into the average of a model."""
        weight = 1 - 0.5 ** (seconds / self.settings.rate_half_life_seconds)
        known = self._rates.pop(model, rate) or rate
        self.tokens_per_second = self._rates[model] = known + weight * (rate - known)
        self.measured.set()
        if len(self._rates) > RATES_MAX:
            del self._rates[next(iter(self._rates))]


def _groups(results: Iterable[tuple[Lease, Result]]) -> Iterator[list[tuple[Lease, Result]]]:
    """Yield runs of results of about `PIPELINE_BYTES` together."""
    group: list[tuple[Lease, Result]] = []
    size = 0
    for lease, result in results:
        group.append((lease, result))
        size += len(result.vectors) + len(result.checksums)
        if size >= PIPELINE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
