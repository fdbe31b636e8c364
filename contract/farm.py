"""The farm on the server: its jobs, workers, plans, events, history, and the scheduler's lock."""

import hashlib
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from redis.commands.core import Script

from embedfarm.contract import wire
from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.broker import block_ms, if_room
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_files import differences
from embedfarm.contract.pace import Batch
from embedfarm.contract.records import (
    Completion,
    Decision,
    Heartbeat,
    JobSpec,
    Plan,
    Policy,
    R,
    Rate,
    Sample,
    SchedulerStats,
    TokenRecipe,
    decode,
    encode,
)
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.contract.unreadable import (
    Report,
    name_once,
    names_of,
    read_or_skip,
    read_words,
    readable,
)
from embedfarm.contract.usage import Account
from embedfarm.contract.visibility import Sight

HISTORY_SECONDS: Final = 30 * 86400
WORKER_SECONDS: Final = 3600
BUDGET_SECONDS: Final = 7 * 86400
DECISIONS_MAX: Final = 100
SAMPLES_MAX: Final = 360  # one in ten seconds: an hour
STATS_SECONDS: Final = 60
PLACE_SECONDS: Final = 60  # a place without a job: its creator is at work on it, or died
RETRY_SECONDS_MAX: Final = 3600

_DECISIVE: Final = (
    "model", "dtype", "engine", "prompt", "max_length", "normalize", "dimensions", "long",
    "long_overlap", "task", "prompt_name",
)  # fmt: skip
_RATE_KEY: Final = re.compile(r"[^|]+\|.+\|[0-9]{1,2}", re.DOTALL)


class ModelRefused(RuntimeError):
    """Raised when a worker cannot or must not embed a job; the message says why."""


class FarmFull(RuntimeError):
    """Raised when there are as many unfinished jobs as the farm takes.

    Attributes:
        retry_after_seconds: Time after which it is worth trying again: that which the farm needs
            for the work it was sent, 1 second to 1 hour.
    """

    def __init__(self, jobs: int, retry_after_seconds: int) -> None:
        super().__init__(
            f"the farm is full ({jobs:,} jobs), try again in {retry_after_seconds:,} s"
        )
        self.retry_after_seconds = retry_after_seconds


def model_key(spec: JobSpec) -> str:
    """Return the name under which a model's throughput is remembered: all that changes it."""
    return f"{spec.model}|{spec.dtype}|{spec.max_length}|{spec.engine}"


def engine_key(spec: JobSpec) -> str:
    """Return a digest of all in a spec that decides which engine serves it, and its vectors."""
    decisive = [getattr(spec, name) for name in _DECISIVE]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def length_class(tokens_mean: float) -> int:
    """Return the class of jobs with chunks of similar length: log2 of the mean, rounded down."""
    return max(0, int(tokens_mean).bit_length() - 1)


