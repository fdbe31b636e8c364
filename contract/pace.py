"""Pace of a farm, now and lately, and the time for the rest of its work that follows from it."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from embedfarm.contract.records import Completion

NOW_SECONDS: Final = 15.0  # "now": longer than the longest usual micro-batch
AVERAGE_SECONDS: Final = (60.0, 300.0)  # beside now, what times are forecast by
_ALWAYS: Final[Mapping[str, float]] = MappingProxyType({})  # jobs were begun long ago


class TimedMicroBatch(NamedTuple):
    """A micro-batch as a bar over time.

    Attributes:
        end: Unix seconds at which it was reported.
        seconds: Time that it took, with the overhead that the pipeline could not hide.
        job: The job its chunks came from.
        chunks: Chunks in it.
        tokens: Real tokens in it.
        first: Whether it is the first one of its worker's process.
    """

    end: float
    seconds: float
    job: str
    chunks: int
    tokens: int
    first: bool = False

    @property
    def start(self) -> float:
        """Unix seconds at which it was begun."""
        return self.end - self.seconds


def bars_of(done: Completion, end: float) -> list[TimedMicroBatch]:
    """Return what was done at a Unix time as a bar for each job, as long as its share of tokens."""
    jobs = done.by_job()
    whole = max(1, sum(tokens for tokens, _ in jobs.values()))
    bars, begun = list[TimedMicroBatch](), end - done.seconds
    for job, (tokens, chunks) in jobs.items():
        seconds = done.seconds * tokens / whole if len(jobs) > 1 else done.seconds
        begun += seconds
        first = done.first and not bars
        bars.append(TimedMicroBatch(begun, seconds, job, chunks, tokens, first))
    return bars


class Pace(NamedTuple):
    """Work done in a second: real tokens, and chunks."""

    tokens_per_second: float = 0.0
    chunks_per_second: float = 0.0


class PacesNow(NamedTuple):
    """Paces over the last `NOW_SECONDS`, by worker and by job."""

    by_worker: dict[str, Pace]
    by_job: dict[str, Pace]


class Range(NamedTuple):
    """Range of seconds: at least `low`, at most `high`."""

    low: float
    high: float


class WorkDone(NamedTuple):
    """Work that was done in some seconds.

    Attributes:
        end: Unix time of their end.
        seconds: Length of the time.
        amounts: Amounts of work, by name.
        workers: Workers that did it, by name.
        started: Workers of which a new process did its first micro-batch.
    """

    end: float
    seconds: float
    amounts: Mapping[str, int]
    workers: Mapping[str, Collection[str]] = MappingProxyType({})
    started: Collection[str] = ()


def paces_now(
    batches: Mapping[str, Sequence[TimedMicroBatch]],
    busy: Collection[str],
    now: float,
    begun: Mapping[str, float] = _ALWAYS,
) -> PacesNow:
    """Return the paces over the last `NOW_SECONDS`.

    A micro-batch counts as far as it lies within this time. A worker's time begins with its first
    micro-batch there, and lacks that in which its process was started again; a busy worker's time
    ends with its last one, since the next counts later. The time that a job has of a worker begins
    when the worker turns to it: what others had before is no part of it, unless they share.

    Args:
        batches: Micro-batches that ended within this time, by worker, oldest first.
        busy: Workers that have a micro-batch in hand, or cannot have one.
        now: Unix seconds.
        begun: Unix time at which each job was begun, or resumed: it had nothing before.
    """
    by_worker: dict[str, Pace] = {}
    by_job: defaultdict[str, Pace] = defaultdict(Pace)
    for worker, done in batches.items():
        until = done[-1].end if worker in busy else max(now, done[-1].end)
        time = _Time(now - NOW_SECONDS, until, _absences(done))
        by_worker[worker] = time.since(done[0].start).pace(done)
        own: defaultdict[str, list[TimedMicroBatch]] = defaultdict(list)
        for each in done:
            own[each.job].append(each)
        for job, start in _turns(done).items():
            mine = time.since(max(start, begun.get(job, start)))
            by_job[job] = total([by_job[job], mine.pace(own[job])])
    return PacesNow(by_worker, dict(by_job))


class _Time(NamedTuple):
    """Time of a worker, and the parts of it in which its process was started again."""

    begin: float
    end: float
    absences: Sequence[tuple[float, float]]

    def since(self, begin: float) -> "_Time":
        """Return the part of the time that begins no sooner."""
        return self._replace(begin=max(self.begin, begin))

    def pace(self, done: Iterable[TimedMicroBatch]) -> Pace:
        """Return the pace of what was done within the time."""
        absent = sum(max(0.0, end - max(self.begin, start)) for start, end in self.absences)
        seconds = max(1e-3, self.end - self.begin - absent)
        tokens, chunks = 0.0, 0.0
        for each in done:
            within = min(1.0, max(0.0, each.end - self.begin) / max(1e-6, each.seconds))
            tokens += within * each.tokens / seconds
            chunks += within * each.chunks / seconds
        return Pace(tokens, chunks)


def _absences(done: Sequence[TimedMicroBatch]) -> list[tuple[float, float]]:
    """Return the times before micro-batches that are the first ones of a process."""
    return [(before.end, each.start) for before, each in pairwise(done) if each.first]


def _turns(done: Sequence[TimedMicroBatch]) -> dict[str, float]:
    """Return when a worker turned to each job, or to the first of those that it is shared with.

    Jobs share a worker if it comes back to one after it has begun the other.
    """
    last = {each.job: place for place, each in enumerate(done)}
    turns: dict[str, float] = {}
    sharing = 0
    for place, each in enumerate(done):
        if each.job not in turns:
            while last[done[sharing].job] < place:
                sharing += 1
            turns[each.job] = done[sharing].start
    return turns


def who_works(batches: Mapping[str, Sequence[TimedMicroBatch]], now: float) -> WorkDone:
    """Return who works on what now, as work of no time; all jobs together are called "".

    Samples tell of that only later, when an average has long been that of other workers.
    """
    workers: defaultdict[str, set[str]] = defaultdict(set)
    for worker, done in batches.items():
        for job in {"", *(each.job for each in done)}:
            workers[job].add(worker)
    started = [worker for worker, done in batches.items() if any(each.first for each in done)]
    return WorkDone(now, 0.0, dict.fromkeys(workers, 0), workers, started)


def total(paces: Iterable[Pace]) -> Pace:
    """Return the sum of paces."""
    tokens, chunks = 0.0, 0.0
    for pace in paces:
        tokens += pace.tokens_per_second
        chunks += pace.chunks_per_second
    return Pace(tokens, chunks)


def averages(
    done: Sequence[WorkDone],
    now: float,
    begun: Mapping[str, float] = _ALWAYS,
    alive: Collection[str] | None = None,
) -> dict[str, list[float]]:
    """Return amounts per second over each of `AVERAGE_SECONDS`, by name.

    The time of each name begins with its first progress, and again with the first one after
    `NOW_SECONDS` without any: what a job did not get before it began, or while a model was loaded,
    says nothing about how fast it is. It begins again, too, where a worker joined or was started
    again, and after the last work of one that is gone. An average over less than `NOW_SECONDS` is
    none: it counts few micro-batches, and the time of one that is in work and counts later.

    Args:
        done: Work that was done, oldest first.
        now: Unix seconds.
        begun: Unix time at which each name's work was begun, or resumed. Work that was done in a
            time that began sooner does not count: nobody knows how much of that time it had.
        alive: Workers that are there; None if nobody knows.
    """
    first_of = _beginnings(done, begun, alive)
    since = list(accumulate((each.seconds for each in reversed(done)), initial=0.0))[::-1]
    rates: dict[str, list[float]] = {name: [] for name in first_of}
    for length in AVERAGE_SECONDS:
        first = next((place for place, each in enumerate(done) if each.end > now - length), None)
        if first is None:
            continue
        amounts: Counter[str] = Counter()
        for place, each in enumerate(done[first:], first):
            for name, amount in each.amounts.items():
                amounts[name] += amount if place >= first_of.get(name, len(done)) else 0
        for name, place in first_of.items():
            if (seconds := since[max(place, first)]) >= NOW_SECONDS:
                rates[name].append(amounts[name] / seconds)
    return rates


def _beginnings(
    done: Sequence[WorkDone], begun: Mapping[str, float], alive: Collection[str] | None
) -> dict[str, int]:
    """Return the place in `done` from which on each name's work counts in its averages."""
    first_of: dict[str, int] = {}
    last: dict[str, float] = {}
    known: dict[str, set[str]] = {}
    for place, each in enumerate(done):
        start = each.end - each.seconds
        for name in each.amounts:
            if start < begun.get(name, start):
                continue
            workers = set(each.workers.get(name, ()))
            if start - last.get(name, -math.inf) >= NOW_SECONDS:
                first_of[name], known[name] = place, workers
            changed = workers - known[name] | workers.intersection(each.started)
            gone = workers.difference(alive) if alive is not None else ()
            if changed or gone:
                first_of[name] = place + 1
            known[name] |= workers
            last[name] = each.end
    return first_of


def forecast_seconds(left: float, rates: Iterable[float]) -> Range | None:
    """Return the seconds for what is left, by the fastest and slowest rate; None if all are 0."""
    if left <= 0:
        return Range(0.0, 0.0)
    known = [rate for rate in rates if rate > 0]
    return Range(left / max(known), left / min(known)) if known else None
