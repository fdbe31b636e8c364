"""The thin loop around the core: read the farm, decide, publish. All I/O is here."""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import redis

from embedfarm.broker import PAUSE_SECONDS_MAX, UNAVAILABLE, connect
from embedfarm.farm import Farm, model_key
from embedfarm.jobs import JobGone
from embedfarm.records import Plan, Rate
from embedfarm.settings import Settings
from scheduler.history import History
from scheduler.passes import Pass, decide, default_passes
from scheduler.state import Draft, FarmState, JobState, WorkerState

DECISION_SECONDS_MIN: Final = 0.05  # completions that come closer together share a decision
DECISION_SECONDS_MAX: Final = 0.5  # jobs and workers come and go without a completion
REMEMBER_SECONDS: Final = 2.0
TAIL_LEASES_MAX: Final = 4000  # with more, the end is not near
ACTIVE: Final = frozenset({"open", "closed", "paused"})

log = logging.getLogger(__name__)


@dataclass
class Scheduler:
    """One scheduler process; the holder of the lock plans, any number of others stand by."""

    url: str
    settings: Settings
    stop: threading.Event
    passes: Sequence[Pass] = ()
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    fence: int = 0
    _history: History = field(init=False)
    _seen: str = "$"  # ID of the last event
    _remember_at: float = 0.0
    _models: dict[str, str] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.farm = Farm(connect(self.url))
        self.passes = self.passes or default_passes(self.settings)
        self._history = History(self.settings.rate_half_life_seconds)

    def run(self) -> None:
        """Plan until `stop` is set; an outage of the server is waited out."""
        while not self.stop.is_set():
            try:
                self._step()
            except UNAVAILABLE as error:
                log.warning("server away, trying again: %s", error)
                self.fence = 0
                self.stop.wait(PAUSE_SECONDS_MAX)
        try:
            self._hand_over()
        except UNAVAILABLE as error:
            log.warning("lock not given back: %s", error)

    def _step(self) -> None:
        """One decision, if the lock is ours; then wait for something to happen."""
        held = self.fence
        self.fence = self.farm.elect(self.token, self.settings.scheduler_ttl_seconds)
        if not self.fence:
            self.stop.wait(self.settings.scheduler_ttl_seconds / 5)
            return
        if self.fence != held:
            self._take_over()
        draft = decide(self._look(), self.passes)
        plans = plans_of(draft, self.fence)
        if not self.farm.publish(plans, self.fence, self.settings.plan_ttl_seconds):
            log.warning("fenced: another scheduler is active")
            self.fence = 0
            return
        self._listen()

    def _take_over(self) -> None:
        """Go on from what the last holder of the lock stored, and from the events of now."""
        log.info("active, fence %d", self.fence)
        self._history = History(self.settings.rate_half_life_seconds, self.farm.history())
        seconds, microseconds = self.farm.client.time()
        self._seen = f"{seconds * 1000 + microseconds // 1000}-0"

    def _hand_over(self) -> None:
        """Store what was learned, and let a standby go on at once."""
        if self.fence:
            self.farm.remember(*self._history.take_changes(time.time()))
            self.farm.abdicate(self.fence)

    def _listen(self) -> None:
        """Learn from completions; waits for the first one after a short pause."""
        self.stop.wait(DECISION_SECONDS_MIN)
        wait = min(DECISION_SECONDS_MAX, self.settings.plan_ttl_seconds / 4)
        self._seen, completions = self.farm.events(self._seen, wait)
        self._history.learn(completions, self._means, time.time())
        if time.monotonic() >= self._remember_at:
            self.farm.remember(*self._history.take_changes(time.time()))
            self._remember_at = time.monotonic() + REMEMBER_SECONDS

    def _look(self) -> FarmState:
        """The farm as it is now."""
        jobs = [state for name in self.farm.job_ids() if (state := self._job(name)) is not None]
        self._models = {job.job: job.model for job in jobs}
        self._means = {job.job: job.status.chunk_tokens_mean for job in jobs}
        workers = tuple(
            WorkerState(beat.worker, beat.held_seconds, draining=beat.state == "draining")
            for beat in self.farm.workers()
        )
        rates: dict[tuple[str, str], Rate] = {}
        for job in jobs:
            for worker in workers:
                rate = self._history.rate(worker.name, job.model, job.status.chunk_tokens_mean)
                if rate is not None:
                    rates[worker.name, job.job] = rate
        return FarmState(tuple(jobs), workers, rates)

    def _job(self, name: str) -> JobState | None:
        """One job, None when it is finished or gone."""
        job = self.farm.job(name)
        try:
            status = job.status()
            if status.state not in ACTIVE:
                return None
            model = self._models.get(name) or model_key(job.spec())
            waiting, held = job.backlog()
            tail = not waiting and 0 < held <= TAIL_LEASES_MAX
            leases = job.pending(job.keys.blocks, None, TAIL_LEASES_MAX) if tail else ()
        except JobGone:
            return None
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):  # a pipeline puts words before it
                raise
            return None
        return JobState(name, model, status, waiting, tuple(leases))


def plans_of(draft: Draft, fence: int) -> list[Plan]:
    """The plans that a decision amounts to, one for each worker."""
    return [
        Plan(worker=worker, fence=fence, shares=list(shares))
        for worker, shares in draft.shares.items()
    ]
