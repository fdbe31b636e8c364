"""Helpers that describe farms, as a decision sees them, in few words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from embedfarm.contract.entries import Pending
from embedfarm.contract.records import JobShare, Rate
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.ledger import Service
from embedfarm.scheduler.passes import Pass, decide
from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES, make_passes
from embedfarm.scheduler.state import NO_SERVICE, Draft, FarmState, JobState, WorkerState

SETTINGS: Final = Settings()
BLOCK_TOKENS: Final = 100
BLOCK_CHUNKS: Final = 8
LENGTH_CLASS: Final = 3  # of chunks of 12.5 tokens


def job(
    name: str = "job",
    *,
    waiting: int = 0,
    leases: Sequence[tuple[str, int]] = (),
    deliveries: int = 1,
    service: Service = NO_SERVICE,
    **status: int | str,
) -> JobState:
    """Return a job of equal blocks; `leases` has worker and number of blocks, the oldest first."""
    held = [worker for worker, count in leases for _ in range(count)]
    blocks = waiting + len(held)
    counters: dict[str, Any] = {
        "state": "closed",
        "blocks_in": blocks,
        "chunks_in": BLOCK_CHUNKS * blocks,
        "tokens_in": BLOCK_TOKENS * blocks,
        "bytes_in": 400 * blocks,
    }
    pending = [
        Pending("in", f"{BLOCK_CHUNKS * place + 1}-0", worker, 0, deliveries)
        for place, worker in enumerate(held)
    ]
    return JobState(
        name,
        "model",
        JobStatus(**counters | status),
        waiting,
        LENGTH_CLASS,
        Counter(held),
        () if waiting else tuple(pending),
        service,
    )


def served(
    name: str, seconds: float, *, tenant: str = "", tenant_seconds: float = 0.0, weight: int = 1
) -> JobState:
    """Return a job with much to lease that has had so many seconds of the farm."""
    service = Service(seconds, tenant_seconds, 0.0)
    return job(name, waiting=100, service=service, tenant=tenant, weight=weight)


def equals(count: int) -> dict[str, float | None]:
    """Return the speeds of workers that are equally fast."""
    return {f"worker-{place}": 1000.0 for place in range(count)}


def farm(
    jobs: Sequence[JobState],
    speeds: Mapping[str, float | None],
    *,
    overhead: float = 0.02,
    held_seconds: Mapping[str, float] | None = None,
    now: float = 0.0,
) -> FarmState:
    """Return a farm whose workers have these speeds for every job; None means unknown."""
    known = {
        worker: Rate(tokens_per_second=speed, overhead_seconds=overhead, updated=0, samples=1)
        for worker, speed in speeds.items()
        if speed is not None
    }
    rates = {(each.model, each.length_class): known for each in jobs}
    workers = tuple(WorkerState(name, (held_seconds or {}).get(name, 0.0)) for name in speeds)
    return FarmState(tuple(jobs), workers, rates, now)


def draft(state: FarmState, *, explain: bool = True) -> Draft:
    """Return a draft that no pass has seen."""
    return Draft(state=state, tiers=(state.jobs,) if state.jobs else (), explain=explain)


def passes(policy: str = DEFAULT_POLICY, settings: Settings = SETTINGS) -> Sequence[Pass]:
    """Return the passes of a policy."""
    return make_passes(POLICIES[policy], settings)


def shares(state: FarmState, policy: str = DEFAULT_POLICY) -> dict[str, JobShare]:
    """Decide, and return the first share of each worker."""
    made = decide(state, passes(policy)).shares
    return {worker: each[0] for worker, each in made.items()}


def names(jobs: Sequence[JobState]) -> list[str]:
    """Return the names of jobs, in order."""
    return [each.job for each in jobs]


def order(made: Draft) -> list[list[str]]:
    """Return the names of the jobs of each tier."""
    return [names(tier) for tier in made.tiers]
