"""The scheduler's own core on a virtual clock, with modelled workers instead of devices.

Nothing of the rule is repeated here: `decide` sizes, `History` learns. Modelled are the workers
(speed, noise, drift, stalls, a micro-batch prefetched, heartbeats that are up to a second old) and
the loop (a decision at least every half second, and 0.05 s after a completion).
"""

import functools
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest

from embedfarm.farm import length_class
from embedfarm.jobs import JobStatus, Pending
from embedfarm.records import Completion, JobShare, Rate
from embedfarm.settings import Settings
from scheduler.history import History, rate_key
from scheduler.passes import decide, default_passes
from scheduler.state import FarmState, JobState, WorkerState

SETTINGS: Final = Settings()
MODEL: Final = "model"
CHUNK_TOKENS: Final = 100
IDLE_SECONDS: Final = 0.25  # an idle worker asks again after this long
DECISION_SECONDS: Final = (0.05, 0.5)  # after a completion, and at least
SPEEDS: Final = tuple(2000 * 4 ** (i / 7) for i in range(8))  # tokens/s, 4x spread
SEEDS: Final = range(10)


@dataclass(frozen=True)
class Scenario:
    """What happens to a job.

    Attributes:
        speeds: Tokens per second of each worker.
        ideal_seconds: Size of the job, in time at all these speeds together.
        history_error: Sigma of the lognormal error of what is remembered; None: nothing is.
        noise: Sigma of a micro-batch's time.
        drift: Sigma of the change of log speed in a second.
        overhead_seconds: Fixed device time of a micro-batch.
        stall: Share of the micro-batches that hang for 10 s more on average.
        drop: One worker falls to this share of its speed after 30 % of the ideal time.
    """

    speeds: tuple[float, ...] = SPEEDS
    ideal_seconds: float = 50.0
    history_error: float | None = 0.3
    noise: float = 0.1
    drift: float = 0.05
    overhead_seconds: float = 0.02
    stall: float = 0.0
    drop: float = 1.0


@dataclass
class Machine:
    """A modelled worker.

    Attributes:
        name: Its name.
        speeds: Tokens per second in each second of the run.
        beat_phase: When in a second it beats.
        current: Blocks on the device.
        ready: Blocks leased ahead.
        began: When `current` was started.
        tokens: Committed first by this worker.
        ended: When it last committed something.
        told: What its last heartbeat said.
    """

    name: str
    speeds: Sequence[float]
    beat_phase: float
    current: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    began: float = 0.0
    tokens: int = 0
    ended: float = 0.0
    told: WorkerState = field(init=False)

    def finish(self, start: float, tokens: float) -> float:
        """When `tokens` tokens begun at `start` are through."""
        now = start
        while True:
            speed = self.speeds[min(int(now), len(self.speeds) - 1)]
            until = int(now) + 1
            if speed * (until - now) >= tokens:
                return now + tokens / speed
            tokens -= speed * (until - now)
            now = float(until)


