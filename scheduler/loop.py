"""The thin loop around the core: read the farm, decide, publish, tell. All I/O is here."""

import gc
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.broker import PAUSE_SECONDS_MAX, UNAVAILABLE, connect, host_name
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.formatting import format_seconds
from embedfarm.contract.records import Decision, JobShare, Plan
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.contract.window import FarmWindow
from embedfarm.scheduler.change_watch import ChangeWatch
from embedfarm.scheduler.history import History
from embedfarm.scheduler.ledger import Ledger
from embedfarm.scheduler.observer import Observer
from embedfarm.scheduler.passes import Pass, PassFailed, decide
from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES, UnknownPass, make_passes
from embedfarm.scheduler.samples import Sampler, new_samplers
from embedfarm.scheduler.state import Draft, FarmState
from embedfarm.scheduler.statistics import Statistics

DECISION_SECONDS_MIN: Final = 0.05  # completions that come closer together share a decision
DECISION_SECONDS_MAX: Final = 0.5  # jobs and workers come and go without a completion
REMEMBER_SECONDS: Final = 2.0
TELL_SECONDS: Final = 1.0
NOTES_MAX: Final = 2000  # in a decision that is told

log = logging.getLogger(__name__)


@dataclass
class Scheduler:
    """One scheduler process; the holder of the lock plans, any number of others stand by.

    Attributes:
        tick: Called with "active" or "standing by" each time that the loop has gone round.
    """

    url: str
    settings: Settings
    stop: threading.Event
    tick: Callable[[str], object] = lambda _status: None
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    fence: int = 0
    passes: Sequence[Pass] = ()
    _observer: Observer = field(init=False)
    _samplers: tuple[Sampler, Sampler] = field(init=False)  # of ten seconds, and of ten minutes
    _statistics: Statistics = field(default_factory=Statistics)
    _changes: ChangeWatch = field(default_factory=ChangeWatch)
    _seen: str = "$"  # ID of the last event
    _remember_at: float = 0.0
    _tell_at: float = 0.0
    _chosen: Sequence[str] | None = None
    _dropped: dict[str, str] = field(default_factory=dict)
    _late: AbstractSet[str] = frozenset()
    _shares: Mapping[str, Sequence[JobShare]] = field(default_factory=dict)
    _due: Mapping[str, float] = field(default_factory=dict)  # when plans are published again

    def __post_init__(self) -> None:
        self.farm = FarmClient(connect(self.url))
        self._observer = self._new_observer()
        self._samplers = new_samplers()

    def _new_observer(self) -> Observer:
        history = History(self.settings.rate_half_life_seconds)
        window = FarmWindow(self.farm.client, self.settings)
        return Observer(self.farm, history, Ledger(self.settings.tenant_weights), window)

    def run(self) -> None:
        """Plan until `stop` is set; an outage of the server is waited out."""
        while not self.stop.is_set():
            try:
                self._step()
            except UNAVAILABLE as error:
                log.warning("server away, trying again: %s", error)
                self.fence = 0
                self.stop.wait(PAUSE_SECONDS_MAX)
            self.tick("active" if self.fence else "standing by")
        try:
            self._hand_over()
        except UNAVAILABLE as error:
            log.warning("lock not given back: %s", error)

    def _step(self) -> None:
        """Make one decision, if the lock is ours; then wait for something to happen."""
        held = self.fence
        self.fence = self.farm.plans.elect(self.token, self.settings.scheduler_ttl_seconds)
        if not self.fence:
            gc.collect(generation=1)
            self.stop.wait(self.settings.scheduler_ttl_seconds / 5)
            return
        if self.fence != held:
            self._take_over()
        self._choose(self.farm.plans.policy())
        if self._decide():
            self._listen()

    def _take_over(self) -> None:
        """Go on from what the last holder of the lock stored, and from the events from now on."""
        note = f"that at {host_name()}, with fencing token {self.fence}"
        self.farm.timeline.add(FarmEvent(kind="took over", note=note))
        self._changes = ChangeWatch()
        self._observer = self._new_observer()
        self._observer.history.recall(self.farm.statistics.history())
        self._statistics = Statistics()
        self._samplers = new_samplers()
        self._chosen = None
        self._due = {}
        seconds, microseconds = self.farm.client.time()
        self._seen = f"{seconds * 1000 + microseconds // 1000}-0"

    def _hand_over(self) -> None:
        """Store the throughput history, and let a standby take over at once."""
        if self.fence:
            self._remember()
            self.farm.plans.abdicate(self.fence)

    def _remember(self) -> None:
        self.farm.statistics.remember(*self._observer.take_rates(time.time()))

    # Deciding.

    def _choose(self, names: Sequence[str]) -> None:
        """Follow the policy that an operator chose, from this decision on."""
        if names == self._chosen:
            return
        self._chosen, self._dropped = names, {}
        try:
            self.passes = make_passes(names or POLICIES[DEFAULT_POLICY], self.settings)
        except UnknownPass as error:
            log.warning("policy not followed: %s", error)
            self._dropped[", ".join(names)] = str(error)
            self.passes = self.passes or make_passes(POLICIES[DEFAULT_POLICY], self.settings)
        log.info("passes: %s", ", ".join(each.name for each in self.passes))

    def _decide(self) -> bool:
        """Plan for all workers; False when another scheduler has taken over."""
        began = time.perf_counter()
        state = self._observer.look()
        draft = self._draft(state)
        now = time.monotonic()
        plans = plans_of(self._to_publish(draft, now), self.fence)
        wake = self._idle_with_news(draft)
        if not self.farm.plans.publish(plans, self.fence, self.settings.plan_ttl_seconds, wake):
            log.warning("fenced: another scheduler is active")
            self.fence = 0
            return False
        seconds = time.perf_counter() - began
        self._statistics.decided(state, seconds, now)
        self._shares = draft.shares
        self._observer.copies.told(draft.shares)
        seen = self._observer
        self.farm.timeline.add(*self._changes.look(seen.beats, seen.lost, state.jobs))
        if now >= self._tell_at:
            self._tell(state, seconds, now)
        statistics = self.farm.statistics
        for sampler, keep in zip(
            self._samplers, (statistics.sample, statistics.long_sample), strict=True
        ):
            sample = sampler.take(state, now)
            if sample is not None:
                keep(sample)
        return True

    def _draft(self, state: FarmState, *, explain: bool = False) -> Draft:
        """Make a decision; a pass that raises is left out from now on."""
        while True:
            try:
                return decide(state, self.passes, explain=explain)
            except PassFailed as error:
                log.exception("pass %s failed, left out", error.name)
                self.farm.timeline.add(FarmEvent(kind="pass failed", note=str(error)))
                self._dropped[error.name] = str(error)
                self.passes = [each for each in self.passes if each.name != error.name]

    def _to_publish(self, draft: Draft, now: float) -> Mapping[str, Sequence[JobShare]]:
        """Return the shares that changed, and those whose plan would lapse: few at a time."""
        before, due = self._shares, self._due
        found = {
            name: made
            for name, made in draft.shares.items()
            if made != before.get(name) or now >= due.get(name, now)
        }
        # Those that were published together are not all due together.
        least, count = self.settings.plan_ttl_seconds / 8, len(found)
        again = {name: now + least * (1 + place / count) for place, name in enumerate(found)}
        self._due = {name: again.get(name) or due[name] for name in draft.shares}
        return found

    def _idle_with_news(self, draft: Draft) -> list[str]:
        """Return the workers that hold nothing, and wait while their plan has changed."""
        busy = {worker for job in draft.state.jobs for worker in job.held_blocks}
        return [
            worker
            for worker, shares in draft.shares.items()
            if worker not in busy and shares and shares != self._shares.get(worker)
        ]

    def _tell(self, state: FarmState, seconds: float, now: float) -> None:
        """Let people see the last decision and the figures."""
        draft = self._draft(state, explain=True)
        names = [each.name for each in self.passes]
        kept = draft.notes[:NOTES_MAX]
        decision = Decision(
            time=time.time(),
            seconds=seconds,
            passes=names,
            notes=[(note.name, note.words) for note in kept],
            workers=[note.worker for note in kept],
            left_out=dict(Counter(note.name for note in draft.notes[NOTES_MAX:])),
        )
        self.farm.plans.tell(
            decision, self._statistics.figures(names, self._dropped, draft.late, now)
        )
        for job in sorted(draft.late.keys() - self._late):
            note = f"by {format_seconds(draft.late[job])}, as things are"
            self.farm.timeline.add(FarmEvent(kind="late", job=job, note=note))
        self._late = draft.late.keys()
        self._tell_at = time.monotonic() + TELL_SECONDS

    # Learning.

    def _listen(self) -> None:
        """Wait for the first completion after a short pause, and learn from all that have come."""
        gc.collect(generation=1)
        self.stop.wait(DECISION_SECONDS_MIN)
        wait = min(DECISION_SECONDS_MAX, self.settings.plan_ttl_seconds / 4)
        self._seen, completions = self.farm.statistics.events(self._seen, wait)
        predicted = [self._observer.predict(done) for done in completions]
        now = time.monotonic()
        self._statistics.completed(zip(completions, predicted, strict=True), now)
        self._observer.learn(completions)
        for sampler in self._samplers:
            sampler.completed(completions)
        if now >= self._remember_at:
            self._remember()
            gc.collect()
            self._remember_at = now + REMEMBER_SECONDS


def run_alone(url: str, settings: Settings, stop: threading.Event, notifier: Notifier) -> None:
    """Run a scheduler that has its process to itself: garbage is collected between decisions."""
    gc.disable()
    Scheduler(url, settings, stop, notifier.tick).run()
    notifier.stop()


def plans_of(shares: Mapping[str, Sequence[JobShare]], fence: int) -> list[Plan]:
    """Return the plans that shares amount to, one for each worker."""
    return [Plan(worker=name, fence=fence, shares=list(made)) for name, made in shares.items()]
