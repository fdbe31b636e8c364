"""A simulated run: jobs, modelled workers and the scheduler's core on a virtual clock.

Nothing of the rules is repeated here: `decide` plans, `History` and `Ledger` learn. Modelled are
the workers (a micro-batch prefetched, heartbeats that are up to a second old, leases that expire)
and the loop (a decision shortly after a completion, and at least every half second).
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.records import Completion, JobShare, Rate
from embedfarm.contract.settings import Settings
from embedfarm.scheduler.history import History, rate_key
from embedfarm.scheduler.ledger import Demand, Ledger
from embedfarm.scheduler.loop import DECISION_SECONDS_MAX, DECISION_SECONDS_MIN
from embedfarm.scheduler.observer import TAIL_LEASES_MAX
from embedfarm.scheduler.passes import Pass, decide
from embedfarm.scheduler.simulation.machines import (
    HeldBlocks,
    ModelledWorker,
    TimelineEntry,
    fluid_bound,
    make_workers,
)
from embedfarm.scheduler.simulation.modelled_jobs import JobRun, make_job
from embedfarm.scheduler.simulation.scenario import Scenario
from embedfarm.scheduler.speculative_copies import SpeculativeCopies
from embedfarm.scheduler.state import FarmState, WorkerState

IDLE_SECONDS: Final = 0.25  # an idle worker looks for expired leases and copies this often
LEAD_SECONDS: Final = 0.15  # before a micro-batch ends, the next one is leased

Action = Callable[[float], None]


class Stuck(EmbedfarmError, RuntimeError):
    """Raised when a simulated farm came to nothing: the workers are dead, or stand still."""


@dataclass
class Outcome:
    """Figures of a simulated run.

    Attributes:
        makespan: Seconds until the last commit.
        ideal: The makespan if all machines shared all work without friction: the fluid bound.
        job_ended: Seconds of each job's last commit.
        worker_ended: Seconds of each worker's last commit.
        worker_tokens: Tokens that each worker committed first.
        copied_tokens: Tokens leased a second time, at the tail.
        spans: All micro-batches.
        decision_seconds: Real time of each decision.
        loads: Time, worker and model of each loading, in seconds of the run.
    """

    makespan: float
    ideal: float
    job_ended: Mapping[str, float]
    worker_ended: Mapping[str, float]
    worker_tokens: Mapping[str, float]
    copied_tokens: float
    spans: Sequence[TimelineEntry]
    decision_seconds: Sequence[float]
    loads: Sequence[tuple[float, str, str]]

    @property
    def efficiency(self) -> float:
        """Share of the ideal speed that was reached."""
        return self.ideal / self.makespan


class Simulation:
    """One run of a scenario under a policy; the same seed gives the same run."""

    def __init__(
        self, scenario: Scenario, passes: Sequence[Pass], settings: Settings, seed: int
    ) -> None:
        speeds = [machine.tokens_per_second for machine in scenario.machines]
        self.jobs = [make_job(work, speeds, settings) for work in scenario.work]
        costs = sum(float(job.costs.sum()) for job in self.jobs)
        last = max(work.arrives_seconds for work in scenario.work)
        self._by_name = {job.work.name: job for job in self.jobs}
        self.workers = make_workers(scenario, last + costs / sum(speeds), seed)
        self._scenario = scenario
        self._passes = passes
        self._settings = settings
        self._random = np.random.default_rng((seed, 1))
        self._history = History(settings.rate_half_life_seconds)
        self._ledger = Ledger(settings.tenant_weights)
        self._copies = SpeculativeCopies()
        self._shares: Mapping[str, Sequence[JobShare]] = {}
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()
        self._decision_at = 0.0
        self._copied_tokens = 0.0
        self._spans: list[TimelineEntry] = []
        self._decision_seconds: list[float] = []
        self._loads: list[tuple[float, str, str]] = []

    def run(self) -> Outcome:
        """Run until all jobs are done.

        Raises:
            Stuck: The jobs never will be done.
        """
        self._remember()
        for worker in self.workers:
            self._at(worker.beat_phase, partial(self._beat, worker))
            self._at(worker.machine.stops_seconds, partial(self._stop, worker))
            self._at(worker.machine.wakes_seconds, partial(self._fetch, worker))
            self._fetch(worker, 0.0)
        for job in self.jobs:
            self._at(job.work.arrives_seconds, self._decide_by)
        self._decide(0.0)
        end = self.workers[0].horizon
        while not all(job.finished for job in self.jobs):
            if not self._events or self._events[0][0] > end:
                raise Stuck(f"{self._scenario.name}: jobs are not done after {end:.0f} s")
            now, _, action = heapq.heappop(self._events)
            action(now)
        arrivals = [(j.work.arrives_seconds, float(j.costs.sum())) for j in self.jobs]
        return Outcome(
            makespan=max(job.ended for job in self.jobs),
            ideal=fluid_bound(arrivals, self.workers),
            job_ended={job.work.name: job.ended for job in self.jobs},
            worker_ended={worker.name: worker.ended for worker in self.workers},
            worker_tokens={worker.name: worker.tokens for worker in self.workers},
            copied_tokens=self._copied_tokens,
            spans=self._spans,
            decision_seconds=self._decision_seconds,
            loads=self._loads,
        )

    def _at(self, when: float, action: Action) -> None:
        if when < math.inf:
            heapq.heappush(self._events, (when, next(self._order), action))

    def _remember(self) -> None:
        """Put into the history what earlier jobs would have left there."""
        if self._scenario.history_error is None:
            return
        stored = {}
        for worker in self.workers:
            wrong = float(self._random.lognormal(0.0, self._scenario.history_error))
            for job in self.jobs:
                speed = worker.machine.tokens_per_second * job.tokens.sum() / job.costs.sum()
                stored[rate_key(worker.name, job.work.model, job.length_class)] = Rate(
                    tokens_per_second=float(speed) * wrong,
                    overhead_seconds=self._scenario.overhead_seconds,
                    updated=-math.inf,
                    samples=1,
                )
        self._history.recall(stored)

    # A worker: lease ahead, embed, commit.

    def _beat(self, worker: ModelledWorker, now: float) -> None:
        if worker.alive(now):
            worker.beat_at = now
        self._at(now + self._settings.heartbeat_seconds, partial(self._beat, worker))

    def _stop(self, worker: ModelledWorker, now: float) -> None:
        """Let a worker fall silent; its blocks can be leased again when its leases have expired."""
        self._at(now + self._settings.lease_seconds, partial(self._expire, worker))

    def _expire(self, worker: ModelledWorker, now: float) -> None:
        if not worker.alive(now):
            for job in self.jobs:
                job.expire(worker.name)

    def _fetch(self, worker: ModelledWorker, now: float) -> None:
        """Lease the next micro-batch; with nothing to lease and nothing in hand, copy."""
        if worker.ready or not worker.alive(now):
            return
        batch = self._lease(worker, now)
        if batch is None:
            if worker.looks_at <= now:
                worker.looks_at = now + IDLE_SECONDS
                self._at(worker.looks_at, partial(self._fetch, worker))
        elif worker.current is None:
            self._start(worker, batch, now)
        else:
            worker.ready = batch

    def _lease(self, worker: ModelledWorker, now: float) -> HeldBlocks | None:
        """Lease, or copy, from the first share of the plan of which there is anything.

        A model is loaded before anything is leased for it: beside the others if it fits, else once
        nothing is held for those that have to go.
        """
        shares = self._shares.get(worker.name, ())
        own = {self._by_name[share.job].work.model for share in shares if not share.ahead}
        for share in shares:
            if share.ahead:
                self._load(worker, self._by_name[share.job], worker.in_hand | own, now)
        for share in (each for each in shares if not each.ahead):
            job = self._by_name[share.job]
            model = job.work.model
            if model not in worker.resident:
                if not self._load(worker, job, worker.in_hand, now):
                    return None
                if model not in worker.resident:
                    continue
            worker.resident.remove(model)
            worker.resident.append(model)
            if blocks := job.lease(worker.name, share.blocks):
                return HeldBlocks(job, blocks, copied=False)
            places = (int(each.split("-")[0]) - 1 for each in share.copies)
            copies = [block for block in places if not job.done[block]]
            if copies and not worker.current:
                self._copied_tokens += float(job.tokens[copies].sum())
                return HeldBlocks(job, copies, copied=True)
        return None

    def _load(
        self, worker: ModelledWorker, job: JobRun, needed: Collection[str], now: float
    ) -> bool:
        """Have a worker load the model of a job; return False where those needed are in the way."""
        model = job.work.model
        if not job.waiting or worker.loading or model in worker.resident:
            return True
        gone = worker.victims(model, self._scenario.model_bytes, needed)
        if gone is None:
            return False
        worker.resident = [each for each in worker.resident if each not in gone]
        self._loads.append((now, worker.name, model))
        worker.loading = model
        seconds = self._scenario.load_seconds.get(model, 0.0)
        if seconds:
            self._at(now + seconds, partial(self._end_load, worker))
        else:
            self._keep(worker, now)
        return True

    def _end_load(self, worker: ModelledWorker, now: float) -> None:
        self._keep(worker, now)
        self._fetch(worker, now)

    def _keep(self, worker: ModelledWorker, now: float) -> None:
        worker.resident.append(worker.loading)
        worker.loading, worker.loaded_at = "", now

    def _start(self, worker: ModelledWorker, batch: HeldBlocks, now: float) -> None:
        worker.current, worker.ready, worker.began = batch, None, now
        sigma = self._scenario.noise
        noise = worker.random.lognormal(-sigma * sigma / 2, sigma)
        begin = now + self._scenario.overhead_seconds
        end = worker.finish(begin, float(batch.job.costs[batch.blocks].sum()) * noise)
        self._at(max(now, end - LEAD_SECONDS), partial(self._fetch, worker))
        if worker.random.random() < self._scenario.stalls:
            end += float(worker.random.exponential(self._scenario.stall_seconds))
        self._at(end, partial(self._end, worker, batch))

    def _end(self, worker: ModelledWorker, batch: HeldBlocks, now: float) -> None:
        tokens = float(batch.job.tokens[batch.blocks].sum())
        fresh = batch.job.commit(batch.blocks, now)
        if fresh:
            worker.ended = now
        worker.tokens += fresh
        name = batch.job.work.name
        self._spans.append(
            TimelineEntry(worker.name, name, worker.began, now, tokens, batch.copied)
        )
        self._learn(worker, batch.job, len(batch.blocks), tokens, now)
        worker.current = None
        if worker.ready is not None:
            self._start(worker, worker.ready, now)
        else:
            self._fetch(worker, now)

    def _learn(
        self, worker: ModelledWorker, job: JobRun, blocks: int, tokens: float, now: float
    ) -> None:
        completion = Completion(
            worker=worker.name,
            model=job.work.model,
            job=job.work.name,
            chunks=blocks * job.block_chunks,
            tokens=int(tokens),
            padded_tokens=int(tokens),
            real_tokens=int(tokens),
            seconds=now - worker.began,
            overhead_seconds=self._scenario.overhead_seconds,
            pairs=int(job.pairs[worker.current.blocks].sum()) if worker.current else 0,
        )
        self._copies.completed(worker.name)
        self._history.learn([completion], {job.work.name: job.chunk_tokens_mean}, now)
        self._decide_by(now + DECISION_SECONDS_MIN)

    # The loop.

    def _decide_by(self, when: float) -> None:
        if when < self._decision_at:
            self._decision_at = when
            self._at(when, self._decide)

    def _decide(self, now: float) -> None:
        if now < self._decision_at:
            return
        state = self._look(now)
        began = time.perf_counter()
        self._shares = decide(state, self._passes).shares
        self._decision_seconds.append(time.perf_counter() - began)
        self._copies.told(self._shares)
        self._decision_at = now + DECISION_SECONDS_MAX
        self._at(self._decision_at, self._decide)
        for worker in self.workers:
            if not worker.current and not worker.ready and self._shares.get(worker.name):
                self._at(now + 0.005, partial(self._fetch, worker))

    def _look(self, now: float) -> FarmState:
        """Return the farm as the scheduler sees it."""
        present = [j for j in self.jobs if j.work.arrives_seconds <= now and not j.finished]
        workers = tuple(
            WorkerState(
                worker.name,
                max(0.0, now - worker.began) if worker.current else 0.0,
                resident=frozenset(filter(None, [*worker.resident, worker.loading])),
                memory_bytes=worker.machine.memory_bytes,
                loaded_seconds=0.0 if worker.loading else now - worker.loaded_at,
            )
            for worker in self.workers
            if now - worker.beat_at < self._settings.heartbeat_ttl_seconds
        )
        kinds = {(job.work.model, job.length_class) for job in present}
        rates = {kind: self._history.rates(*kind) for kind in kinds}
        speeds = {
            kind: sum(rate.tokens_per_second for rate in known.values())
            for kind, known in rates.items()
        }
        demands = [
            Demand(
                job.work.name,
                job.work.tenant,
                job.work.weight,
                job.leased_tokens,
                speeds[job.work.model, job.length_class],
                job.waiting > 0,
            )
            for job in present
        ]
        services = self._ledger.charge(demands, now)
        names = [job.work.name for job in present]
        copies, _ = self._copies.look(names, {worker.name for worker in workers})
        states = tuple(
            job.state(services[job.work.name], TAIL_LEASES_MAX, copies[job.work.name])
            for job in present
        )
        seen = {model for at, _, model in self._loads}
        return FarmState(
            states,
            workers,
            rates,
            now,
            model_bytes=self._scenario.model_bytes,
            load_seconds={m: s for m, s in self._scenario.load_seconds.items() if m in seen},
        )
