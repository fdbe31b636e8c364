"""The farm on the server: its jobs, workers, plans, events, history, and the scheduler's lock."""

import contextlib
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, cast

import redis
from redis.commands.core import Script

from embedfarm import wire
from embedfarm.accounts import Account
from embedfarm.backlog import read_backlogs
from embedfarm.broker import block_ms
from embedfarm.jobs import Job
from embedfarm.records import (
    Completion,
    Decision,
    Heartbeat,
    JobSpec,
    Plan,
    Policy,
    R,
    Rate,
    RecordError,
    Sample,
    SchedulerStats,
    TokenRecipe,
    decode,
    encode,
)
from embedfarm.settings import Settings
from embedfarm.status import JobGone, JobStatus

HISTORY_SECONDS: Final = 30 * 86400
WORKER_SECONDS: Final = 3600
BUDGET_SECONDS: Final = 7 * 86400
DECISIONS_MAX: Final = 100
SAMPLES_MAX: Final = 360  # one in ten seconds: an hour
STATS_SECONDS: Final = 60
PLACE_SECONDS: Final = 60  # a place without a job: its creator is at work on it, or died
RETRY_SECONDS_MAX: Final = 3600


class Batch(NamedTuple):
    """A micro-batch as a bar over time.

    Attributes:
        end: Unix seconds at which it was reported.
        seconds: It took, with what of the time around it the pipeline could not hide.
        job: The job its chunks came from.
        chunks: Chunks in it.
        tokens: Real tokens in it.
    """

    end: float
    seconds: float
    job: str
    chunks: int
    tokens: int


class ModelRefused(RuntimeError):
    """A worker cannot or must not embed a job; the message says why."""


class FarmFull(RuntimeError):
    """There are as many unfinished jobs as the farm takes.

    Attributes:
        retry_after_seconds: Time after which it is worth trying again: that for which the farm has
            work, as far as it was sent, 1 second to 1 hour.
    """

    def __init__(self, jobs: int, retry_after_seconds: int) -> None:
        super().__init__(
            f"the farm is full ({jobs:,} jobs), try again in {retry_after_seconds:,} s"
        )
        self.retry_after_seconds = retry_after_seconds


def model_key(spec: JobSpec) -> str:
    """Name under which throughput of a model is remembered: all that changes its speed."""
    return f"{spec.model}|{spec.dtype}|{spec.max_length}|{spec.engine}"


def engine_key(spec: JobSpec) -> str:
    """Name of all of a spec that decides which engine serves it, and what its vectors are."""
    decisive = (
        spec.model,
        spec.dtype,
        spec.engine,
        spec.prompt,
        spec.max_length,
        spec.normalize,
        spec.dimensions,
        spec.long,
        spec.long_overlap,
    )
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def length_class(tokens_mean: float) -> int:
    """Class of jobs whose chunks are about as long: the power of two at or below the mean."""
    return max(0, int(tokens_mean).bit_length() - 1)


