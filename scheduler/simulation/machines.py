"""Modelled workers: how fast they are at any time, and what they hold."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.simulation.jobs import JobRun
from scheduler.simulation.scenario import Machine, Scenario

DRIFT_KEPT = 0.95  # of a deviation from the mean speed, after a second
HORIZON = 20.0  # a run ends before so many times the ideal time, and some seconds


@dataclass(frozen=True)
class Batch:
    """Blocks of one job that a worker holds.

    Attributes:
        job: The job.
        blocks: Its blocks.
        copied: Another worker holds the leases.
    """

    job: JobRun
    blocks: Sequence[int]
    copied: bool


@dataclass
class Worker:
    """The state of a modelled worker.

    Attributes:
        name: Its name.
        machine: What it is.
        capacity: Tokens that it can do until each second of the run.
        random: Its own, so that what happens to it does not depend on the policy's timing.
        beat_phase: When in a second it beats.
        current: On the device.
        ready: Leased ahead.
        began: When `current` was started.
        model: Loaded.
        looks_at: When it looks for work again, if it has none.
        beat_at: When it last said that it lives.
        tokens: Committed first by this worker.
        ended: When it last committed something.
    """

    name: str
    machine: Machine
    capacity: list[float]
    random: np.random.Generator
    beat_phase: float
    current: Batch | None = None
    ready: Batch | None = None
    began: float = 0.0
    model: str = ""
    looks_at: float = 0.0
    beat_at: float = 0.0
    tokens: float = 0.0
    ended: float = 0.0

    def done_by(self, now: float) -> float:
        """Tokens that it could do until `now`."""
        second = min(int(now), len(self.capacity) - 2)
        first, after = self.capacity[second : second + 2]
        return first + (now - second) * (after - first)

    def finish(self, start: float, tokens: float) -> float:
        """When `tokens` tokens begun at `start` are through."""
        wanted = self.done_by(start) + tokens
        second = min(bisect_right(self.capacity, wanted) - 1, len(self.capacity) - 2)
        first, after = self.capacity[second : second + 2]
        return second + (wanted - first) / (after - first) if after > first else math.inf

    @property
    def horizon(self) -> float:
        """Until when its speed is known."""
        return len(self.capacity) - 1.0

    def alive(self, now: float) -> bool:
        """Whether it does anything at all."""
        return not self.machine.stops_seconds <= now < self.machine.wakes_seconds


@dataclass(frozen=True)
class Span:
    """A micro-batch on a device, for the timeline.

    Attributes:
        worker: Name of the worker.
        job: Id of the job.
        begin: In seconds.
        end: In seconds.
        tokens: In it.
        copied: Whether another worker had leased it.
    """

    worker: str
    job: str
    begin: float
    end: float
    tokens: float
    copied: bool


def make_workers(scenario: Scenario, ideal_seconds: float, seed: int) -> list[Worker]:
    """Workers with the speeds that they will have."""
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
        workers.append(Worker(name, machine, capacity, own[place], float(phases[place])))
    return workers


def _drift(scenario: Scenario, seconds: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Factors of speed, shape (seconds, machines): an autoregressive process of log speed."""
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


def fluid_bound(arrivals: Sequence[tuple[float, float]], workers: Sequence[Worker]) -> float:
    """When work that comes at these times is done, if all share all of it without friction.

    Args:
        arrivals: Seconds, and tokens of short chunks.
        workers: Those who share.
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
