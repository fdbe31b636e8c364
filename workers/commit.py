"""Third stage: results to the server, each block at once stored and acknowledged."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from numpy.typing import NDArray

from embedfarm.broker import persist
from embedfarm.farm import Farm, model_key
from embedfarm.records import Completion, Result
from embedfarm.settings import Settings
from workers.leases import Holdings, Lease, MicroBatch, is_gone
from workers.results import results_of

PIPELINE_BYTES: Final = 4 << 20  # results sent in one round trip

log = logging.getLogger(__name__)


@dataclass
class Committer:
    """Commits the results of one worker, and tells the scheduler how fast it is."""

    farm: Farm
    worker: str
    holdings: Holdings
    settings: Settings
    stop: threading.Event
    tokens_per_second: float = 0.0
    tokens_done: int = 0
    chunks_done: int = 0
    duplicates: int = 0
    commit_seconds: float = 0.0
    _last_end: float = 0.0

    def commit(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Store the results of all leases still ours; what is stored already does not change.

        Raises:
            redis.ConnectionError: The server stayed away, or `stop` was set while it was; the
                leases will expire.
        """
        began = time.monotonic()
        chunks = tokens = 0
        for group in _groups(results_of(batch, vectors, self.worker)):
            self._send(batch.job, group)
            chunks += sum(result.count for _, result in group)
            tokens += sum(lease.entry.tokens for lease, _ in group)
        self.holdings.remove(batch.leases)
        ended = time.monotonic()
        self.commit_seconds += ended - began
        if chunks:
            self._account(batch, chunks, tokens, ended)

    def _send(self, job: str, group: Sequence[tuple[Lease, Result]]) -> None:
        """One round trip, repeated while the server is away: a repeated commit is a duplicate."""
        handle = self.farm.job(job)
        pairs = [(lease.entry, result) for lease, result in group]
        try:
            answers = persist(
                lambda: handle.commit(pairs), self.stop, self.settings.reconnect_seconds_max
            )
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            log.info("job %s was deleted; %d results dropped", job, len(group))
        else:
            self.duplicates += answers.count("duplicate")

    def _account(self, batch: MicroBatch, chunks: int, tokens: int, ended: float) -> None:
        """Update the rate: tokens per second of the whole pipeline while it was busy."""
        seconds = max(1e-6, ended - max(self._last_end, batch.fetch_began))
        self._last_end = ended
        self.tokens_done += batch.real_tokens
        self.chunks_done += chunks
        weight = 1 - 0.5 ** (seconds / self.settings.rate_half_life_seconds)
        known = self.tokens_per_second or tokens / seconds
        self.tokens_per_second = known + weight * (tokens / seconds - known)
        completion = Completion(
            worker=self.worker,
            model=model_key(batch.spec),
            job=batch.job,
            chunks=chunks,
            tokens=tokens,
            padded_tokens=batch.padded_tokens,
            real_tokens=batch.real_tokens,
            seconds=seconds,
            overhead_seconds=max(0.0, seconds - batch.forward_seconds),
        )
        persist(
            lambda: self.farm.report(completion, self.settings.events_max),
            self.stop,
            self.settings.reconnect_seconds_max,
        )


def _groups(results: Iterable[tuple[Lease, Result]]) -> Iterator[list[tuple[Lease, Result]]]:
    """Runs of results of about `PIPELINE_BYTES` together."""
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