@dataclass
class Farm(Sight):
    """A handle on the farm's own keys; `embedfarm.contract.tenants` has what one tenant sees of it.

    A record there that cannot be read is as if it were not there.

    Attributes:
        on_unreadable: Called for each such record, with its place and why it cannot be read.
    """

    on_unreadable: Report = name_once

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    def _read(self, kind: type[R], place: str, data: bytes | None) -> R | None:
        """Return a record; None where there is none, or none that can be read."""
        return None if data is None else read_or_skip(kind, data, place, self.on_unreadable)

    def job(self, job: str, owner: str = "") -> Job:
        """Return a handle on one job, for the owner of an output if one is named."""
        return Job(self.client, job, owner)

    def exists(self, job: str) -> bool:
        """Tell whether there is such a job, or a record of it."""
        return bool(self.client.exists(wire.JobKeys(job).meta))

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs on the farm's list, oldest first."""
        return names_of(self.client.zrange(wire.JOBS, 0, -1))

    def ended_ids(self, count: int) -> list[str]:
        """Return the ids of the last `count` jobs that have ended, newest first."""
        return names_of(self.client.zrange(wire.ENDED, 0, count - 1, desc=True))

    def end(
        self,
        job: str,
        state: Literal["finished", "failed"],
        reason: str,
        settings: Settings,
        *,
        owner: str = "",
        **counters: int,
    ) -> None:
        """End a job as `Job.end` does, and delete surplus or old records of ended jobs.

        Raises:
            JobGone: There is no such job, or it is another owner's.
        """
        self.job(job, owner).end(state, reason, settings.ended_seconds_max, **counters)
        before = time.time() - settings.ended_seconds_max
        old = self.client.zrangebyscore(wire.ENDED, "-inf", before)
        surplus = self.client.zrange(wire.ENDED, 0, -settings.ended_jobs_max - 1)
        for name in {*names_of(old), *names_of(surplus)}:
            self._forget(name)

    def _forget(self, job: str) -> None:
        """Remove what is left of a job that has ended; one that was made anew stays."""
        keys = wire.JobKeys(job)
        others = [each for each in keys.all() if each != keys.meta]
        if self._script("forget")(keys=[keys.meta, *others]) == b"forgotten":
            self.client.zrem(wire.JOBS, job)
        self.client.zrem(wire.ENDED, job)

    def statuses(self) -> dict[str, JobStatus]:
        """Return the status of every job that is there, oldest first."""
        backlogs = read_backlogs(self.client, self.job_ids(), self.on_unreadable)
        return {each.job: each.status for each in backlogs}

    def ended(self, jobs: Collection[str]) -> set[str]:
        """Return those of the jobs that were cancelled or deleted, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for name in jobs:
            pipe.hget(wire.JobKeys(name).meta, "state")
        states = zip(jobs, pipe.execute(), strict=True)
        return {name for name, state in states if state in {None, b"cancelled"}}

    def admit(self, job: str, jobs_max: int) -> None:
        """Give a job that is to be made its place; a job that exists is always let through.

        The list of jobs and the job itself lie in two cluster slots, and no script may touch both.
        So the place is taken first, atomically: of two creators that come at once for the last
        place, one is refused. A creator that dies before it makes the job leaves an empty place,
        which is given away after a minute. Cancelled jobs take no place.

        Raises:
            FarmFull: There are `jobs_max` unfinished jobs.
        """
        if self.exists(job) or not self._take_place(job, jobs_max, ()):
            return
        statuses = self.statuses()
        ended = {name for name, status in statuses.items() if status.state == "cancelled"}
        empty = self._old_places() - statuses.keys()
        if empty:
            self.client.zrem(wire.JOBS, *empty)
        unfinished = self._take_place(job, jobs_max, ended)
        if unfinished:
            left = [status for name, status in statuses.items() if name not in ended]
            raise FarmFull(unfinished, self._seconds_left(left))

    def _take_place(self, job: str, jobs_max: int, ended: Collection[str]) -> int:
        """Put a job on the list and return 0; without room, return how many jobs are unfinished."""
        return int(
            self._script("admit")(keys=[wire.JOBS], args=[job, time.time(), jobs_max, *ended])
        )

    def _old_places(self) -> set[str]:
        """Return the jobs that have been on the list for longer than `PLACE_SECONDS`."""
        before = time.time() - PLACE_SECONDS
        return set(names_of(self.client.zrangebyscore(wire.JOBS, "-inf", before)))

    def _seconds_left(self, statuses: Collection[JobStatus]) -> int:
        """Return the time that live workers need for what was sent: between 1 s and 1 h."""
        tokens = sum(max(0, each.tokens_in - each.tokens_done) for each in statuses)
        speed = sum(beat.tokens_per_second for beat in self.workers())
        seconds = tokens / speed if speed else RETRY_SECONDS_MAX * min(1, tokens)
        return max(1, min(RETRY_SECONDS_MAX, math.ceil(seconds)))

    def server_id(self) -> str:
        """Return an id that changes when the server starts again, or another takes its place."""
        return str(self.client.info("server")["run_id"])

    # Workers.

    def beat(self, heartbeat: Heartbeat, ttl_seconds: float) -> bool:
        """Announce a worker; return False when a newer process owns its name."""
        answer = self._script("beat")(
            keys=[wire.worker_key(heartbeat.worker), wire.WORKERS],
            args=[
                heartbeat.worker,
                heartbeat.incarnation,
                encode(heartbeat),
                int(ttl_seconds * 1000),
            ],
        )
        return bool(answer == b"alive")

    def leave(self, worker: str) -> None:
        """Take a worker off the list at once, on a clean stop."""
        self.client.unlink(wire.worker_key(worker))
        self.client.zrem(wire.WORKERS, worker)

    def workers(self) -> list[Heartbeat]:
        """Return heartbeats of live workers, ordered by name; forget workers gone for an hour."""
        return self.call_roll()[0]

    def call_roll(self) -> tuple[list[Heartbeat], dict[str, float]]:
        """Return live workers' heartbeats, and by name the seconds since each lost one was seen.

        Workers count as lost for an hour. One that stops cleanly is taken off the list, and does
        not count as lost.
        """
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        pipe.zrange(wire.WORKERS, 0, -1, withscores=True)
        (now, _), listed = pipe.execute()
        pipe.zremrangebyscore(wire.WORKERS, "-inf", now - WORKER_SECONDS)
        names = sorted((name.decode(errors="replace"), at) for name, at in listed)
        for name, _ in names:
            pipe.hget(wire.worker_key(name), "heartbeat")
        beats = pipe.execute()[1:]
        alive = [
            beat
            for (name, _), data in zip(names, beats, strict=True)
            if data is not None and (beat := self._read(Heartbeat, wire.worker_key(name), data))
        ]
        rows = zip(names, beats, strict=True)
        return alive, {name: max(0.0, now - at) for (name, at), data in rows if data is None}

    # Plans and statistics.

    def plan(self, worker: str) -> Plan | None:
        """Return the current plan of a worker, None without one."""
        data = cast("bytes | None", self.client.get(wire.plan_key(worker)))
        return self._read(Plan, wire.plan_key(worker), data)

    def publish(
        self, plans: Sequence[Plan], fence: int, ttl_seconds: float, wake: Sequence[str] = ()
    ) -> bool:
        """Write plans and wake the named workers; return False if another scheduler took over."""
        keys = [wire.plan_key(plan.worker) for plan in plans]
        answer = self._script("publish")(
            keys=[wire.SCHEDULER, *keys, *map(wire.wake_key, wake)],
            args=[fence, int(ttl_seconds * 1000), *(encode(plan) for plan in plans)],
        )
        return bool(answer == b"published")

    def wait_for_plan(self, worker: str, seconds: float) -> bool:
        """Wait until a worker is woken, for `seconds` (as `block_ms`); tell whether it was."""
        key = wire.wake_key(worker)
        return self.client.blpop([key], timeout=block_ms(seconds) / 1000) is not None

    def policy(self) -> list[str]:
        """Return the names of the passes that somebody chose, in order; none if nobody did."""
        data = cast("bytes | None", self.client.get(wire.POLICY))
        policy = self._read(Policy, wire.POLICY, data)
        return policy.passes if policy else []

    def set_policy(self, passes: Sequence[str]) -> None:
        """Choose the passes from the next decision on; an empty list means the scheduler's own."""
        self.client.set(wire.POLICY, encode(Policy(passes=list(passes))))

    def tell(self, decision: Decision, stats: SchedulerStats) -> None:
        """Keep a decision and the figures of the scheduler for people."""
        pipe = self.client.pipeline(transaction=False)
        pipe.lpush(wire.DECISIONS, encode(decision))
        pipe.ltrim(wire.DECISIONS, 0, DECISIONS_MAX - 1)
        pipe.set(wire.STATS, encode(stats), ex=STATS_SECONDS)
        with if_room():
            pipe.execute()

    def decisions(self, count: int) -> list[Decision]:
        """Return the last decisions that were kept, about one in a second, newest first."""
        rows = cast("list[bytes]", self.client.lrange(wire.DECISIONS, 0, count - 1))
        found = (self._read(Decision, wire.DECISIONS, row) for row in rows)
        return [decision for decision in found if decision is not None]

    def scheduler_stats(self) -> SchedulerStats | None:
        """Return the figures of the active scheduler, None when none was active lately."""
        data = cast("bytes | None", self.client.get(wire.STATS))
        return self._read(SchedulerStats, wire.STATS, data)

    def has_scheduler(self) -> bool:
        """Tell whether a scheduler is active now."""
        return bool(self.client.exists(wire.SCHEDULER))

    def elect(self, token: str, ttl_seconds: float) -> int:
        """Take or keep the scheduler's lock; return its fencing token, 0 if another holds it."""
        keys, ttl_ms = [wire.SCHEDULER, wire.FENCE], int(ttl_seconds * 1000)
        return int(self._script("elect")(keys=keys, args=[token, ttl_ms]))

    def abdicate(self, fence: int) -> None:
        """Give the lock up, so that a standby need not wait for it to expire."""
        self._script("abdicate")(keys=[wire.SCHEDULER], args=[fence])

    def report(self, completion: Completion, events_max: int) -> None:
        """Tell the scheduler about a micro-batch."""
        with if_room():
            self.client.xadd(
                wire.EVENTS, {"done": encode(completion)}, maxlen=events_max, approximate=True
            )

    def events(self, after: str, block_seconds: float) -> tuple[str, list[Completion]]:
        """Return the completions since ID `after` ("$": from now on).

        Args:
            after: ID that the last call returned.
            block_seconds: Seconds to wait for the first event, limited by `block_ms`.

        Returns:
            The ID to go on from, and the completions; other events only end the waiting.
        """
        answer = self.client.xread({wire.EVENTS: after}, count=1000, block=block_ms(block_seconds))
        items: list[Any] = [item for _, rows in cast("list[Any]", answer or []) for item in rows]
        last = items[-1][0].decode() if items else after
        return last, [
            done
            for _, done in readable(Completion, b"done", items, wire.EVENTS, self.on_unreadable)
        ]

    def recent_batches(self, seconds: float) -> dict[str, list[Batch]]:
        """Return the micro-batches reported in the last `seconds`, by worker, oldest first.

        The server keeps about `events_max` of all workers, so that on a large farm they may not
        reach back as far.
        """
        rows = self._newest(wire.EVENTS, seconds)
        batches = defaultdict[str, list[Batch]](list)
        for end, done in readable(Completion, b"done", rows, wire.EVENTS, self.on_unreadable):
            bar = Batch(end, done.seconds, done.job, done.chunks, done.real_tokens)
            batches[done.worker].append(bar)
        return dict(batches)

    def sample(self, sample: Sample) -> None:
        """Keep a sample, and an hour of the samples before it."""
        with if_room():
            self.client.xadd(
                wire.SAMPLES, {"sample": encode(sample)}, maxlen=SAMPLES_MAX, approximate=False
            )

    def samples(self, seconds: float) -> list[tuple[float, Sample]]:
        """Return the samples of the last `seconds`, each after its Unix time, oldest first."""
        rows = self._newest(wire.SAMPLES, seconds)
        return list(readable(Sample, b"sample", rows, wire.SAMPLES, self.on_unreadable))

    def _newest(self, stream: str, seconds: float) -> list[Any]:
        """Return a stream's entries of the last `seconds` by the server's clock."""
        now, microseconds = self.client.time()
        since = int(1000 * (now - seconds)) + microseconds // 1000
        return cast("list[Any]", self.client.xrange(stream, max(0, since), "+"))

    def history(self) -> dict[str, Rate]:
        """Return the remembered rates by `worker|model|length class`."""
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.HISTORY))
        rates = {}
        for field, data in stored.items():
            name = field.decode(errors="replace")
            if not _RATE_KEY.fullmatch(name):
                self.on_unreadable(f"{wire.HISTORY} {name}", "not worker|model|length class")
            elif rate := self._read(Rate, f"{wire.HISTORY} {name}", data):
                rates[name] = rate
        return rates

    def remember(self, rates: Mapping[str, Rate], forgotten: Sequence[str]) -> None:
        """Store rates that changed, and drop the ones too old to believe."""
        if rates:
            with if_room():
                self.client.hset(wire.HISTORY, mapping={k: encode(v) for k, v in rates.items()})
        if forgotten:
            self.client.hdel(wire.HISTORY, *forgotten)

    def budget(self, device: str, model: str) -> int:
        """Return the tokens of a device batch learned for a device and a model; 0 without any."""
        data = cast("bytes | None", self.client.get(wire.budget_key(device, model)))
        return int(data) if data and re.fullmatch(rb"[0-9]{1,15}", data) else 0

    def learn_budget(self, device: str, model: str, tokens: int) -> None:
        """Remember a device batch's budget for a week, after which it is learned anew."""
        with if_room():
            self.client.set(wire.budget_key(device, model), tokens, ex=BUDGET_SECONDS)

    # What a worker says about a job.

    def agree(self, job: str, fingerprint: Mapping[str, str], of: str = "") -> None:
        """Make sure that every worker of a job has the same model files.

        The first worker's fingerprint becomes the job's, unless the submitter gave one.

        Args:
            job: Id of the job.
            fingerprint: What the caller's model files are, by component.
            of: Owner or generation of the job that is meant; "" for whichever has the id.

        Raises:
            ModelRefused: This worker's fingerprint differs; the message names the components.
            JobGone: There is no such job, or another one has the id.
        """
        ours = json.dumps(dict(fingerprint), sort_keys=True)
        agreed = self.job(job, of).note("fingerprint", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        known = read_words(agreed, f"fingerprint of {job}", self.on_unreadable)
        differing = differences(known, fingerprint)
        if differing:
            raise ModelRefused(f"another model than the job's: {', '.join(differing)} differ")

    def fingerprint(self, job: str, owner: str = "") -> dict[str, str]:
        """Return the fingerprint that the job's workers agreed on, empty before the first one."""
        (data,) = self.job(job, owner).notes("fingerprint").values() or [b"{}"]
        return read_words(data, f"fingerprint of {job}", self.on_unreadable)

    def agree_on_tokens(self, job: str, recipe: TokenRecipe | None, of: str = "") -> None:
        """Make sure that every worker of a job can read its token ids.

        The first worker's recipe becomes the job's. Without a recipe, the job's blocks are texts,
        which all workers can read.

        Args:
            job: Id of the job.
            recipe: How the caller makes token ids; None if it reads texts only.
            of: Owner or generation of the job that is meant; "" for whichever has the id.

        Raises:
            ModelRefused: This worker's recipe differs.
            JobGone: There is no such job, or another one has the id.
        """
        ours = encode(recipe) if recipe else b""
        agreed = self.job(job, of).note("recipe", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        if agreed not in {b"", ours}:
            raise ModelRefused("this worker's tokenizer does not make the job's token ids")

    def recipe(self, job: str) -> TokenRecipe | None:
        """Return the recipe of a job's token ids; None if no worker gave one, or they need texts.

        Raises:
            RecordError: The recipe cannot be read, as from another version.
        """
        data = cast("bytes | None", self.client.hget(wire.JobKeys(job).meta, "recipe"))
        return decode(TokenRecipe, data) if data else None

    def account(self, job: str, worker: str, incarnation: str, account: Account) -> None:
        """Note what a worker has done for a job so far, in place of what it noted before."""
        self.job(job).note(f"account:{worker}#{incarnation}", encode(account))

    def accounts(self, job: str, owner: str = "") -> dict[str, Account]:
        """Return a job's accounts by worker, those of a worker's restarts added up."""
        accounts: defaultdict[str, Account] = defaultdict(Account)
        for name, data in self.job(job, owner).notes("account:").items():
            account = self._read(Account, f"{wire.JobKeys(job).meta} account:{name}", data)
            accounts[name.rpartition("#")[0]].add(account or Account())
        return dict(accounts)

    def refuse(self, job: str, worker: str, reason: str, of: str = "") -> None:
        """Note that a worker cannot embed a job, for people and for the submitter."""
        self.job(job, of).note(f"refused:{worker}", reason)

    def refusals(self, job: str, owner: str = "") -> dict[str, str]:
        """Return the reasons of workers that cannot embed a job, by worker."""
        notes = self.job(job, owner).notes("refused:")
        return {worker: reason.decode(errors="replace") for worker, reason in notes.items()}
