"""The farm on the server: its jobs and its workers, and handles on all else that it has there."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, cast

from embedfarm.contract import wire
from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.broker import if_room
from embedfarm.contract.encoding import encode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.farm_statistics import FarmStatistics
from embedfarm.contract.farm_timeline import Timeline
from embedfarm.contract.job_reports import JobReports
from embedfarm.contract.job_spec import Decides, JobSpec, decided_by
from embedfarm.contract.jobs import Job
from embedfarm.contract.load_attempts import LoadLedger
from embedfarm.contract.model_counts import ModelCounters
from embedfarm.contract.model_orders import ModelOrders
from embedfarm.contract.model_states import ModelState, ready
from embedfarm.contract.plans import Plans
from embedfarm.contract.process_log import ProcessLogs
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.roll_call import RollCall
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import Cause, EndState, JobStatus
from embedfarm.contract.unreadable_records import (
    names_of,
)

PLACE_SECONDS: Final = 60  # a place without a job: its creator is at work on it, or died
RETRY_SECONDS_MAX: Final = 3600


class FarmFull(EmbedfarmError, RuntimeError):
    """Raised when there are as many unfinished jobs as the farm takes.

    Attributes:
        retry_after_seconds: Time after which it is worth trying again: that which the farm needs
            for the work it was sent, 1 second to 1 hour.
    """

    exit_status = 75

    def __init__(self, jobs: int, retry_after_seconds: int) -> None:
        super().__init__(
            f"the farm is full ({jobs:,} jobs), try again in {retry_after_seconds:,} s"
        )
        self.retry_after_seconds = retry_after_seconds


def engine_key(spec: JobSpec) -> str:
    """Return a digest of all in a spec that decides which engine serves it, and its vectors."""
    decisive = {**decided_by(spec, Decides.VECTORS), "engine": spec.engine}
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def loaded_models(beats: Collection[Heartbeat]) -> set[str]:
    """Return the models that workers have loaded, by the names that jobs and requests use."""
    keys = {beat.model for beat in beats} | {s.model for beat in beats for s in ready(beat.models)}
    return {key.partition("|")[0] for key in keys if key}


def model_rows(beats: Iterable[Heartbeat]) -> list[tuple[str, ModelState]]:
    """Return all workers' models, each with the worker's name, ordered by model and worker."""
    rows = [(beat.worker, each) for beat in beats for each in beat.models]
    return sorted(rows, key=lambda row: (row[1].model, row[0]))


def length_class(tokens_mean: float) -> int:
    """Return the class of jobs with chunks of similar length: log2 of the mean, rounded down."""
    return max(0, int(tokens_mean).bit_length() - 1)


@dataclass
class FarmClient(FarmKeys):
    """A farm's jobs and workers; `embedfarm.contract.tenants` has what one tenant sees of it.

    Its other keys are in eight parts: `reports` has what workers say about jobs, `plans` what the
    scheduler tells them, `statistics` what the farm remembers about its speed, `loads` the models
    whose loading ended a worker, `models` those that people want loaded, kept or unloaded,
    `model_counts` what was done with each, `timeline` what has happened, and `logs` what its
    processes have logged.

    Attributes:
        actor: Who acts through this farm, for the timeline; "" for the program's own account.
    """

    actor: str = field(default="", kw_only=True)

    @cached_property
    def reports(self) -> JobReports:
        """Reports of workers about jobs."""
        return JobReports(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def plans(self) -> Plans:
        """Plans of the scheduler, its decisions and its figures."""
        return Plans(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def statistics(self) -> FarmStatistics:
        """Statistics of the farm: rates, samples, budgets."""
        return FarmStatistics(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def loads(self) -> LoadLedger:
        """Loads of models that have not come to an end."""
        return LoadLedger(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def models(self) -> ModelOrders:
        """Orders of models, which workers follow."""
        return ModelOrders(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def model_counts(self) -> ModelCounters:
        """Counters of models: loads, unloads, requests."""
        return ModelCounters(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the farm: what has happened."""
        return Timeline(self.client, self.on_unreadable, tenant=self.tenant)

    @cached_property
    def logs(self) -> ProcessLogs:
        """Logs of the farm's processes."""
        return ProcessLogs(self.client, self.on_unreadable, tenant=self.tenant)

    def job(self, job: str, owner: str = "") -> Job:
        """Return a handle on one job, for the owner of an output if one is named."""
        return Job(self.client, job, owner, actor=self.actor)

    def exists(self, job: str) -> bool:
        """Tell whether there is such a job, or a record of it."""
        return bool(self.client.exists(wire.JobKeys(job).meta))

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs on the farm's list, oldest first."""
        return names_of(self.client.zrange(wire.JOBS, 0, -1))

    def ended_ids(self, count: int) -> list[str]:
        """Return the ids of the last `count` jobs that have ended, of all for 0, newest first."""
        return names_of(self.client.zrange(wire.ENDED, 0, count - 1, desc=True))

    def end(  # noqa: PLR0913 # the last two are for those who need them
        self,
        job: str,
        state: EndState,
        reason: str,
        settings: Settings,
        *,
        owner: str = "",
        cause: Cause = "",
        **counters: int,
    ) -> None:
        """End a job as `Job.end` does, and delete surplus or old records of ended jobs.

        Raises:
            JobGone: There is no such job, or it is another owner's.
        """
        self.job(job, owner).end(state, reason, settings.ended_seconds_max, cause, **counters)
        before = time.time() - settings.ended_seconds_max
        old = names_of(self.client.zrangebyscore(wire.ENDED, "-inf", before))
        for name in old:
            self._forget(name)
        for name in self._surplus(settings.ended_jobs_max):
            self._forget(name)

    def _surplus(self, kept: int) -> list[str]:
        """Return the ended jobs of which there are too many: the oldest of whoever has most.

        To find them takes a look at all, so that a tenth more than are to be kept is let pass.
        """
        if self.client.zcard(wire.ENDED) <= kept + kept // 10:
            return []
        newest = self.ended_ids(0)
        tenants, ranks = self._tenants(newest), Counter[object]()
        order = list[tuple[int, int, str]]()  # each tenant's newest first, then its next one, …
        for place, (name, tenant) in enumerate(zip(newest, tenants, strict=True)):
            order.append((ranks[tenant], place, name))
            ranks[tenant] += 1
        return [name for *_, name in sorted(order)[kept:]]

    def _forget(self, job: str) -> None:
        """Remove what is left of a job that has ended; one that was made anew stays."""
        keys = wire.JobKeys(job)
        others = [each for each in keys.all() if each != keys.meta]
        if self._script("forget")(keys=[keys.meta, *others]) == b"forgotten":
            self.client.zrem(wire.JOBS, job)
        self.client.zrem(wire.ENDED, job)

    def endings(self) -> dict[tuple[str, str], int]:
        """Return how many jobs have ended, by state and cause; the counts only grow."""
        counts = cast("Mapping[bytes, bytes]", self.client.hgetall(wire.ENDINGS))
        return {
            (state, cause): int(count)
            for name, count in counts.items()
            for state, _, cause in [name.decode(errors="replace").partition(" ")]
            if count.isdigit()
        }

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
        """Reserve a place for a new job; a job that exists already needs none.

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
        tokens = sum(each.tokens_left for each in statuses)
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
        """Take a worker off the list at once, on a clean stop, and let the scheduler look."""
        pipe = self.client.pipeline(transaction=False)
        pipe.unlink(wire.worker_key(worker))
        pipe.zrem(wire.WORKERS, worker)
        pipe.xadd(wire.EVENTS, {"left": worker}, maxlen=wire.EVENTS_MAX, approximate=True)
        with if_room():
            pipe.execute()

    def workers(self) -> list[Heartbeat]:
        """Return heartbeats of live workers, ordered by name; forget workers gone for an hour."""
        return self.call_roll()[0]

    def heartbeat_left_ms(self, worker: str) -> int:
        """Return the time in ms after which a worker's last heartbeat lapses; negative if none."""
        return self.client.pttl(wire.worker_key(worker))

    def call_roll(self) -> tuple[list[Heartbeat], dict[str, float]]:
        """Return live workers' heartbeats, and by name the seconds since each lost one was seen.

        Workers count as lost for an hour. One that stops cleanly is taken off the list, and does
        not count as lost.
        """
        return RollCall(self.client, self.on_unreadable).call()
