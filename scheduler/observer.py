"""The farm as a decision sees it: the server's records, and rates learned from completions."""

import math
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import msgspec
import redis

from embedfarm.contract.backlog import Backlog, read_backlogs
from embedfarm.contract.device_kinds import kind_of, price_of
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.entries import Pending
from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.job_spec import model_key, weights_of
from embedfarm.contract.model_states import ready
from embedfarm.contract.records import Completion, Heartbeat, Rate
from embedfarm.contract.roll_call import RollCall
from embedfarm.contract.sizing import FarmRoom, results_free
from embedfarm.contract.status import JobGone, is_gone
from embedfarm.contract.window import FarmWindow
from embedfarm.scheduler.history import History
from embedfarm.scheduler.ledger import Demand, Ledger
from embedfarm.scheduler.speculative_copies import SpeculativeCopies
from embedfarm.scheduler.state import FarmState, JobState, WorkerState

ACTIVE: Final = frozenset({"open", "closed", "paused"})
TAIL_LEASES_MAX: Final = 4000  # with more, the end is not near


@dataclass
class Observer:
    """Reads the farm, and remembers what single looks do not show.

    Attributes:
        history: Rates of the workers, learned from completions.
        ledger: Service that jobs and tenants have had.
        window: Room that all jobs may take on the server.
        copies: Speculative copies, and which worker makes which.
        model_bytes: Device memory that models took, where it is known, by `weights_of` their keys.
        load_seconds: Time that they took to load where they were loaded last, in the same way.
        beats: Heartbeats of the live workers at the last look, by name.
        lost: Names of the workers that were lost at the last look.
        roll: Reads the heartbeats.
    """

    farm: FarmClient
    history: History
    ledger: Ledger
    window: FarmWindow
    copies: SpeculativeCopies = field(default_factory=SpeculativeCopies)
    model_bytes: dict[str, int] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    beats: Mapping[str, Heartbeat] = field(default_factory=dict)
    lost: AbstractSet[str] = frozenset()
    roll: RollCall = field(init=False)
    _models: dict[str, str] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)
    _said: dict[str, WorkerState] = field(default_factory=dict)  # by the heartbeats alone
    _began: dict[str, float] = field(default_factory=dict)
    _loaded: dict[str, float] = field(default_factory=dict)  # when a worker last loaded a model
    _moved: dict[str, float] = field(default_factory=dict)  # when jobs last had blocks

    def __post_init__(self) -> None:
        seconds = self.window.settings.heartbeat_ttl_seconds
        self.roll = RollCall(self.farm.client, self.farm.on_unreadable, seconds)

    def learn(self, completions: Sequence[Completion]) -> None:
        """Take in what workers have done; each has gone on to its next micro-batch, if any."""
        self.history.learn(completions, self._means, time.time())
        for done in completions:
            self.copies.completed(done.worker)
        now = time.monotonic()
        self._began |= {done.worker: now for done in completions}

    def predict(self, done: Completion) -> float:
        """Predict a micro-batch's seconds as if it had not been done yet; 0 if unknown."""
        mean = self._means.get(done.job, done.tokens / max(1, done.chunks))
        return self.history.predict(done, mean)

    def take_rates(self, now: float) -> tuple[Mapping[str, Rate], list[str]]:
        """Return what `History.take_changes` does, each rate with its worker's kind and price.

        So that they are known after the worker is gone, and the farm has none of its kind left.
        """
        changes, old = self.history.take_changes(now)
        named = {
            key: msgspec.structs.replace(rate, kind=kind_of(beat), cost_per_hour=price_of(beat))
            for key, rate in changes.items()
            if (beat := self.beats.get(key.partition("|")[0]))
        }
        return {**changes, **named}, old

    def look(self) -> FarmState:
        """Read the farm as it is now."""
        found = read_backlogs(self.farm.client, self.farm.job_ids())
        backlogs = [each for each in found if each.status.state in ACTIVE and self._known(each)]
        self._models = {each.job: self._models[each.job] for each in backlogs}
        self._means = {each.job: each.status.chunk_tokens_mean for each in backlogs}
        before = self.beats
        workers = self._workers()
        restarted = self._restarted(before)
        lengths = {each.job: length_class(each.status.chunk_tokens_mean) for each in backlogs}
        kinds = {(self._models[each.job], lengths[each.job]) for each in backlogs}
        rates = {kind: self.history.rates(*kind) for kind in kinds}
        takers = {worker.name for worker in workers if not worker.draining}
        speeds = {
            kind: sum(r.tokens_per_second for name, r in known.items() if name in takers)
            for kind, known in rates.items()
        }
        services = self.ledger.charge(
            [
                Demand(
                    each.job,
                    each.status.tenant,
                    each.status.weight,
                    each.status.tokens_in - each.waiting_blocks * each.status.block_tokens_mean,
                    speeds[self._models[each.job], lengths[each.job]],
                    each.waiting_blocks > 0,
                )
                for each in backlogs
            ],
            time.monotonic(),
        )
        tail = not any(each.waiting_blocks for each in backlogs if each.status.state != "paused")
        copies, lost = self.copies.look(self._models.keys(), self.beats.keys(), restarted)
        idle_seconds = self._idle_seconds(backlogs)
        room = self.window.look()
        jobs = tuple(
            JobState(
                each.job,
                self._models[each.job],
                each.status,
                each.waiting_blocks,
                lengths[each.job],
                each.held_blocks,
                self._leases(each) if tail else (),
                services[each.job],
                copies[each.job],
                lost[each.job],
                idle_seconds[each.job],
                self._is_stranded(each, room),
            )
            for each in backlogs
        )
        return FarmState(
            jobs, workers, rates, time.time(), None, self.model_bytes, self.load_seconds, room
        )

    def _is_stranded(self, backlog: Backlog, room: FarmRoom) -> bool:
        """Tell whether a job has no room for results, and a lease that nobody renews.

        That may be of a live worker, which has handed it back, or was started again.
        """
        settings = self.window.settings
        if not backlog.held_blocks or backlog.status.result_bytes < results_free(settings, room):
            return False
        try:
            return self.farm.job(backlog.job).stream.has_expired(settings.lease_seconds)
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            return False  # it has ended since its backlog was read

    def _restarted(self, before: Mapping[str, Heartbeat]) -> set[str]:
        """Return the workers that were started again since an earlier look."""
        return {
            name
            for name, beat in self.beats.items()
            if name in before and before[name].incarnation != beat.incarnation
        }

    def _idle_seconds(self, backlogs: Sequence[Backlog]) -> Mapping[str, float]:
        """Return by job the time since it was last seen with blocks that wait or are leased."""
        now, before = time.monotonic(), self._moved
        self._moved = {
            each.job: now
            if each.waiting_blocks or each.held_blocks
            else before.get(each.job, -math.inf)
            for each in backlogs
        }
        return {job: now - at for job, at in self._moved.items()}

    def _known(self, backlog: Backlog) -> bool:
        """Tell whether the job's model is known; its spec is read once."""
        if backlog.job not in self._models:
            try:
                self._models[backlog.job] = model_key(self.farm.job(backlog.job).spec())
            except JobGone:
                return False
            except RecordError:
                self._models[backlog.job] = ""  # its workers refuse it, and say why
        return True

    def _leases(self, backlog: Backlog) -> tuple[Pending, ...]:
        """Return the leases of a job, if they are few enough for its end to be near."""
        if not 0 < sum(backlog.held_blocks.values()) <= TAIL_LEASES_MAX:
            return ()
        job = self.farm.job(backlog.job)
        try:
            return tuple(job.stream.pending(job.keys.blocks, None, TAIL_LEASES_MAX))
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            return ()  # it has ended since its backlog was read

    def _workers(self) -> tuple[WorkerState, ...]:
        """Return live workers; what heartbeats say of current work is brought up to date."""
        now = time.monotonic()
        alive, lost_seconds = self.roll.call()
        for beat in alive:
            if beat is not self.beats.get(beat.worker):
                self._note(beat, now)
        self.beats, self.lost = {beat.worker: beat for beat in alive}, lost_seconds.keys()
        self._said = {name: self._said[name] for name in self.beats}
        self._began = {name: self._began[name] for name in self.beats}
        self._loaded = {name: at for name, at in self._loaded.items() if name in self.beats}
        self._loaded |= {name: now for name, said in self._said.items() if not said.loaded_seconds}
        return tuple(
            WorkerState(
                name,
                now - self._began[name] if self.beats[name].held_tokens else 0.0,
                said.draining,
                said.resident,
                said.memory_bytes,
                said.refused,
                now - self._loaded.get(name, -math.inf),
            )
            for name, said in self._said.items()
        )

    def _note(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat that was not seen before."""
        name, before = beat.worker, self.beats.get(beat.worker)
        if beat != before:
            self._began[name] = max(self._began.get(name, 0.0), now - beat.held_seconds)
        resident = _resident(beat)
        loading = any(each.state == "loading" for each in beat.models)
        if before is not None and resident - _resident(before):
            self._loaded[name] = now
        for each in ready(beat.models):
            weights = weights_of(each.model)
            if each.bytes:
                self.model_bytes[weights] = each.bytes
            if each.load_seconds:
                self.load_seconds[weights] = each.load_seconds
        self._said[name] = WorkerState(
            name,
            draining=beat.state == "draining",
            resident=resident,
            memory_bytes=int(beat.device_facts.get("memory_total_bytes", 0)),
            refused=frozenset(beat.refused),
            loaded_seconds=0.0 if loading else math.inf,
        )


def _resident(beat: Heartbeat) -> frozenset[str]:
    """Return the models that a worker has loaded, or is loading."""
    named = [each.model for each in beat.models if each.state in {"ready", "loading"}]
    # A worker of a version that had one model at a time says no more than that.
    return frozenset(weights_of(key) for key in named or [beat.loading or beat.model] if key)
