"""A scheduler in a thread; heartbeats, jobs and completions are written as workers do."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from embedfarm.farm import Farm, length_class, model_key
from embedfarm.jobs import Job
from embedfarm.records import Block, Completion, Heartbeat, JobShare, JobSpec, Rate, encode
from embedfarm.settings import Settings
from scheduler.history import rate_key
from scheduler.loop import Scheduler

SPEC: Final = JobSpec(model="model")
SETTINGS: Final = Settings(
    scheduler_ttl_seconds=5.0, plan_ttl_seconds=10.0, heartbeat_ttl_seconds=60.0
)
CHUNKS: Final = 8
BLOCK_TOKENS: Final = 100 * CHUNKS


@dataclass
class Running:
    """A scheduler in a thread."""

    scheduler: Scheduler
    thread: threading.Thread = field(init=False)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except BaseException as error:  # noqa: BLE001 # `stop` raises it in the test
            self.failures.append(error)

    def stop(self) -> None:
        """End it, as SIGTERM would; raises what made it fail."""
        self.scheduler.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.scheduler.farm.client.close()
        for failure in self.failures:
            raise failure


Start = Callable[[], Running]


def beat(farm: Farm, worker: str, state: str = "idle") -> None:
    """Announce a worker."""
    farm.beat(
        Heartbeat(worker=worker, incarnation="1", host="here", pid=1, device="cpu-0", state=state),
        SETTINGS.heartbeat_ttl_seconds,
    )


def fill(farm: Farm, blocks: int, name: str = "job") -> Job:
    """A closed job of equal blocks."""
    job = farm.job(name)
    job.create(SPEC, 0)
    made = [
        Block(start=CHUNKS * place, texts=["text"] * CHUNKS, token_count=BLOCK_TOKENS)
        for place in range(blocks)
    ]
    job.push([(block, encode(block)) for block in made])
    job.close(CHUNKS * blocks)
    return job


def completion(worker: str, tokens: int, seconds: float) -> Completion:
    """A worker's account of a micro-batch."""
    return Completion(
        worker=worker,
        model=model_key(SPEC),
        job="job",
        chunks=tokens // 100,
        tokens=tokens,
        padded_tokens=tokens,
        real_tokens=tokens,
        seconds=seconds,
        overhead_seconds=0.0,
    )


def report(farm: Farm, worker: str, tokens: int, seconds: float) -> None:
    """Tell of a micro-batch that was done."""
    farm.report(completion(worker, tokens, seconds), SETTINGS.events_max)


def remember(farm: Farm, worker: str, speed: float, model: str = SPEC.model) -> None:
    """Store a rate, as an earlier scheduler did."""
    kind = model_key(JobSpec(model=model)), length_class(BLOCK_TOKENS / CHUNKS)
    key = rate_key(worker, *kind)
    rate = Rate(tokens_per_second=speed, overhead_seconds=0, updated=2e9, samples=1)
    farm.remember({key: rate}, [])


def at(farm: Farm) -> dict[str, str]:
    """The farm's server, for a command."""
    path = farm.client.connection_pool.connection_kwargs["path"]
    return {"EMBEDFARM_REDIS_URL": f"unix://{path}"}


def share(farm: Farm, worker: str, job: str = "job") -> JobShare | None:
    """What a worker's plan says about a job now; None without a plan, or when it is left out."""
    plan = farm.plan(worker)
    return next((each for each in plan.shares if each.job == job), None) if plan else None


def planned(farm: Farm, worker: str, blocks: int) -> Callable[[], bool]:
    """Whether a worker may lease so many blocks."""
    return lambda: (now := share(farm, worker)) is not None and now.blocks == blocks
