"""The blocks of a job in its streams: leased, renewed, committed, split."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import redis

from embedfarm.contract import wire
from embedfarm.contract.broker import block_ms
from embedfarm.contract.encoding import encode
from embedfarm.contract.entries import Entry, Pending, read_entries, read_pending
from embedfarm.contract.job_handle import JobHandle
from embedfarm.contract.records import Block, Result
from embedfarm.contract.spending import MICRO
from embedfarm.contract.status import is_gone


@dataclass
class BlockStream(JobHandle):
    """The streams of one job: its blocks, and the pieces of blocks that failed.

    They deliver at least once and in no order. The commit script makes it once, the start index
    gives the order.
    """

    def read(self, worker: str, count: int) -> list[Entry]:
        """Lease up to `count` new entries of each stream; pieces of failed blocks come first.

        When the reply is lost, the entries are leased all the same: look into `pending`.
        """
        answer = self.client.xreadgroup(
            wire.GROUP, worker, {self.keys.retry: ">", self.keys.blocks: ">"}, count=count
        )
        streams = cast("Iterable[tuple[bytes, list[Any]]]", answer or [])
        return [
            entry for stream, items in streams for entry in read_entries(stream.decode(), items)
        ]

    def pending(
        self, stream: str, worker: str | None, count: int, idle_seconds: float = 0.0
    ) -> list[Pending]:
        """Return up to `count` leases on `stream`, of one worker or all, that were idle so long."""
        idle = int(idle_seconds * 1000) or None
        rows = self.client.xpending_range(stream, wire.GROUP, "-", "+", count, worker, idle)
        return read_pending(stream, cast("list[dict[str, Any]]", rows))

    def backlog(self) -> tuple[int, int]:
        """Return how many blocks are not leased, and how many are."""
        pipe = self.client.pipeline(transaction=False)
        for stream in (self.keys.blocks, self.keys.retry):
            pipe.xlen(stream)
            pipe.xpending(stream, wire.GROUP)
        blocks, blocks_held, retry, retry_held = pipe.execute()
        held = blocks_held["pending"] + retry_held["pending"]
        return max(0, blocks + retry - held), held

    def expired(self, stream: str, idle_seconds: float, count: int) -> list[Pending]:
        """Return up to `count` leases on `stream` that nobody renewed for `idle_seconds`."""
        return self.pending(stream, None, count, idle_seconds)

    def has_expired(self, idle_seconds: float) -> bool:
        """Tell whether the job has leases that nobody renewed for `idle_seconds`."""
        return any(
            self.expired(stream, idle_seconds, 1) for stream in (self.keys.retry, self.keys.blocks)
        )

    def wait_for_block(self, seconds: float) -> None:
        """Wait until a block is pushed, or for `seconds` (as `block_ms`); lease nothing."""
        self.client.xread(
            {self.keys.blocks: "$", self.keys.retry: "$"}, count=1, block=block_ms(seconds)
        )

    def begin(self) -> None:
        """Note the time of the first block read, as `begin` does."""
        begin(self.client, [self.id])

    def claim(
        self, stream: str, worker: str, ids: Sequence[str], idle_seconds: float
    ) -> list[Entry]:
        """Take over the worker's own leases, and any that nobody renewed for `idle_seconds`."""
        if not ids:
            return []
        items = self._script("claim")(keys=[stream], args=[worker, int(idle_seconds * 1000), *ids])
        # A script has no maps: names and values come in turn.
        return read_entries(
            stream,
            [(entry, dict(zip(f[::2], f[1::2], strict=True))) for entry, f in items],
        )

    def copies(self, ids: Sequence[str]) -> list[Entry]:
        """Return entries of the main stream, which others hold, for speculative copies."""
        pipe = self.client.pipeline(transaction=False)
        for each in ids:
            pipe.xrange(self.keys.blocks, each, each, count=1)
        return [
            entry for items in pipe.execute() for entry in read_entries(self.keys.blocks, items)
        ]

    def renew(self, stream: str, worker: str, ids: Sequence[str]) -> set[str]:
        """Renew leases and return the IDs that are no longer this worker's.

        For a cancelled job these are all of them, and the blocks that it held are deleted.
        """
        answer = self._script("renew")(keys=[stream, self.keys.meta], args=[worker, *ids])
        return {each.decode() for each in answer}

    def release(self, stream: str, worker: str, ids: Sequence[str]) -> None:
        """Hand leases back, for anyone to take at once."""
        self._script("release")(keys=[stream], args=[worker, *ids])

    def commit(self, results: Sequence[tuple[Entry, Result]]) -> list[str]:
        """Store results of this job, as `commit` does, whatever model made them."""
        return commit(self.client, [Commit(self.id, *each) for each in results])

    def split(self, entry: Entry, pieces: Sequence[Block], attempts: int = 0) -> str:
        """Replace a block by smaller ones on the retry stream, atomically.

        Args:
            entry: The leased block.
            pieces: Blocks that the block is split into.
            attempts: How often the block was tried.

        Returns:
            "split", or "duplicate" when the block was done already or the job was made anew.
        """
        words = [w for b in pieces for w in (encode(b), b.count, b.token_count, b.start)]
        answer = self._script("split")(
            keys=[entry.stream, self.keys.retry, self.keys.meta],
            args=[entry.id, len(entry.data), attempts, entry.generation, *words],
        )
        return str(answer, "ascii")

    def discard(self, entry: Entry) -> None:
        """Remove an entry that is no work of this job from its stream; nothing is counted."""
        self._script("discard")(keys=[entry.stream], args=[entry.id, entry.generation])


