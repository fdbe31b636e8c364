"""Scenarios: the workers, jobs and events of a simulated farm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

SPEEDS: Final = (20_000.0, 80_000.0)  # tokens per second of the slowest and the fastest worker
CHUNK_TOKENS: Final = 100
PAIRS_TOKENS: Final = 2_000  # at this length attention costs as much as everything else


@dataclass(frozen=True)
class Machine:
    """A modelled worker.

    Attributes:
        tokens_per_second: Speed on short chunks.
        stops_seconds: Time when it falls silent, as by SIGSTOP or SIGKILL.
        wakes_seconds: Time when it goes on as if nothing had been; never, by default.
        memory_bytes: Memory of its device, 0 for no limit.
    """

    tokens_per_second: float
    stops_seconds: float = math.inf
    wakes_seconds: float = math.inf
    memory_bytes: int = 0


@dataclass(frozen=True)
class Work:
    """A modelled job, whose corpus is complete from its start.

    Attributes:
        seconds: Size of the job, as time at the speeds of all machines together.
        name: Id of the job.
        arrives_seconds: Time when it comes.
        lengths: Tokens of its chunks, over and over.
        priority: Priority of the job (`JobStatus.priority`).
        tenant: Tenant of the job, "" for none.
        weight: Weight of the job beside the tenant's other jobs.
        deadline_seconds: Time of the deadline after the job came.
        model: Key of its model.
    """

    seconds: float = 50.0
    name: str = "job"
    arrives_seconds: float = 0.0
    lengths: Sequence[int] = (CHUNK_TOKENS,)
    priority: int = 0
    tenant: str = ""
    weight: int = 1
    deadline_seconds: float = math.inf
    model: str = "model"


@dataclass(frozen=True)
class Scenario:
    """A farm and what happens to it.

    Attributes:
        name: Name by which the scenario is asked for.
        about: Description in words, for tables.
        machines: Modelled workers.
        work: Modelled jobs.
        history_error: Sigma of the lognormal error of the rates that are remembered; None where
            no rate is.
        noise: Sigma of the lognormal noise of a micro-batch's time.
        drift: Sigma of the change of log speed in a second; what was gained or lost fades by 5 %
            in a second.
        overhead_seconds: Fixed device time of a micro-batch.
        stalls: Share of the micro-batches that hang for `stall_seconds` more on average.
        stall_seconds: Mean time for which such a micro-batch hangs.
        drop: Share of its speed to which one worker falls, after 30 % of the ideal time.
        load_seconds: Time to load each model; one that is not named takes none.
        model_bytes: Device memory that each model takes.
    """

    name: str
    about: str
    machines: tuple[Machine, ...]
    work: tuple[Work, ...] = (Work(),)
    history_error: float | None = 0.3
    noise: float = 0.1
    drift: float = 0.05
    overhead_seconds: float = 0.02
    stalls: float = 0.0
    stall_seconds: float = 10.0
    drop: float = 1.0
    load_seconds: dict[str, float] = field(default_factory=dict)
    model_bytes: dict[str, int] = field(default_factory=dict)


def spread(count: int) -> tuple[Machine, ...]:
    """Make machines of speeds spread evenly, by ratio, from the slowest to four times as fast."""
    slowest, fastest = SPEEDS
    steps = (place / max(1, count - 1) for place in range(count))
    return tuple(Machine(slowest * (fastest / slowest) ** step) for step in steps)


def suite(machines: tuple[Machine, ...]) -> tuple[Scenario, ...]:
    """Return the seven scenarios to compare policies by: one job that is all there at once."""
    base = Scenario("wrong-history", "history wrong by 30 %", machines)
    return (
        replace(base, name="cold", about="no history", history_error=None),
        base,
        replace(base, name="drift", about="drift of 15 % a second", drift=0.15),
        replace(base, name="overhead", about="200 ms a micro-batch", overhead_seconds=0.2),
        replace(base, name="short", about="a job of 5 s", work=(Work(seconds=5.0),)),
        replace(base, name="stalls", about="0.5 % hang, 10 s on average", stalls=0.005),
        replace(base, name="drop", about="one worker falls to 10 %", drop=0.1),
    )


def more_scenarios(machines: tuple[Machine, ...]) -> tuple[Scenario, ...]:
    """Return scenarios in which more than one thing happens; with one machine, fewer of them."""
    base = Scenario("wrong-history", "history wrong by 30 %", machines)
    half = replace(Work(), seconds=25.0)
    tenants = replace(
        base,
        name="tenants",
        about="two tenants, the second comes 10 s later, and an urgent job",
        work=(
            replace(half, name="bulk", tenant="a"),
            replace(half, name="late", tenant="b", arrives_seconds=10.0),
            Work(0.05, "urgent", arrives_seconds=15.0, tenant="a", priority=2),
        ),
    )
    if len(machines) == 1:
        return (tenants,)
    dies, freezes, *others = machines
    dies = replace(dies, stops_seconds=20.0)
    freezes = replace(freezes, stops_seconds=10.0, wakes_seconds=30.0)
    return (
        replace(
            base,
            name="deaths",
            about="one worker dies, one stands still for 20 s",
            machines=(dies, freezes, *others),
        ),
        tenants,
        replace(
            base,
            name="models",
            about="two models that take 5 s to load, one too large for every other device",
            machines=tuple(
                each if place % 2 else replace(each, memory_bytes=8 << 30)
                for place, each in enumerate(machines)
            ),
            work=(replace(half, name="one"), replace(half, name="two", model="large")),
            load_seconds={"model": 5.0, "large": 5.0},
            model_bytes={"large": 12 << 30},
        ),
    )
