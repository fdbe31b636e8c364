"""A scheduler in a thread; heartbeats, jobs and completions are written as workers do."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient, length_class
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Completion, Heartbeat, JobShare, Rate
from embedfarm.contract.settings import Settings
from embedfarm.scheduler.history import rate_key
from embedfarm.scheduler.loop import Scheduler

SPEC: Final = JobSpec(model="model")
SETTINGS: Final = Settings(
    scheduler_ttl_seconds=5.0, plan_ttl_seconds=10.0, heartbeat_ttl_seconds=60.0
)
CHUNKS: Final = 8
BLOCK_TOKENS: Final = 100 * CHUNKS


@dataclass
class Running:
    """A scheduler that runs in a thread."""

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
        """Stop the scheduler, as SIGTERM would, and raise what made it fail."""
        self.scheduler.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.scheduler.farm.client.close()
        for failure in self.failures:
            raise failure


Start = Callable[[], Running]


def beat(farm: FarmClient, worker: str, state: str = "idle", **said: Any) -> None:  # noqa: ANN401 # any field
    """Send a heartbeat of a worker."""
    farm.beat(
        Heartbeat(
            worker=worker, incarnation="1", host="here", pid=1, device="cpu-0", state=state, **said
        ),
        SETTINGS.heartbeat_ttl_seconds,
    )


def fill(farm: FarmClient, blocks: int, name: str = "job") -> Job:
    """Push a closed job of equal blocks, and return it."""
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
    """Return a worker's completion of a micro-batch."""
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


def report(farm: FarmClient, worker: str, tokens: int, seconds: float) -> None:
    """Report a completed micro-batch to the farm."""
    farm.statistics.report(completion(worker, tokens, seconds), SETTINGS.events_max)


def remember(farm: FarmClient, worker: str, speed: float, model: str = SPEC.model) -> None:
    """Store a rate, as an earlier scheduler did."""
    kind = model_key(JobSpec(model=model)), length_class(BLOCK_TOKENS / CHUNKS)
    key = rate_key(worker, *kind)
    rate = Rate(tokens_per_second=speed, overhead_seconds=0, updated=2e9, samples=1)
    farm.statistics.remember({key: rate}, [])


def at(farm: FarmClient) -> dict[str, str]:
    """Return the environment in which a command finds the farm's server."""
    path = farm.client.connection_pool.connection_kwargs["path"]
    return {"EMBEDFARM_REDIS_URL": f"unix://{path}"}


def share(farm: FarmClient, worker: str, job: str = "job") -> JobShare | None:
    """Return a job's share in a worker's plan now; None without a plan or a share."""
    plan = farm.plans.plan(worker)
    return next((each for each in plan.shares if each.job == job), None) if plan else None


def planned(farm: FarmClient, worker: str, blocks: int) -> Callable[[], bool]:
    """Return a predicate: a worker may lease exactly so many blocks of the job."""
    return lambda: (now := share(farm, worker)) is not None and now.blocks == blocks
