"""Strategies for any farm, for property tests: all that a decision could meet."""

import math
from collections import Counter
from typing import Final

from hypothesis import strategies as st

from embedfarm.contract.entries import Pending
from embedfarm.contract.records import Rate
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.ledger import Service
from embedfarm.scheduler.state import FarmState, JobState, WorkerState

SETTINGS: Final = Settings()
NOW: Final = 1e6
MODELS: Final = ("small", "large", "other")
CLASSES: Final = (5, 9)
SIZES: Final = (1 << 30, 12 << 30, 100 << 30)

services = st.builds(
    Service, st.floats(0, 1e4), st.floats(0, 1e4), st.sampled_from([0.0, 10.0, 61.0, 1e4])
)


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    """Draw a rate of a worker, measured lately or long ago."""
    return Rate(
        tokens_per_second=draw(st.floats(1, 1e6)),
        overhead_seconds=draw(st.one_of(st.floats(0, 0.5), st.floats(0, 100))),
        updated=NOW - draw(st.sampled_from([0.0, 59.0, 61.0, 1e6])),
        samples=1,
    )


@st.composite
def jobs(draw: st.DrawFn, name: str, workers: list[str]) -> JobState:
    """Draw a job in any state, of blocks of any size, leased to the living and the dead."""
    holders = st.sampled_from([*workers, "dead"])
    leases = draw(st.lists(st.tuples(holders, st.integers(1, 9)), max_size=3))
    held = [worker for worker, count in leases for _ in range(count)]
    waiting = draw(st.sampled_from([0, 0, 1, 7, 1000]))
    done = draw(st.sampled_from([0, 5]))
    tokens = draw(st.sampled_from([1, 100, 10_000, 10**7]))
    blocks = waiting + len(held) + done
    status = JobStatus(
        state=draw(st.sampled_from(["closed", "closed", "open", "paused", "cancelled"])),
        created_ms=draw(st.integers(0, 2)),
        blocks_in=blocks,
        chunks_in=8 * blocks,
        tokens_in=tokens * blocks,
        bytes_in=draw(st.sampled_from([1, 400, 10**8])) * blocks,
        blocks_done=done,
        tokens_done=tokens * done,
        result_bytes=draw(st.sampled_from([0, 0, SETTINGS.results_bytes_max])),
        priority=draw(st.integers(0, 2)),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        weight=draw(st.sampled_from([1, 2, 1000])),
        deadline_ms=draw(st.sampled_from([0, 0, 1, 10**12])),
    )
    deliveries = draw(st.integers(1, 4))
    pending = [
        Pending("in", f"{8 * place + 1}-8", worker, 0, deliveries)
        for place, worker in enumerate(held)
    ]
    return JobState(
        name,
        draw(st.sampled_from(MODELS)),
        status,
        waiting,
        draw(st.sampled_from(CLASSES)),
        Counter(held),
        () if waiting else tuple(pending),
        draw(services),
    )


@st.composite
def workers(draw: st.DrawFn, name: str) -> WorkerState:
    """Draw a worker that idles, works or leaves, on a device of some size."""
    return WorkerState(
        name,
        held_seconds=draw(st.one_of(st.just(0.0), st.floats(0, 30))),
        draining=draw(st.sampled_from([False, False, False, True])),
        resident=draw(st.frozensets(st.sampled_from(MODELS))),
        memory_bytes=draw(st.sampled_from([0, 0, 8 << 30, 16 << 30])),
        loaded_seconds=draw(st.sampled_from([0.0, 20.0, math.inf])),
    )


@st.composite
def farms(draw: st.DrawFn) -> FarmState:
    """Draw a farm with up to 5 workers and 9 jobs; all or some of the workers ask for a plan."""
    names = [f"worker-{number}" for number in range(draw(st.integers(0, 5)))]
    kinds = [(model, length) for model in MODELS for length in CLASSES]
    known = {
        kind: {name: draw(rates()) for name in [*names, "dead"] if draw(st.booleans())}
        for kind in draw(st.sets(st.sampled_from(kinds)))
    }
    asking = st.none() | (st.frozensets(st.sampled_from(names)) if names else st.nothing())
    return FarmState(
        tuple(draw(jobs(f"job-{number}", names)) for number in range(draw(st.integers(0, 9)))),
        tuple(draw(workers(name)) for name in names),
        known,
        NOW,
        draw(asking),
        draw(st.dictionaries(st.sampled_from(MODELS), st.sampled_from(SIZES))),
    )
