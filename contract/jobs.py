"""One job on the server: create, push, lease, renew, commit, split, drain, delete.

The stream delivers at least once and in no order. The commit script makes it once, the start index
gives the order, and only the collector, which sees that ranges tile [0, N), calls a job complete.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import redis
from redis.commands.core import Script

from embedfarm.contract import wire
from embedfarm.contract.broker import block_ms, if_room
from embedfarm.contract.entries import Entry, Pending, read_entries, read_number
from embedfarm.contract.records import Block, ChunkError, JobSpec, Result, decode, encode
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.contract.status import JobGone, JobStatus, status_from

FAILURES_KEPT: Final = 100
NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})


class ChangeRefused(RuntimeError):
    """Raised when a job to be paused or resumed has ended; the message says how it ended."""


class BlocksLost(redis.ConnectionError):
    """Raised when the server came back without blocks that it had taken: they must be sent again.

    This is a connection error, because often it is the only sign of an outage: the client replaces
    an idle connection without a word. So `persist` recovers from both in the same way.
    """


class JobTaken(RuntimeError):
    """Raised when the job of that name fills another output; that job is left alone."""


@dataclass
class Job:
    """A handle on one job, which holds no state of its own.

    Attributes:
        client: Client of the server.
        id: Name of the job.
        owner: Owner of the output that the job fills. A job that another owner has made under the
            same name since is as if it were gone. "" acts for any owner.
    """

    client: redis.Redis
    id: str
    owner: str = ""
    keys: wire.JobKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = wire.JobKeys(self.id)

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    def create(
        self,
        spec: JobSpec,
        start: int,
        terms: Terms = USUAL,
        notes: Mapping[str, str] = NO_NOTES,
    ) -> str:
        """Make the job, to be filled from chunk `start` on; a second call changes nothing.

        If the `pushed_upto` of an existing job is below `start`, it is moved there. A job that has
        ended begins anew. `Farm.admit` checks how many jobs there may be; this method does not.

        Args:
            spec: Specification of the job.
            start: First chunk that is still wanted.
            terms: Terms on which the job is done.
            notes: Fields that are kept with the job: `out` of its status, and "command".

        Returns:
            The job's state.

        Raises:
            JobTaken: A job of this name exists already, and fills another output.
        """
        now = time.time()
        keys = self.keys
        noted = {**asdict(terms), **notes, **({"owner": self.owner} if self.owner else {})}
        state = self._script("create")(
            keys=[keys.blocks, keys.retry, keys.meta, keys.failed, keys.results],
            args=[encode(spec), start, int(now * 1000), *_pairs(noted)],
        )
        if state == b"taken":
            other = self.noted("out") or "unnamed"
            raise JobTaken(
                f"job {self.id} fills another output: {other}; choose another id, or, if that one "
                f"is gone, remove the job: embedfarm jobs rm {self.id} --force"
            )
        self.list_again()
        self.announce()
        return str(state, "ascii")

    def list_again(self) -> None:
        """Put the job on the list of unfinished jobs, if it is not there.

        The lists lie in another cluster slot than the job, so that whoever ended or deleted an
        earlier job of its name may take this one off the list. Who waits for a job calls this now
        and then, while the job goes on.
        """
        self.client.zrem(wire.ENDED, self.id)
        self.client.zadd(wire.JOBS, {self.id: time.time()}, nx=True)

    def announce(self) -> None:
        """Wake the scheduler, and workers that have no job, with an event about this job."""
        with if_room():
            self.client.xadd(wire.EVENTS, {"job": self.id}, maxlen=4096, approximate=True)

    def spec(self) -> JobSpec:
        """Return the job's specification.

        Raises:
            JobGone: There is no such job.
        """
        return self.identity()[0]

    def identity(self) -> tuple[JobSpec, str]:
        """Return the job's specification and generation; while that stays, so do spec and texts.

        Raises:
            JobGone: There is no such job.
        """
        fields = cast("list[bytes | None]", self.client.hmget(self.keys.meta, "spec", "generation"))
        data, generation = fields
        if data is None:
            raise JobGone(self.id)
        return decode(JobSpec, data), (generation or b"").decode(errors="replace")

    def status(self) -> JobStatus:
        """Return the job's state and counters now.

        Raises:
            JobGone: There is no such job.
        """
        fields = list(JobStatus.__dataclass_fields__)
        values = self.client.hmget(self.keys.meta, ["owner", *fields])
        owner, *rest = cast("list[bytes | None]", values)
        if not self._is_ours(owner):
            raise JobGone(f"job {self.id} is another one now")
        return status_from(fields, rest)

    def _is_ours(self, owner: bytes | None) -> bool:
        """Tell whether this handle may act for the job that has this owner."""
        return not self.owner or (owner or b"").decode(errors="replace") == self.owner

    def set_state(self, state: str) -> None:
        """Change the state; workers and producers see it at their next step.

        Raises:
            JobGone: There is no such job.
        """
        if self.note("state", state) is None:
            raise JobGone(self.id)

    def pause(self) -> None:
        """Pause the job: no more blocks are leased, but what is leased is still embedded.

        Raises:
            JobGone: There is no such job.
            ChangeRefused: The job was cancelled, or nothing of it is left to embed.
        """
        self._steer("pause", {"paused"})

    def resume(self) -> str:
        """Resume a paused job and return its state: "open", or "closed" if all chunks are in.

        Raises:
            JobGone: There is no such job.
            ChangeRefused: The job was cancelled or has ended.
        """
        return self._steer("resume", {"open", "closed"})

    def cancel(self) -> None:
        """Cancel the job for good; workers drop what they hold of it at their next device batch.

        Raises:
            JobGone: There is no such job.
        """
        self._steer("cancel", {"cancelled"})

    def _steer(self, verb: str, wanted: Collection[str]) -> str:
        state = str(self._script("steer")(keys=[self.keys.meta], args=[verb]), "ascii")
        if state == "gone":
            raise JobGone(self.id)
        if state not in wanted:
            raise ChangeRefused(f"job {self.id} is {state}: there is nothing to {verb}")
        self.announce()
        return state

    def set_terms(
        self,
        *,
        priority: int | None = None,
        tenant: str | None = None,
        weight: int | None = None,
        deadline_ms: int | None = None,
    ) -> None:
        """Change those terms that are given, all at once; the scheduler's next plan follows them.

        Raises:
            ValueError: A value is not one that `Terms` takes; nothing has changed.
            JobGone: There is no such job.
        """
        terms = {
            "priority": priority, "tenant": tenant, "weight": weight, "deadline_ms": deadline_ms,
        }  # fmt: skip
        changes: dict[str, Any] = {name: term for name, term in terms.items() if term is not None}
        replace(USUAL, **changes)
        if not changes:
            self.status()
        elif self._note("HSET", *_pairs(changes)) is None:
            raise JobGone(self.id)
        else:
            self.announce()

    def failures(self, count: int, after: str = "") -> tuple[str, list[ChunkError]]:
        """Return chunks that were given up on, in the order of their failures.

        The server keeps the newest 10,000 of a job.

        Args:
            count: Most chunks to return.
            after: Position that the last call returned; "" for the first call.

        Returns:
            The position to go on from, and the chunks.
        """
        first = f"({after}" if after else "-"
        rows = cast("list[Any]", self.client.xrange(self.keys.failed, first, count=count))
        failures = [
            ChunkError(
                index=read_number(fields[b"index"], 0),
                reason=fields.get(b"reason", b"").decode(errors="replace"),
                attempts=read_number(fields.get(b"attempts"), 1),
            )
            for _, fields in rows
            if b"index" in fields
        ]
        return rows[-1][0].decode() if rows else after, failures

    def note(self, name: str, value: str | int | bytes, *, first: bool = False) -> bytes | None:
        """Keep `value` in the job's `meta`; with `first`, only if nothing is there yet.

        Returns:
            The value that is there now; None when the job is gone, or another owner's, and then
            nothing was kept.
        """
        return self._note("HSETNX" if first else "HSET", name, value)

    def _note(self, command: str, *words: str | int | bytes) -> bytes | None:
        answer = self._script("note")(keys=[self.keys.meta], args=[command, self.owner, *words])
        return cast("bytes | None", answer)

    def notes(self, prefix: str) -> dict[str, bytes]:
        """Return what was noted under names that begin with `prefix`, by the rest of each name.

        Nothing was noted about a job that is gone, or another owner's.
        """
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(self.keys.meta))
        if not self._is_ours(stored.get(b"owner")):
            return {}
        names = ((name.decode(errors="replace"), data) for name, data in sorted(stored.items()))
        return {name.removeprefix(prefix): data for name, data in names if name.startswith(prefix)}

    def noted(self, name: str) -> str:
        """Return what was noted under `name`, "" if nothing was."""
        value = cast("bytes | None", self.client.hget(self.keys.meta, name))
        return (value or b"").decode(errors="replace")

    def close(self, chunk_count: int) -> str:
        """Close the job: all of its `chunk_count` chunks are in.

        Returns:
            "closed", or the state that stays ("cancelled", "paused"; "gone" after deletion).

        Raises:
            BlocksLost: The server has lost the end of the job.
        """
        answer = self._script("close")(keys=[self.keys.meta], args=[chunk_count, self.owner])
        if answer == b"gap":
            raise BlocksLost(f"the server has lost the end of job {self.id}")
        return str(answer, "ascii")

    def delete(self) -> None:
        """Remove the job and everything it left on the server."""
        self.client.unlink(*self.keys.all())
        self.client.zrem(wire.JOBS, self.id)
        self.client.zrem(wire.ENDED, self.id)

    def end(
        self, state: Literal["finished", "failed"], reason: str, seconds: int, **counters: int
    ) -> None:
        """Delete all that the server holds of the job, but keep a record of it for some time.

        Args:
            state: How the job ended.
            reason: Why the job failed.
            seconds: How long the record is kept.
            counters: Counters of its status that the caller knows better than the server. Of a
                finished job, all that came in counts as done.

        Raises:
            JobGone: There is no such job.
        """
        keys = self.keys
        answer = self._script("end")(
            keys=[
                keys.meta, keys.failed,
                keys.blocks, keys.retry, keys.results, keys.bell, keys.room,
            ],
            args=[state, reason, seconds, FAILURES_KEPT, self.owner, *_pairs(counters)],
        )  # fmt: skip
        if answer == b"gone":
            raise JobGone(self.id)
        with if_room():
            self.client.zadd(wire.ENDED, {self.id: time.time()})
        self.client.zrem(wire.JOBS, self.id)
        self.announce()

    def retried(self, chunks_failed: int) -> None:
        """Note how many chunks of an ended job still fail; from now on only its output names them.

        Nothing is noted about a job that is gone.
        """
        if self.note("chunks_failed", chunks_failed) is not None:
            self.client.unlink(self.keys.failed)

    # The producer's side.

    def push(self, blocks: Sequence[tuple[Block, bytes]]) -> list[str]:
        """Append blocks, given with their bytes, in order and in one pipeline.

        Returns:
            For each block "added", or "exists" when it was there already, or the job's state that
            refused it ("cancelled", …; "gone" after deletion).

        Raises:
            BlocksLost: The job ends before the first of the blocks begins.
        """
        pipe = self.client.pipeline(transaction=False)
        push = self._script("push")
        for block, data in blocks:
            push(
                keys=[self.keys.blocks, self.keys.meta],
                args=[
                    wire.entry_id(block.start, block.count), data,
                    block.count, block.token_count, block.end, self.owner,
                ],
                client=pipe,
            )  # fmt: skip
        answers = [str(answer, "ascii") for answer in pipe.execute()]
        if "gap" in answers:
            raise BlocksLost(f"the server has lost the end of job {self.id}")
        return answers

    # The worker's side.

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
        rows = cast(
            "list[dict[str, Any]]",
            self.client.xpending_range(stream, wire.GROUP, "-", "+", count, worker, idle),
        )
        return [
            Pending(
                stream,
                row["message_id"].decode(),
                row["consumer"].decode(),
                row["time_since_delivered"],
                row["times_delivered"],
            )
            for row in rows
        ]

    def backlog(self) -> tuple[int, int]:
        """Return how many blocks nobody has leased, and how many blocks somebody has."""
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

    def wait_for_block(self, seconds: float) -> None:
        """Wait until a block is pushed, or for `seconds` (as `block_ms`); lease nothing."""
        self.client.xread(
            {self.keys.blocks: "$", self.keys.retry: "$"}, count=1, block=block_ms(seconds)
        )

    def begin(self) -> None:
        """Note the time of the first block read, once per job."""
        seconds, microseconds = self.client.time()
        self.note("first_read_ms", seconds * 1000 + microseconds // 1000, first=True)

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
        """Store results and acknowledge their entries, each atomically, in one pipeline.

        Returns:
            For each result "committed", "duplicate" (somebody was first, or the job was made anew
            since; nothing changed) or "cancelled".
        """
        pipe = self.client.pipeline(transaction=False)
        commit = self._script("commit")
        keys = self.keys
        for entry, result in results:
            errors = [word for e in result.errors for word in (e.index, e.reason, e.attempts)]
            commit(
                keys=[entry.stream, keys.results, keys.meta, keys.failed, keys.bell],
                args=[
                    entry.id,
                    result.start,
                    encode(result),
                    result.count,
                    entry.tokens,
                    len(entry.data),
                    result.token_count,
                    len(result.vectors) // max(1, result.count),
                    entry.generation,
                    *errors,
                ],
                client=pipe,
            )
        return [str(answer, "ascii") for answer in pipe.execute()]

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

    # The collector's side.

    def result(self, start: int) -> Result | None:
        """Return the result that begins at chunk `start`, None if it is not there."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hget(self.keys.results, str(start))
        if self.owner:
            pipe.hget(self.keys.meta, "owner")
        data, owner = cast("list[bytes | None]", [*pipe.execute(), None][:2])
        return None if data is None or not self._is_ours(owner) else decode(Result, data)

    def result_starts(self) -> list[int]:
        """Return the start indices of all uncollected results, unordered."""
        names = cast("list[bytes]", self.client.hkeys(self.keys.results))
        return [int(name) for name in names if name.isdigit()]

    def drain(self, upto: int, starts: Sequence[int]) -> str:
        """Delete collected results; everything below chunk `upto` is on disk.

        Returns:
            "drained"; "gone" after deletion; "behind", and nothing changes, if more has been
            drained than is on disk: `lose` the rest.
        """
        keys = self.keys
        answer = self._script("drain")(
            keys=[keys.results, keys.meta, keys.room], args=[upto, self.owner, *starts]
        )
        return str(answer, "ascii")

    def lose(self, upto: int) -> str:
        """Forget all from chunk `upto` on: its producer finds it lost, and sends it again.

        Returns:
            The job's state, "gone" after deletion; a job that has ended loses nothing.
        """
        keys = self.keys
        answer = self._script("lose")(
            keys=[keys.blocks, keys.retry, keys.results, keys.meta], args=[upto, self.owner]
        )
        return str(answer, "ascii")

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until `key` (bell or room) is rung, or for `seconds`; tell whether it was rung."""
        return self.client.blpop([key], timeout=block_ms(seconds) / 1000) is not None


def _pairs(fields: Mapping[str, int | str]) -> list[int | str]:
    """Return names and values in turn, as HSET takes them."""
    return [word for pair in fields.items() for word in pair]
