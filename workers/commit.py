"""Third stage: results to the server, each block at once stored and acknowledged."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray

from embedfarm.contract import tracing
from embedfarm.contract.broker import UNAVAILABLE, persist
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import model_key
from embedfarm.contract.records import Completion, Result
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import is_gone
from embedfarm.contract.usage import Account
from embedfarm.workers.cut_results import results_of
from embedfarm.workers.leases import Holdings, Lease, MicroBatch

ACCOUNTS_MAX: Final = 64  # jobs that this worker may come back to
PIPELINE_BYTES: Final = 4 << 20  # results sent in one round trip

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class Committer:
    """Commits the results of one worker, and tells the scheduler how fast it is."""

    farm: FarmClient
    worker: str
    holdings: Holdings
    settings: Settings
    stop: threading.Event
    incarnation: str
    device: str
    tokens_per_second: float = 0.0
    total: Account = field(default_factory=Account)
    # By job and generation.
    _accounts: OrderedDict[tuple[str, str], Account] = field(default_factory=OrderedDict)
    _last_end: float = 0.0

    def commit(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Store the results of all leases that are still held; a stored result does not change.

        Raises:
            redis.ConnectionError: The server stayed away, or `stop` was set while it was; the
                leases will expire.
        """
        began = time.monotonic()
        account = self._note(batch)
        chunks = tokens = duplicates = committed = 0
        for group in _groups(results_of(batch, vectors, self.worker)):
            answers = self._send(batch.job, group)
            duplicates += answers.count("duplicate")
            for answer, (_, result) in zip(answers, group, strict=True):
                committed += result.count if answer == "committed" else 0
            chunks += sum(result.count for _, result in group)
            tokens += sum(lease.entry.tokens for lease, _ in group)
        self.holdings.remove(batch.leases)
        ended = time.monotonic()
        for each in (account, self.total):
            each.chunks += committed
            each.duplicates += duplicates
            each.spend("commit", ended - began)
        if chunks:
            self._report(batch, chunks, tokens, ended)
        if tracing.enabled():
            self._trace(batch, chunks, began, ended)

    def _trace(self, batch: MicroBatch, chunks: int, began: float, ended: float) -> None:
        """Record traces of a micro-batch and of its three stages, below what submitted the job."""
        parent = self._persist(lambda: self.farm.job(batch.job).noted(tracing.NOTE))
        whole = tracing.record(
            "micro-batch", parent, batch.fetch_began, ended,
            job=batch.job, worker=self.worker, chunks=chunks, blocks=len(batch.leases),
            tokens=batch.account.real_tokens, padded_tokens=batch.account.padded_tokens,
            **{f"{name}_seconds": spent for name, spent in batch.account.seconds.items()},
        )  # fmt: skip
        forwarded = batch.forward_began + batch.forward_seconds
        tracing.record("fetch", whole, batch.fetch_began, batch.fetched)
        tracing.record("forward", whole, batch.forward_began, forwarded)
        tracing.record("commit", whole, began, ended)

    def _note(self, batch: MicroBatch) -> Account:
        """Note and return the job's account, before the results: with the last one it may end."""
        key = batch.making
        account = self._accounts.setdefault(key, Account(device=self.device))
        self._accounts.move_to_end(key)
        if len(self._accounts) > ACCOUNTS_MAX:
            self._accounts.popitem(last=False)
        batch.account.engine = f"{batch.engine.name} {batch.engine.fingerprint.get('dtype', '')}"
        batch.account.peak_flops_per_second = batch.engine.peak_flops_per_second
        account.add(batch.account)
        self.total.add(batch.account)
        self._persist(
            lambda: self.farm.reports.account(batch.job, self.worker, self.incarnation, account)
        )
        return account

    def _send(self, job: str, group: Sequence[tuple[Lease, Result]]) -> list[str]:
        """Commit in one round trip, repeated while the server is away: a repeat is a duplicate.

        Returns:
            What `BlockStream.commit` says of each result; "gone" where the job was deleted.
        """
        handle = self.farm.job(job)
        pairs = [(lease.entry, result) for lease, result in group]
        try:
            return self._persist(lambda: handle.stream.commit(pairs))
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            log.info("job %s was deleted; %d results dropped", job, len(group))
            return ["gone"] * len(group)

    def _persist(self, call: Callable[[], T]) -> T:
        """Make a call, again and again while the server is away."""
        return persist(call, self.stop, self.settings.reconnect_seconds_max)

    def _report(self, batch: MicroBatch, chunks: int, tokens: int, ended: float) -> None:
        """Update the rate: tokens per second of the whole pipeline while it was busy."""
        spent = batch.account.seconds
        # What is done once a job, and what others asked for, is no part of its speed.
        aside = spent.get("check", 0.0) + spent.get("lane", 0.0)
        seconds = max(1e-6, ended - max(self._last_end, batch.fetch_began) - aside)
        first, self._last_end = not self._last_end, ended
        weight = 1 - 0.5 ** (seconds / self.settings.rate_half_life_seconds)
        known = self.tokens_per_second or tokens / seconds
        self.tokens_per_second = known + weight * (tokens / seconds - known)
        lengths = batch.tokenised.text_lengths.astype(np.float64)
        part = tokens / max(1, sum(lease.entry.tokens for lease in batch.leases))
        completion = Completion(
            worker=self.worker,
            model=model_key(batch.spec),
            job=batch.job,
            chunks=chunks,
            tokens=tokens,
            padded_tokens=batch.account.padded_tokens,
            real_tokens=batch.account.real_tokens,
            seconds=seconds,
            overhead_seconds=max(0.0, seconds - batch.forward_seconds),
            pairs=int(part * (lengths @ lengths)),
            first=first,
        )
        try:
            self.farm.statistics.report(completion, self.settings.events_max)
        except UNAVAILABLE as error:  # statistics are not waited for: the next results go on
            log.warning("micro-batch not reported, server away: %s", error)


def _groups(results: Iterable[tuple[Lease, Result]]) -> Iterator[list[tuple[Lease, Result]]]:
    """Yield runs of results of about `PIPELINE_BYTES` together."""
    group: list[tuple[Lease, Result]] = []
    size = 0
    for lease, result in results:
        group.append((lease, result))
        size += len(result.vectors)
        if size >= PIPELINE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