class Simulation:
    """One job of equal blocks on modelled workers."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.random = random.Random(seed)
        total = scenario.ideal_seconds * sum(scenario.speeds)
        self.block_tokens = int(SETTINGS.block_seconds * min(scenario.speeds))
        self.block_count = round(total / self.block_tokens)
        self.machines = self._machines()
        self.history = History(SETTINGS.rate_half_life_seconds)
        self._remember()
        self.waiting = 0  # first block that nobody has leased
        self.owners: dict[int, str] = {}
        self.done: set[int] = set()
        self.batches = 0
        self.copied_tokens = 0
        self.shares: dict[str, JobShare] = {}
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.decision_at = 0.0
        self.makespan = 0.0

    def _machines(self) -> list[Machine]:
        scenario = self.scenario
        unlucky = self.random.randrange(len(scenario.speeds))
        machines = []
        for number, base in enumerate(scenario.speeds):
            log_speed, speeds = 0.0, []
            for second in range(int(20 * scenario.ideal_seconds) + 20):
                dropped = number == unlucky and second >= 0.3 * scenario.ideal_seconds
                speeds.append(base * math.exp(log_speed) * (scenario.drop if dropped else 1.0))
                log_speed = 0.95 * log_speed + self.random.gauss(0, scenario.drift)
            machines.append(Machine(f"worker-{number}", speeds, self.random.random()))
        return machines

    def _remember(self) -> None:
        if self.scenario.history_error is None:
            return
        for machine, speed in zip(self.machines, self.scenario.speeds, strict=True):
            wrong = self.random.lognormvariate(0, self.scenario.history_error)
            self.history.rates[rate_key(machine.name, MODEL, length_class(CHUNK_TOKENS))] = Rate(
                tokens_per_second=speed * wrong, overhead_seconds=0.02, updated=0, samples=1
            )

    def run(self) -> float:
        """Share of the ideal speed that was reached: fluid bound over makespan."""
        for machine in self.machines:
            machine.told = WorkerState(machine.name)
            self._at(machine.beat_phase, self._beat(machine))
        self._decide(0.0)
        for machine in self.machines:
            self._fetch(machine, 0.0)
        while len(self.done) < self.block_count:
            now, _, action = heapq.heappop(self.events)
            action(now)
        return self._ideal() / self.makespan

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), action))

    def _ideal(self) -> float:
        left = float(self.block_count * self.block_tokens)
        for second in itertools.count():
            total = sum(machine.speeds[second] for machine in self.machines)
            if total >= left:
                return second + left / total
            left -= total
        raise AssertionError("never reached")

    # A worker: lease ahead, embed, commit.

    def _beat(self, machine: Machine) -> Callable[[float], None]:
        def beat(now: float) -> None:
            machine.told = WorkerState(
                machine.name, now - machine.began if machine.current else 0.0
            )
            self._at(now + SETTINGS.heartbeat_seconds, beat)

        return beat

    def _fetch(self, machine: Machine, now: float) -> None:
        """Lease the next micro-batch; with nothing to lease and nothing in hand, copy."""
        if machine.ready:
            return
        share = self.shares[machine.name]
        end = min(self.block_count, self.waiting + share.blocks)
        machine.ready = list(range(self.waiting, end))
        self.owners.update(dict.fromkeys(machine.ready, machine.name))
        self.waiting = end
        if not machine.ready and not machine.current:
            copies = [int(each.split("-")[0]) - 1 for each in share.copies]
            machine.ready = [block for block in copies if block not in self.done]
            self.copied_tokens += len(machine.ready) * self.block_tokens
        if machine.ready and not machine.current:
            self._start(machine, now)
        elif not machine.ready:
            self._at(now + IDLE_SECONDS, lambda later: self._fetch(machine, later))

    def _start(self, machine: Machine, now: float) -> None:
        machine.current, machine.ready, machine.began = machine.ready, [], now
        self.batches += 1
        sigma = self.scenario.noise
        work = len(machine.current) * self.block_tokens
        noisy = work * self.random.lognormvariate(-sigma * sigma / 2, sigma)
        end = machine.finish(now + self.scenario.overhead_seconds, noisy)
        if self.random.random() < self.scenario.stall:
            end += self.random.expovariate(1 / 10)
        self._at(end, lambda later: self._end(machine, later))
        self._fetch(machine, now)

    def _end(self, machine: Machine, now: float) -> None:
        fresh = [block for block in machine.current if block not in self.done]
        self.done.update(fresh)
        for block in fresh:
            del self.owners[block]
        if fresh:
            self.makespan = machine.ended = now
        machine.tokens += len(fresh) * self.block_tokens
        self._learn(machine, now)
        machine.current = []
        if machine.ready:
            self._start(machine, now)
        elif self.waiting == self.block_count:
            self._fetch(machine, now)

    def _learn(self, machine: Machine, now: float) -> None:
        tokens = len(machine.current) * self.block_tokens
        completion = Completion(
            worker=machine.name,
            model=MODEL,
            job="job",
            chunks=tokens // CHUNK_TOKENS,
            tokens=tokens,
            padded_tokens=tokens,
            real_tokens=tokens,
            seconds=now - machine.began,
            overhead_seconds=self.scenario.overhead_seconds,
        )
        self.history.learn([completion], {"job": CHUNK_TOKENS}, now)
        self._decide_by(now + DECISION_SECONDS[0])

    # The loop.

    def _decide_by(self, when: float) -> None:
        if when < self.decision_at:
            self.decision_at = when
            self._at(when, self._decide)

    def _decide(self, now: float) -> None:
        if now < self.decision_at:
            return
        draft = decide(self._look(), default_passes(SETTINGS))
        self.shares = {name: shares[0] for name, shares in draft.shares.items()}
        self.decision_at = now + DECISION_SECONDS[1]
        self._at(self.decision_at, self._decide)

    def _look(self) -> FarmState:
        tokens = self.block_count * self.block_tokens
        status = JobStatus(
            state="closed",
            blocks_in=self.block_count,
            chunks_in=tokens // CHUNK_TOKENS,
            tokens_in=tokens,
            blocks_done=len(self.done),
            tokens_done=len(self.done) * self.block_tokens,
        )
        tail = self.waiting == self.block_count
        leases = [
            Pending("in", f"{block + 1}-0", owner, 0, 1)
            for block, owner in sorted(self.owners.items() if tail else ())
        ]
        job = JobState("job", MODEL, status, self.block_count - self.waiting, tuple(leases))
        rates = {
            (machine.name, "job"): rate
            for machine in self.machines
            if (rate := self.history.rate(machine.name, MODEL, CHUNK_TOKENS)) is not None
        }
        return FarmState((job,), tuple(machine.told for machine in self.machines), rates)


@functools.cache
def efficiencies(scenario: Scenario) -> list[float]:
    """What is reached, for each seed."""
    return [Simulation(scenario, seed).run() for seed in SEEDS]


@pytest.mark.parametrize(
    ("scenario", "promised"),
    [
        pytest.param(Scenario(), 0.95, id="history wrong by 30 %"),
        pytest.param(Scenario(history_error=None), 0.95, id="cold start"),
        pytest.param(Scenario(drop=0.1), 0.95, id="one worker drops to 10 %"),
        pytest.param(Scenario(drift=0.15), 0.95, id="heavy drift"),
        pytest.param(Scenario(stall=0.005), 0.93, id="stalls of 10 s"),
        pytest.param(Scenario(ideal_seconds=5), 0.9, id="5 s of work"),
        pytest.param(Scenario(ideal_seconds=5, history_error=None), 0.88, id="5 s, cold"),
        pytest.param(Scenario(overhead_seconds=0.2), 0.85, id="overhead of 200 ms"),
    ],
)
def test_the_rule_comes_near_the_fluid_bound(scenario: Scenario, promised: float) -> None:
    """On average over the seeds the job takes hardly longer than at all speeds together.

    Of 200 ms overhead on a micro-batch of at most 2 s, 9 % cannot be avoided.
    """
    assert statistics.mean(efficiencies(scenario)) >= promised


@pytest.mark.parametrize("scenario", [Scenario(), Scenario(drop=0.1), Scenario(history_error=None)])
def test_no_seed_is_a_disaster(scenario: Scenario) -> None:
    """Static shares fall to a fifth where one worker drops; the worst seed here stays above 0.9."""
    assert min(efficiencies(scenario)) >= 0.9


def test_copies_are_rare() -> None:
    """Less than 3 % of the work is done twice even where one worker drops to 10 %."""
    for seed in SEEDS:
        simulation = Simulation(Scenario(drop=0.1), seed)
        simulation.run()
        total = simulation.block_count * simulation.block_tokens
        assert simulation.copied_tokens <= 0.03 * total


def test_two_unequal_workers_end_together() -> None:
    """A worker and one 4 times slower end within 10 % of the makespan, and share by speed."""
    for seed in SEEDS:
        simulation = Simulation(
            Scenario(speeds=(8000, 2000), ideal_seconds=20, history_error=None, drift=0.0), seed
        )
        simulation.run()
        fast, slow = simulation.machines
        assert abs(fast.ended - slow.ended) <= 0.1 * simulation.makespan
        assert fast.tokens / slow.tokens == pytest.approx(4, rel=0.15)