@dataclass
class Farm:
    """A handle on the farm's own keys."""

    client: redis.Redis

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    def job(self, job: str) -> Job:
        """A handle on one job."""
        return Job(self.client, job)

    def exists(self, job: str) -> bool:
        """Whether there is such a job, or a record of it."""
        return bool(self.client.exists(wire.JobKeys(job).meta))

    def job_ids(self) -> list[str]:
        """All jobs, oldest first."""
        return [each.decode() for each in cast("list[bytes]", self.client.zrange(wire.JOBS, 0, -1))]

    def ended_ids(self, count: int) -> list[str]:
        """Jobs that have ended, newest first."""
        names = cast("list[bytes]", self.client.zrange(wire.ENDED, 0, count - 1, desc=True))
        return [each.decode() for each in names]

    def end(
        self,
        job: str,
        state: Literal["finished", "failed"],
        reason: str,
        settings: Settings,
        **counters: int,
    ) -> None:
        """As `Job.end`; what of the older records is too old or too much goes."""
        self.job(job).end(state, reason, settings.ended_seconds_max, **counters)
        before = time.time() - settings.ended_seconds_max
        old = self.client.zrangebyscore(wire.ENDED, "-inf", before)
        surplus = self.client.zrange(wire.ENDED, 0, -settings.ended_jobs_max - 1)
        for name in {*cast("list[bytes]", old), *cast("list[bytes]", surplus)}:
            self.job(name.decode()).delete()

    def statuses(self) -> dict[str, JobStatus]:
        """Status of every job that is there, oldest first."""
        return {each.job: each.status for each in read_backlogs(self.client, self.job_ids())}

    def ended(self, jobs: Collection[str]) -> set[str]:
        """Those of the jobs that were cancelled or deleted, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for name in jobs:
            pipe.hget(wire.JobKeys(name).meta, "state")
        states = zip(jobs, pipe.execute(), strict=True)
        return {name for name, state in states if state in {None, b"cancelled"}}

    def admit(self, job: str, jobs_max: int) -> None:
        """Give a job that is to be made its place; one that exists is always let through.

        The list of jobs and the job itself lie in two cluster slots, and no script may touch both.
        So the place is taken first, atomically: of two creators that come at once for the last
        place, one is refused. A creator that dies before it makes the job leaves an empty place,
        which is given away after a minute. Cancelled jobs take none.

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
        """Put a job on the list; if there is no room, how many unfinished jobs there are."""
        return int(
            self._script("admit")(keys=[wire.JOBS], args=[job, time.time(), jobs_max, *ended])
        )

    def _old_places(self) -> set[str]:
        """Jobs that have been on the list for some time."""
        names = self.client.zrangebyscore(wire.JOBS, "-inf", time.time() - PLACE_SECONDS)
        return {each.decode() for each in cast("list[bytes]", names)}

    def _seconds_left(self, statuses: Collection[JobStatus]) -> int:
        """Time that the live workers need for what was sent: between a second and an hour."""
        tokens = sum(max(0, each.tokens_in - each.tokens_done) for each in statuses)
        speed = sum(beat.tokens_per_second for beat in self.workers())
        seconds = tokens / speed if speed else RETRY_SECONDS_MAX * min(1, tokens)
        return max(1, min(RETRY_SECONDS_MAX, math.ceil(seconds)))

    # Workers.

    def beat(self, heartbeat: Heartbeat, ttl_seconds: float) -> bool:
        """Announce a worker; False when a newer process owns its name."""
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
        """Heartbeats of the workers that are alive, by name; forgets those gone for an hour."""
        return self.call_roll()[0]

    def call_roll(self) -> tuple[list[Heartbeat], dict[str, float]]:
        """`workers`, and seconds since those were last seen that died in the last hour, by name.

        One that stops cleanly is taken off the list, and is not lost.
        """
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        pipe.zrange(wire.WORKERS, 0, -1, withscores=True)
        (now, _), listed = pipe.execute()
        pipe.zremrangebyscore(wire.WORKERS, "-inf", now - WORKER_SECONDS)
        names = sorted((name.decode(), at) for name, at in listed)
        for name, _ in names:
            pipe.hget(wire.worker_key(name), "heartbeat")
        beats = pipe.execute()[1:]
        alive = [decode(Heartbeat, data) for data in beats if data is not None]
        rows = zip(names, beats, strict=True)
        return alive, {name: max(0.0, now - at) for (name, at), data in rows if data is None}

    # Plans and statistics.

    def plan(self, worker: str) -> Plan | None:
        """The current plan of a worker, None without one."""
        data = cast("bytes | None", self.client.get(wire.plan_key(worker)))
        return None if data is None else decode(Plan, data)

    def publish(
        self, plans: Sequence[Plan], fence: int, ttl_seconds: float, wake: Sequence[str] = ()
    ) -> bool:
        """Write plans, and wake the named workers; False when another scheduler has taken over."""
        keys = [wire.plan_key(plan.worker) for plan in plans]
        answer = self._script("publish")(
            keys=[wire.SCHEDULER, *keys, *map(wire.wake_key, wake)],
            args=[fence, int(ttl_seconds * 1000), *(encode(plan) for plan in plans)],
        )
        return bool(answer == b"published")

    def wait_for_plan(self, worker: str, seconds: float) -> None:
        """Return when a worker is woken, or after `seconds` (as `block_ms`)."""
        self.client.blpop([wire.wake_key(worker)], timeout=block_ms(seconds) / 1000)

    def policy(self) -> list[str]:
        """Names of the passes that somebody chose, in order; empty for the scheduler's own."""
        data = cast("bytes | None", self.client.get(wire.POLICY))
        return decode(Policy, data).passes if data else []

    def set_policy(self, passes: Sequence[str]) -> None:
        """Choose the passes, from the next decision on; none for the scheduler's own."""
        self.client.set(wire.POLICY, encode(Policy(passes=list(passes))))

    def tell(self, decision: Decision, stats: SchedulerStats) -> None:
        """Keep a decision and the figures of the scheduler for people."""
        pipe = self.client.pipeline(transaction=False)
        pipe.lpush(wire.DECISIONS, encode(decision))
        pipe.ltrim(wire.DECISIONS, 0, DECISIONS_MAX - 1)
        pipe.set(wire.STATS, encode(stats), ex=STATS_SECONDS)
        pipe.execute()

    def decisions(self, count: int) -> list[Decision]:
        """The last decisions that were kept, about one in a second, newest first."""
        rows = cast("list[bytes]", self.client.lrange(wire.DECISIONS, 0, count - 1))
        return [decode(Decision, row) for row in rows]

    def scheduler_stats(self) -> SchedulerStats | None:
        """Figures of the active scheduler, None when none was active lately."""
        data = cast("bytes | None", self.client.get(wire.STATS))
        return decode(SchedulerStats, data) if data else None

    def has_scheduler(self) -> bool:
        """Whether a scheduler is active now."""
        return bool(self.client.exists(wire.SCHEDULER))

    def elect(self, token: str, ttl_seconds: float) -> int:
        """Take or keep the scheduler's lock; its fence, or 0 while another one holds it."""
        return int(
            self._script("elect")(
                keys=[wire.SCHEDULER, wire.FENCE], args=[token, int(ttl_seconds * 1000)]
            )
        )

    def abdicate(self, fence: int) -> None:
        """Give the lock up, so that a standby need not wait for it to expire."""
        self._script("abdicate")(keys=[wire.SCHEDULER], args=[fence])

    def report(self, completion: Completion, events_max: int) -> None:
        """Tell the scheduler about a micro-batch."""
        self.client.xadd(
            wire.EVENTS, {"done": encode(completion)}, maxlen=events_max, approximate=True
        )

    def events(self, after: str, block_seconds: float) -> tuple[str, list[Completion]]:
        """Completions since ID `after` ("$" for from now on).

        Args:
            after: Where the last call ended.
            block_seconds: Time to wait for the first one, as `block_ms`.

        Returns:
            The ID to go on from, and the completions; other events only end the waiting.
        """
        answer = self.client.xread({wire.EVENTS: after}, count=1000, block=block_ms(block_seconds))
        items: list[Any] = [item for _, rows in cast("list[Any]", answer or []) for item in rows]
        last = items[-1][0].decode() if items else after
        return last, [decode(Completion, f[b"done"]) for _, f in items if b"done" in f]

    def recent_batches(self, seconds: float) -> dict[str, list[Batch]]:
        """Micro-batches reported in the last `seconds`, by worker, oldest first.

        There are about `events_max` of all workers at most, so that on a large farm they may not
        reach back as far.
        """
        rows = self._newest(wire.EVENTS, seconds)
        batches = defaultdict[str, list[Batch]](list)
        for end, done in readable(Completion, b"done", rows):
            bar = Batch(end, done.seconds, done.job, done.chunks, done.real_tokens)
            batches[done.worker].append(bar)
        return dict(batches)

    def sample(self, sample: Sample) -> None:
        """Keep a sample, and an hour of those before it."""
        self.client.xadd(
            wire.SAMPLES, {"sample": encode(sample)}, maxlen=SAMPLES_MAX, approximate=False
        )

    def samples(self, seconds: float) -> list[tuple[float, Sample]]:
        """Samples taken in the last `seconds`, each after its Unix time, oldest first."""
        return list(readable(Sample, b"sample", self._newest(wire.SAMPLES, seconds)))

    def _newest(self, stream: str, seconds: float) -> list[Any]:
        """Entries of the last `seconds` by the server's clock."""
        now, microseconds = self.client.time()
        since = int(1000 * (now - seconds)) + microseconds // 1000
        return cast("list[Any]", self.client.xrange(stream, max(0, since), "+"))

    def history(self) -> dict[str, Rate]:
        """Remembered rates by `worker|model|length class`."""
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.HISTORY))
        return {name.decode(): decode(Rate, data) for name, data in stored.items()}

    def remember(self, rates: Mapping[str, Rate], forgotten: Sequence[str]) -> None:
        """Store rates that changed, and drop the ones too old to believe."""
        if rates:
            self.client.hset(wire.HISTORY, mapping={k: encode(v) for k, v in rates.items()})
        if forgotten:
            self.client.hdel(wire.HISTORY, *forgotten)

    def budget(self, device: str, model: str) -> int:
        """Tokens of a device batch learned on such a device; 0 when nothing was."""
        return int(cast("bytes | None", self.client.get(wire.budget_key(device, model))) or 0)

    def learn_budget(self, device: str, model: str, tokens: int) -> None:
        """Remember a budget; it is forgotten after a week, and then tried again."""
        self.client.set(wire.budget_key(device, model), tokens, ex=BUDGET_SECONDS)

    # What a worker says about a job.

    def agree(self, job: str, fingerprint: Mapping[str, str]) -> None:
        """Make sure that every worker of a job has the same model files.

        The first worker's fingerprint becomes the job's, unless the submitter gave one.

        Raises:
            ModelRefused: This worker's differs; the message names the components that do.
            JobGone: There is no such job.
        """
        ours = json.dumps(dict(fingerprint), sort_keys=True)
        agreed = self.job(job).note("fingerprint", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        differing = differences(json.loads(agreed), fingerprint)
        if differing:
            raise ModelRefused(f"another model than the job's: {', '.join(differing)} differ")

    def fingerprint(self, job: str) -> dict[str, str]:
        """The fingerprint that the job's workers agreed on, empty before the first one."""
        data = cast("bytes | None", self.client.hget(wire.JobKeys(job).meta, "fingerprint"))
        return {} if data is None else dict(json.loads(data))

    def agree_on_tokens(self, job: str, recipe: TokenRecipe | None) -> None:
        """Make sure that every worker of a job can read its token ids.

        The first worker's recipe becomes the job's. Without one its blocks are texts, which all
        workers can read.

        Raises:
            ModelRefused: This worker's recipe differs.
            JobGone: There is no such job.
        """
        ours = encode(recipe) if recipe else b""
        agreed = self.job(job).note("recipe", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        if agreed not in {b"", ours}:
            raise ModelRefused("this worker's tokenizer does not make the job's token ids")

    def recipe(self, job: str) -> TokenRecipe | None:
        """How token ids for a job are made; None before the workers said so, or if they need texts.

        Raises:
            embedfarm.records.RecordError: A worker of another version has said it.
        """
        data = cast("bytes | None", self.client.hget(wire.JobKeys(job).meta, "recipe"))
        return decode(TokenRecipe, data) if data else None

    def account(self, job: str, worker: str, incarnation: str, account: Account) -> None:
        """Note what a worker has done for a job so far, in place of what it noted before."""
        self.job(job).note(f"account:{worker}#{incarnation}", encode(account))

    def accounts(self, job: str) -> dict[str, Account]:
        """Accounts by worker, those of its restarts added up."""
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.JobKeys(job).meta))
        accounts: defaultdict[str, Account] = defaultdict(Account)
        for name in sorted(stored):
            if name.startswith(b"account:"):
                worker = name.decode().removeprefix("account:").rpartition("#")[0]
                accounts[worker].add(decode(Account, stored[name]))
        return dict(accounts)

    def refuse(self, job: str, worker: str, reason: str) -> None:
        """Note that a worker cannot embed a job, for people and for the submitter."""
        self.job(job).note(f"refused:{worker}", reason)

    def refusals(self, job: str) -> dict[str, str]:
        """Reasons by worker name."""
        stored = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.JobKeys(job).meta))
        return {
            name.decode().removeprefix("refused:"): reason.decode()
            for name, reason in stored.items()
            if name.startswith(b"refused:")
        }


def readable(kind: type[R], name: bytes, rows: Iterable[Any]) -> Iterator[tuple[float, R]]:
    """Records of entries, each after its Unix time; what this version cannot read is skipped."""
    for entry, fields in rows:
        with contextlib.suppress(RecordError, KeyError):
            yield int(entry.split(b"-")[0]) / 1000, decode(kind, fields[name])


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the components in which two fingerprints differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