def begin(client: redis.Redis, jobs: Sequence[str]) -> None:
    """Note the time of the first block read of some jobs, once per job, in one pipeline."""
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    pipe = client.pipeline(transaction=False)
    note = client.register_script(wire.script("note"))
    for job in jobs:
        note(
            keys=[wire.JobKeys(job).meta],
            args=["HSETNX", "", "first_read_ms", now_ms],
            client=pipe,
        )
    pipe.execute()


def left_leases(
    client: redis.Redis, jobs: Sequence[str], worker: str, idle_seconds: float, count: int
) -> dict[str, list[Pending]]:
    """Return leases of a worker, and those that nobody renewed for so long, in one pipeline.

    Returns:
        Leases by job, those of pieces of failed blocks first, and at most `count` of each kind; one
        may be there twice. Jobs that are gone are left out.
    """
    pipe = client.pipeline(transaction=False)
    streams = [(job, stream) for job in jobs for stream in _streams(job)]
    for _, stream in streams:
        for whose, idle in ((worker, None), (None, int(idle_seconds * 1000) or None)):
            pipe.xpending_range(stream, wire.GROUP, "-", "+", count, whose, idle)
    answers = iter(pipe.execute(raise_on_error=False))
    found: dict[str, list[Pending]] = {}
    for (job, stream), own, expired in zip(streams, answers, answers, strict=True):
        for rows in (own, expired):
            if not isinstance(rows, Exception):
                found.setdefault(job, []).extend(read_pending(stream, rows))
            elif not is_gone(rows):
                raise rows
    return found


def _streams(job: str) -> tuple[str, str]:
    keys = wire.JobKeys(job)
    return keys.retry, keys.blocks


class Commit(NamedTuple):
    """A result that is to be stored, and what its maker agreed on with others.

    Attributes:
        job: Id of the job.
        entry: The leased block.
        result: What became of its chunks.
        fingerprint: Fingerprint of the model that made it, as `JobReports.agree` returned it; with
            b"" nobody asks which model that was.
        canaries: Digest of the job's canaries, as `JobReports.agree_on_canaries` has it; with ""
            nobody asks for them.
    """

    job: str
    entry: Entry
    result: Result
    fingerprint: bytes = b""
    canaries: str = ""


def commit(client: redis.Redis, commits: Sequence[Commit]) -> list[str]:
    """Store results and acknowledge their entries, in one pipeline.

    Each is stored atomically, and none depends on another, be it of the same job or not.

    Returns:
        For each result "committed", "duplicate" (somebody was first, or the job was made anew
        since; nothing changed), "cancelled", "gone" where the job was deleted, or "unsettled" where
        the job has another fingerprint, or other canaries or none: nothing changed, and the worker
        is to agree on them again.
    """
    pipe = client.pipeline(transaction=False)
    script = client.register_script(wire.script("commit"))
    for job, entry, result, fingerprint, canaries in commits:
        keys = wire.JobKeys(job)
        errors = [word for e in result.errors for word in (e.index, e.reason, e.attempts)]
        data = encode(result)
        script(
            keys=[entry.stream, keys.results, keys.meta, keys.failed, keys.result_wakeup],
            args=[
                entry.id,
                result.start,
                data,
                result.count,
                entry.tokens,
                len(entry.data),
                result.token_count,
                result.vector_bytes,
                entry.generation,
                result.worker,
                result.embedded,
                fingerprint,
                round(result.seconds * MICRO),
                round(result.cost * MICRO),
                canaries,
                _receipt_bytes(result, data),
                *errors,
            ],
            client=pipe,
        )
    return [_told(answer) for answer in pipe.execute(raise_on_error=False)]


def _receipt_bytes(result: Result, data: bytes) -> int:
    """Return the bytes that the server holds of each vector that is stored; 0 if it holds all."""
    return 0 if result.receipt is None else -(-len(data) // max(1, result.embedded))


def _told(answer: bytes | Exception) -> str:
    """Return the answer to a commit, "gone" for an error that says so.

    Raises:
        redis.RedisError: The answer is another error.
    """
    if not isinstance(answer, Exception):
        return str(answer, "ascii")
    if not is_gone(answer):
        raise answer
    return "gone"
