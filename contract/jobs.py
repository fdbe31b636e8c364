"""One job on the server: create, push, lease, renew, commit, split, drain, delete.

The stream delivers at least once and in no order. The commit script makes it once, the start index
gives the order, and only the collector, which sees that ranges tile [0, N), calls a job complete.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Unpack, cast

import redis

from embedfarm.contract import wire
from embedfarm.contract.block_stream import BlockStream
from embedfarm.contract.broker import block_ms, if_room
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_timeline import FarmEvent, Happening, Timeline, account
from embedfarm.contract.job_handle import JobHandle
from embedfarm.contract.job_results import JobResults
from embedfarm.contract.job_spec import JobSpec, encode_spec
from embedfarm.contract.records import Block
from embedfarm.contract.scheduling_terms import (
    LIMITS,
    USUAL,
    TermChanges,
    Terms,
    describe_terms,
)
from embedfarm.contract.status import Cause, EndState, JobGone, JobStatus, status_from

FAILURES_KEPT: Final = 100
_STEERED: Final[dict[str, Happening]] = {
    "pause": "paused", "resume": "resumed", "raise": "resumed", "cancel": "cancelled",
}  # fmt: skip
NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})


class ChangeRefused(EmbedfarmError, RuntimeError):
    """Raised when a job to be paused or resumed has ended; the message says how it ended."""


class BlocksLost(redis.ConnectionError):
    """Raised when the server came back without blocks that it had taken: they must be sent again.

    This is a connection error, because often it is the only sign of an outage: the client replaces
    an idle connection without a word. So `persist` recovers from both in the same way.
    """


class JobTaken(EmbedfarmError, RuntimeError):
    """Raised when the job of that name fills another output; that job is left alone."""

    exit_status = 2


@dataclass
class Job(JobHandle):
    """A job on the server: made, filled, steered and ended.

    Its blocks are leased and committed through `stream`, and its results collected through
    `results`.
    """

    @cached_property
    def stream(self) -> BlockStream:
        """The job's blocks, as workers lease and commit them."""
        return BlockStream(self.client, self.id, self.owner)

    @cached_property
    def results(self) -> JobResults:
        """The job's results, as a collector takes them, and its failures."""
        return JobResults(self.client, self.id, self.owner)

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
            notes: Fields that are kept with the job: `out` and `corpus` of its status, and
                "command".

        Returns:
            The job's state.

        Raises:
            JobTaken: A job of this name exists already, and fills another output.
        """
        now_ms = int(time.time() * 1000)
        keys = self.keys
        noted = {**asdict(terms), **notes, "submitted_by": self.actor or account()}
        noted |= {"owner": self.owner} if self.owner else {}
        state = self._script("create")(
            keys=[keys.blocks, keys.retry, keys.meta, keys.failed, keys.results],
            args=[encode_spec(spec), start, now_ms, *_pairs(noted)],
        )
        if state == b"taken":
            other = self.noted("out") or "unnamed"
            raise JobTaken(
                f"job {self.id} fills another output: {other}; choose another id, or, if that one "
                f"is gone, remove the job: embedfarm jobs rm {self.id} --force"
            )
        self.list_again()
        if self.noted("created_ms") == str(now_ms):
            self._tell("submitted")
        self.announce()
        return str(state, "ascii")

    def _tell(self, kind: Happening, note: str = "") -> None:
        """Add to the timeline what was done to this job, and by whom."""
        by = self.actor or account()
        Timeline(self.client).add(FarmEvent(kind=kind, job=self.id, by=by, note=note))

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
            self.client.xadd(
                wire.EVENTS, {"job": self.id}, maxlen=wire.EVENTS_MAX, approximate=True
            )

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
            ChangeRefused: The job was cancelled or has ended, or has taken as much as it may.
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
        if state == "limited":
            raise ChangeRefused(
                f"job {self.id} has taken as much as it may ({self.status().spent.words}): raise "
                "its max_hours or max_cost, and it goes on"
            )
        if state not in wanted:
            raise ChangeRefused(f"job {self.id} is {state}: there is nothing to {verb}")
        if state == "same":
            return state
        self._tell(_STEERED[verb])
        self.announce()
        return state

    def set_terms(self, **changes: Unpack[TermChanges]) -> None:
        """Change those terms that are given, all at once; the scheduler's next plan follows them.

        A job that has paused itself goes on if it may take more now.

        Raises:
            ValueError: A value is not one that `Terms` takes; nothing has changed.
            JobGone: There is no such job.
        """
        given: dict[str, Any] = {name: term for name, term in changes.items() if term is not None}
        made = replace(USUAL, **given)
        terms = {name: getattr(made, name) for name in TermChanges.__annotations__ if name in given}
        if not terms:
            self.status()
        elif self._note("HSET", *_pairs(terms)) is None:
            raise JobGone(self.id)
        else:
            self._tell("changed", describe_terms(terms))
            if not terms.keys().isdisjoint(LIMITS):
                self._steer("raise", {"open", "closed", "same"})
            self.announce()

    def note(self, name: str, value: str | int | bytes, *, first: bool = False) -> bytes | None:
        """Keep `value` in the job's `meta`; with `first`, only if nothing is there yet.

        Returns:
            The value that is there now; None when the job is gone, or another owner's, and then
            nothing was kept.
        """
        return self._note("HSETNX" if first else "HSET", name, value)

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
        if self.client.unlink(*self.keys.all()):
            self._tell("deleted")
        self.client.zrem(wire.JOBS, self.id)
        self.client.zrem(wire.ENDED, self.id)

    def end(
        self, state: EndState, reason: str, seconds: int, cause: Cause = "", **counters: int
    ) -> None:
        """Delete all that the server holds of the job, but keep a record of it for some time.

        The end is counted by state and cause, once, unless the job is made anew and ends again.

        Args:
            state: How the job ended.
            reason: Why the job failed, for people.
            seconds: How long the record is kept.
            cause: What the reason is about.
            counters: Counters of its status that the caller knows better than the server. Of a
                finished job, all that came in counts as done.

        Raises:
            JobGone: There is no such job.
        """
        keys = self.keys
        answer = self._script("end")(
            keys=[
                keys.meta, keys.failed,
                keys.blocks, keys.retry, keys.results, keys.result_wakeup, keys.room,
            ],
            args=[state, reason, seconds, FAILURES_KEPT, self.owner, *_pairs(counters)],
        )  # fmt: skip
        if answer == b"gone":
            raise JobGone(self.id)
        is_new = self._script("enrol")(
            keys=[wire.ENDED, wire.JOBS, wire.ENDINGS],
            args=[self.id, time.time(), f"{state} {cause}"],
        )
        if is_new and state != "cancelled":  # that it was cancelled is told already, and by whom
            Timeline(self.client).add(FarmEvent(kind=state, job=self.id, note=reason))
        self.announce()

    def retried(self, chunks_failed: int) -> None:
        """Note how many chunks of an ended job still fail; from now on only its output names them.

        Whatever went wrong after its end is over. Nothing is noted about a job that is gone.
        """
        if self._note("HSET", "chunks_failed", chunks_failed, "reason", "") is not None:
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
                    block.count - block.to_embed,
                ],
                client=pipe,
            )  # fmt: skip
        answers = [str(answer, "ascii") for answer in pipe.execute()]
        if "gap" in answers:
            raise BlocksLost(f"the server has lost the end of job {self.id}")
        return answers

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for a wake-up on `key` or for `seconds`; tell whether there was one."""
        return self.client.blpop([key], timeout=block_ms(seconds) / 1000) is not None


def identities(client: redis.Redis, jobs: Sequence[str]) -> dict[str, tuple[JobSpec, str]]:
    """Return specification and generation of jobs, in one pipeline.

    Jobs that are gone, or whose specification cannot be read, are left out.
    """
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        pipe.hmget(wire.JobKeys(job).meta, "spec", "generation")
    found = {}
    for job, fields in zip(jobs, pipe.execute(raise_on_error=False), strict=True):
        if not isinstance(fields, Exception) and fields[0] is not None:
            with suppress(RecordError):
                found[job] = decode(JobSpec, fields[0]), (fields[1] or b"").decode()
    return found


def _pairs(fields: Mapping[str, str | float]) -> list[str | float]:
    """Return names and values in turn, as HSET takes them."""
    return [word for pair in fields.items() for word in pair]
