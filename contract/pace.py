"""Pace of a farm, now and lately, and the time for the rest of its work that follows from it."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

NOW_SECONDS: Final = 15.0  # "now": longer than the longest usual micro-batch
AVERAGE_SECONDS: Final = (60.0, 300.0)  # beside now, what times are forecast by


class TimedMicroBatch(NamedTuple):
    """A micro-batch as a bar over time.

    Attributes:
        end: Unix seconds at which it was reported.
        seconds: Time that it took, with the overhead that the pipeline could not hide.
        job: The job its chunks came from.
        chunks: Chunks in it.
        tokens: Real tokens in it.
    """

    end: float
    seconds: float
    job: str
    chunks: int
    tokens: int


class Pace(NamedTuple):
    """Work done in a second: real tokens, and chunks."""

    tokens_per_second: float = 0.0
    chunks_per_second: float = 0.0


class Range(NamedTuple):
    """Range of seconds: at least `low`, at most `high`."""

    low: float
    high: float


class WorkDone(NamedTuple):
    """Amounts of work by name, the Unix time at which they were done, and the seconds they took."""

    end: float
    seconds: float
    amounts: Mapping[str, int]


def paces_now(
    batches: Mapping[str, Sequence[TimedMicroBatch]], busy: Collection[str], now: float
) -> dict[tuple[str, str], Pace]:
    """Return the paces over the last `NOW_SECONDS`, by worker and job.

    A micro-batch counts as far as it lies within this time. A worker's time begins with its first
    micro-batch there; a busy worker's time ends with its last one, since the next counts later.

    Args:
        batches: Micro-batches that ended within this time, by worker, oldest first.
        busy: Workers that have a micro-batch in hand.
        now: Unix seconds.
    """
    paces: defaultdict[tuple[str, str], Pace] = defaultdict(Pace)
    for worker, done in batches.items():
        since = max(now - NOW_SECONDS, min(each.end - each.seconds for each in done))
        until = done[-1].end if worker in busy else max(now, done[-1].end)
        for each in done:
            within = min(1.0, (each.end - since) / max(1e-6, each.seconds))
            part = within / max(1e-3, until - since)
            pace = Pace(part * each.tokens, part * each.chunks)
            paces[worker, each.job] = total([paces[worker, each.job], pace])
    return dict(paces)


def total(paces: Iterable[Pace]) -> Pace:
    """Return the sum of paces."""
    tokens, chunks = 0.0, 0.0
    for pace in paces:
        tokens += pace.tokens_per_second
        chunks += pace.chunks_per_second
    return Pace(tokens, chunks)


def averages(done: Sequence[WorkDone], now: float) -> dict[str, list[float]]:
    """Return amounts per second over each of `AVERAGE_SECONDS`, by name.

    The time of each name begins with its first progress, and again with the first one after
    `NOW_SECONDS` without any: what a job did not get before it began, or while a model was loaded,
    says nothing about how fast it is. An average over less than `NOW_SECONDS` is none: it counts
    few micro-batches, and the time of one that is in work and counts later.

    Args:
        done: Work that was done, oldest first.
        now: Unix seconds.
    """
    begun: dict[str, int] = {}
    last: dict[str, float] = {}
    for place, each in enumerate(done):
        for name in each.amounts:
            if each.end - each.seconds - last.get(name, -math.inf) >= NOW_SECONDS:
                begun[name] = place
            last[name] = each.end
    since = list(accumulate(each.seconds for each in reversed(done)))[::-1]
    rates: dict[str, list[float]] = {name: [] for name in begun}
    for length in AVERAGE_SECONDS:
        first = next((place for place, each in enumerate(done) if each.end > now - length), None)
        if first is None:
            continue
        amounts: Counter[str] = Counter()
        for place, each in enumerate(done[first:], first):
            for name, amount in each.amounts.items():
                amounts[name] += amount if place >= begun[name] else 0
        for name, place in begun.items():
            if (seconds := since[max(place, first)]) >= NOW_SECONDS:
                rates[name].append(amounts[name] / seconds)
    return rates


def forecast_seconds(left: float, rates: Iterable[float]) -> Range | None:
    """Return the seconds for what is left, by the fastest and slowest rate; None if all are 0."""
    if left <= 0:
        return Range(0.0, 0.0)
    known = [rate for rate in rates if rate > 0]
    return Range(left / max(known), left / min(known)) if known else None
