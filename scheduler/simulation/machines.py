"""Modelled workers: their speed at any time, and the blocks that they hold."""

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedfarm.scheduler.simulation.modelled_jobs import JobRun
from embedfarm.scheduler.simulation.scenario import Machine, Scenario

DRIFT_KEPT = 0.95  # share of a deviation from the mean speed that is left after a second
HORIZON = 20.0  # a run ends before so many times the ideal time, and some seconds


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks of one job that a worker holds.

    Attributes:
        job: The job.
        blocks: Numbers of the blocks.
        copied: Whether another worker holds the leases.
    """

    job: JobRun
    blocks: Sequence[int]
    copied: bool


@dataclass
class ModelledWorker:
    """The state of a modelled worker.

    Attributes:
        name: Name of the worker.
        machine: The worker as the scenario describes it.
        capacity: Tokens that it can do until each second of the run.
        random: Random numbers of its own, so that what happens to it does not depend on the
            policy's timing.
        beat_phase: Time of its first heartbeat, 0 to 1 s.
        current: Micro-batch on the device.
        ready: Micro-batch leased ahead.
        began: Time when `current` was started.
        resident: Models that are loaded, those first that were not used for longest.
        loading: Model that is being loaded, "" for none.
        loaded_at: Time when it last had loaded a model.
        looks_at: Time when it looks for work again, if it has none.
        beat_at: Time of its last heartbeat.
        tokens: Tokens that were committed first by this worker.
        ended: Time when it last committed something.
    """

    name: str
    machine: Machine
    capacity: list[float]
    random: np.random.Generator
    beat_phase: float
    current: HeldBlocks | None = None
    ready: HeldBlocks | None = None
    began: float = 0.0
    resident: list[str] = field(default_factory=list)
    loading: str = ""
    loaded_at: float = -math.inf
    looks_at: float = 0.0
    beat_at: float = 0.0
    tokens: float = 0.0
    ended: float = 0.0

    def done_by(self, now: float) -> float:
        """Return the tokens that the worker could do until `now`."""
        second = min(int(now), len(self.capacity) - 2)
        first, after = self.capacity[second : second + 2]
        return first + (now - second) * (after - first)

    def finish(self, start: float, tokens: float) -> float:
        """Return the time when `tokens` tokens begun at `start` are done."""
        wanted = self.done_by(start) + tokens
        second = min(bisect_right(self.capacity, wanted) - 1, len(self.capacity) - 2)
        first, after = self.capacity[second : second + 2]
        return second + (wanted - first) / (after - first) if after > first else math.inf

    @property
    def horizon(self) -> float:
        """Time until which the worker's speed is known, in seconds of the run."""
        return len(self.capacity) - 1.0

    @property
    def in_hand(self) -> set[str]:
        """Models that the micro-batches in hand need."""
        held = (self.current, self.ready)
        return {batch.job.work.model for batch in held if batch is not None}

    def victims(
        self, model: str, sizes: Mapping[str, int], needed: Collection[str]
    ) -> list[str] | None:
        """Return the models that go for another one; None while those `needed` are in the way.

        Where the device's memory, or what a model takes of it, is not known, one model is loaded
        at a time.
        """
        kept, gone = list(self.resident), list[str]()
        while kept and not self._fit([*kept, model], sizes):
            idle = next((each for each in kept if each not in needed), None)
            if idle is None:
                return None
            kept.remove(idle)
            gone.append(idle)
        return gone

    def _fit(self, models: Sequence[str], sizes: Mapping[str, int]) -> bool:
        memory = self.machine.memory_bytes
        if not memory or not sizes.keys() >= set(models):
            return len(models) == 1
        return sum(sizes[model] for model in models) <= memory

    def alive(self, now: float) -> bool:
        """Tell whether the worker does anything at all."""
        return not self.machine.stops_seconds <= now < self.machine.wakes_seconds


@dataclass(frozen=True)
class TimelineEntry:
    """A micro-batch on a device, for the timeline.

    Attributes:
        worker: Name of the worker.
        job: Id of the job.
        begin: Beginning in seconds of the run.
        end: End in seconds of the run.
        tokens: Tokens in the micro-batch.
        copied: Whether another worker had leased its blocks.
    """

    worker: str
    job: str
    begin: float
    end: float
    tokens: float
    copied: bool


def make_workers(scenario: Scenario, ideal_seconds: float, seed: int) -> list[ModelledWorker]:
    """Make the workers of a scenario, with the speeds that they will have at any time."""
    random, *own = np.random.default_rng(seed).spawn(len(scenario.machines) + 1)
    unlucky = int(random.integers(len(scenario.machines)))
    phases = random.random(len(scenario.machines))
    factors = _drift(scenario, int(HORIZON * ideal_seconds) + 60, random)
    workers = []
    for place, machine in enumerate(scenario.machines):
        speeds = machine.tokens_per_second * factors[:, place]
        if place == unlucky:
            speeds[int(0.3 * ideal_seconds) :] *= scenario.drop
        _stand_still(speeds, machine)
        capacity = [0.0, *np.cumsum(speeds).tolist()]
        name = f"worker-{place}"
        workers.append(ModelledWorker(name, machine, capacity, own[place], float(phases[place])))
    return workers


def _drift(scenario: Scenario, seconds: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return speed factors, shape (seconds, machines): an autoregressive process of log speed."""
    steps = random.normal(0.0, 1.0, (seconds, len(scenario.machines))) * scenario.drift
    logs = np.zeros_like(steps)
    for second in range(1, seconds):
        logs[second] = DRIFT_KEPT * logs[second - 1] + steps[second]
    return np.exp(logs)


def _stand_still(speeds: NDArray[np.float64], machine: Machine) -> None:
    """Take out of the seconds' speeds the time in which a machine does nothing."""
    seconds = np.arange(len(speeds))
    first = np.clip(machine.stops_seconds, seconds, seconds + 1)
    last = np.clip(machine.wakes_seconds, seconds, seconds + 1)
    speeds *= 1 - (last - first)


def fluid_bound(
    arrivals: Sequence[tuple[float, float]], workers: Sequence[ModelledWorker]
) -> float:
    """Return when work that comes at these times is done, if all share it without friction.

    Args:
        arrivals: Time in seconds, and cost in tokens of short chunks, of each job.
        workers: Workers that share the work.
    """
    total = np.sum([worker.capacity for worker in workers], axis=0)
    seconds = np.arange(len(total))
    now, left = 0.0, 0.0
    for arrives, tokens in [*sorted(arrivals), (math.inf, 0.0)]:
        before = np.interp(now, seconds, total)
        end = float(np.interp(before + left, total, seconds))
        if end > arrives:
            left -= float(np.interp(arrives, seconds, total) - before)
            now = arrives
        elif tokens:
            left, now = 0.0, arrives
        else:
            return end
        left += tokens
    return now
