"""Tests of what is forecast of a job, second by second, while workers come, stop and go on."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle

import msgspec
import numpy as np
import pytest

from embedfarm.contract.outlook import chunk_rates, live_paces, outlook
from embedfarm.contract.pace import NOW_SECONDS, Pace, Range, TimedMicroBatch, who_works
from embedfarm.contract.records import Sample
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.samples import SAMPLE_SECONDS
from tests.contract.little_job import heartbeat

BEGAN = 1000.0
CHUNKS = 12_000
RATE = 100.0  # chunks per second of each worker
BATCH_SECONDS = 2.0
TOLERANCE = 0.3
SOON_SECONDS = 5.0
LONG = 250.0  # longer than any run

Span = tuple[float, float]
Bars = Sequence[TimedMicroBatch]


@dataclass(frozen=True)
class Run:
    """A job as it went; times are seconds since its first micro-batch.

    Attributes:
        workers: Micro-batches of each worker, oldest first.
        low_from: From when on the fastest of the rates is right: 5 s after something happened.
        high_from: From when on the slowest of the rates is right as well.
        sampled: When a sample of the scheduler ends, as others do all ten seconds.
        resumed: When the job was resumed after a pause.
        gone: Workers that went, with the time.
    """

    workers: Mapping[str, Bars]
    low_from: float = SOON_SECONDS
    high_from: float = SOON_SECONDS
    sampled: float = 0.0
    resumed: float = 0.0
    gone: Mapping[str, float] = field(default_factory=dict)

    def left(self, at: float) -> int:
        """Return the chunks that have no vector yet at a time."""
        own = (each for each in chain(*self.workers.values()) if each.job == "job")
        return max(0, CHUNKS - sum(each.chunks for each in own if each.end <= BEGAN + at))

    def end(self) -> float:
        """Return when the last chunk has its vector."""
        ends = sorted(each.end - BEGAN for each in chain(*self.workers.values()))
        return next(end for end in ends if not self.left(end))

    def forecast(self, at: float) -> Range | None:
        """Return what was forecast at a time, from the work before it."""
        now = BEGAN + at
        batches, beats = {}, []
        for name, bars in self.workers.items():
            if recent := [each for each in bars if now - NOW_SECONDS < each.end <= now]:
                batches[name] = recent
            busy = any(each.start <= now < each.end for each in bars)
            if at < self.gone.get(name, math.inf):
                state = "busy" if busy else "idle"
                beats.append(msgspec.structs.replace(heartbeat(name), state=state))
        status = JobStatus(
            state="closed",
            chunk_count=CHUNKS,
            chunks_done=CHUNKS - self.left(at),
            first_read_ms=int(1000 * BEGAN),
            resumed_ms=int(1000 * (BEGAN + self.resumed)) if 0 < self.resumed <= at else 0,
        )
        begun = {"job": status.begun_at}
        pace = live_paces(batches, beats, now, begun).by_job.get("job", Pace())
        rates = chunk_rates(self._samples(now), now, begun, beats, who_works(batches, now))
        return outlook(status, pace, rates.get("job", [])).seconds_left

    def _samples(self, now: float) -> list[tuple[float, Sample]]:
        """Return the samples of the last five minutes, oldest first."""
        ends = BEGAN + self.sampled + SAMPLE_SECONDS * np.arange(-30, 31)
        samples = []
        for end in map(float, ends[ends <= now][-30:]):
            done: defaultdict[str, Counter[str]] = defaultdict(Counter)
            started = set()
            for name, bars in self.workers.items():
                for each in bars:
                    if end - SAMPLE_SECONDS < each.end <= end:
                        done[each.job][name] += each.tokens
                        started |= {name} if each.first else set()
            jobs = {job: (by.total(), by.total() // 10) for job, by in done.items()}
            shares = {job: dict(by) for job, by in done.items()}
            samples.append((end, Sample(SAMPLE_SECONDS, {}, jobs, 0, 1, shares, list(started))))
        return samples


def work(*spans: Span, jobs: Sequence[str] = ("job",), first: bool = True) -> list[TimedMicroBatch]:
    """Return the micro-batches of a worker in spans of time; jobs take turns.

    The first one in each span is a short probe, and if `first`, that of another process.
    """
    bars: list[TimedMicroBatch] = []
    for begin, end in spans:
        at, seconds, is_first = begin, BATCH_SECONDS / 8, first
        for job in cycle(jobs):
            at += seconds
            if at > end:
                break
            chunks = int(RATE * seconds)
            bars.append(TimedMicroBatch(BEGAN + at, seconds, job, chunks, 10 * chunks, is_first))
            seconds, is_first = BATCH_SECONDS, False
    return bars


def stalled(bars: Bars, at: float, seconds: float) -> list[TimedMicroBatch]:
    """Return micro-batches of which the one in work at a time took longer, and all later ones."""
    return [
        each._replace(
            end=each.end + (seconds if each.end > BEGAN + at else 0),
            seconds=each.seconds + (seconds if each.start <= BEGAN + at < each.end else 0),
        )
        for each in bars
    ]


def both(bars: Bars) -> dict[str, Bars]:
    """Return two workers that do the same."""
    return {"one": bars, "two": bars}


STEADY = work((0, LONG))
RUNS = {
    "constant": Run(both(STEADY)),
    "begun within a sample": Run(both(STEADY), sampled=1),
    "a late worker": Run({"one": STEADY, "two": work((14, LONG))}, 19, 19, sampled=4),
    "a worker that joins": Run({"one": STEADY, "two": work((42, LONG))}, 47, 47, sampled=7),
    "a worker that goes": Run(
        {"one": STEADY, "two": work((0, 31))}, 37, 37, sampled=4, gone={"two": 37}
    ),
    "a worker again": Run({"one": STEADY, "two": work((0, 15), (24, LONG))}, 29, 29),
    "all workers again": Run(both(work((0, 9), (16, LONG))), 21, 21, sampled=6),
    "the only worker again": Run({"one": work((0, 1), (18, 19), (34, LONG))}, 39, 39, sampled=8),
    "a pause": Run(both([*work((0, 20)), *work((27, LONG), first=False)]), 32, 32, resumed=27),
    "a long pause": Run(
        both([*work((0, 20)), *work((55, LONG), first=False)]), 60, 60, sampled=4, resumed=55
    ),
    "a stall at the start": Run(both(stalled(STEADY, 1, 8)), 25, 45, sampled=1),
    "after another job": Run(
        both([*work((-60, 0), jobs=["other"]), *work((0, LONG), first=False)]), sampled=3
    ),
    "a worker of another job before": Run(
        {
            "one": STEADY,
            "two": [*work((-60, 14), jobs=["other"]), *work((14, LONG), first=False)],
        },
        19,
        19,
        sampled=4,
    ),
    "beside another job": Run(
        {
            "one": work((-60, LONG), jobs=["job", "other"]),
            "two": work((-60, LONG), jobs=["other", "job"]),
        }
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_forecasts_are_right_soon(name: str) -> None:
    """Both ends of what is forecast are right within 30 %, soon after anything happened.

    It may be a micro-batch more or less, since what workers have in hand counts as left, and the
    last ones are not of one size.
    """
    run = RUNS[name]
    end = run.end()
    wrong = []
    for at in range(int(run.low_from), int(end)):
        seen, truth = run.forecast(at), end - at
        least = (1 - TOLERANCE) * truth - BATCH_SECONDS
        most = (1 + TOLERANCE) * truth + BATCH_SECONDS
        upto = seen and (seen.high if at >= run.high_from else seen.low)
        if seen is None or upto is None or seen.low < least or upto > most:
            wrong.append((at, seen, truth))
    assert not wrong
    assert end > run.high_from + 20
