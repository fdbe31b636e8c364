"""The loop on a real server; heartbeats, jobs and completions are written as workers do."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import pytest
import redis

from embedfarm import wire
from embedfarm.broker import closing_client
from embedfarm.farm import Farm, length_class, model_key
from embedfarm.jobs import Job
from embedfarm.records import Block, Completion, Heartbeat, JobShare, JobSpec, Plan, Rate, encode
from embedfarm.settings import Settings
from scheduler.history import rate_key
from scheduler.loop import Scheduler
from scheduler.passes import default_passes
from scheduler.state import Draft
from tests.support import LiveServer, wait_until

SPEC: Final = JobSpec(model="model")
SETTINGS: Final = Settings(
    scheduler_ttl_seconds=1.0, plan_ttl_seconds=5.0, heartbeat_ttl_seconds=60.0
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


@pytest.fixture
def start(server: LiveServer) -> Iterator[Start]:
    """Starts schedulers on the server; all of them end with the test."""
    with contextlib.ExitStack() as running:

        def begin() -> Running:
            made = Running(Scheduler(server.url, SETTINGS, threading.Event()))
            running.callback(made.stop)
            return made

        yield begin


@pytest.fixture
def farm(client: redis.Redis) -> Farm:
    """The test's own handle on the farm."""
    return Farm(client)


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


def remember(farm: Farm, worker: str, speed: float) -> None:
    """Store a rate, as an earlier scheduler did."""
    key = rate_key(worker, model_key(SPEC), length_class(BLOCK_TOKENS / CHUNKS))
    rate = Rate(tokens_per_second=speed, overhead_seconds=0, updated=2e9, samples=1)
    farm.remember({key: rate}, [])


def share(farm: Farm, worker: str, job: str = "job") -> JobShare | None:
    """What a worker's plan says about a job now; None without a plan, or when it is left out."""
    plan = farm.plan(worker)
    return next((each for each in plan.shares if each.job == job), None) if plan else None


def planned(farm: Farm, worker: str, blocks: int) -> Callable[[], bool]:
    """Whether a worker may lease so many blocks."""
    return lambda: (now := share(farm, worker)) is not None and now.blocks == blocks


def test_completions_lead_to_plans_in_proportion(farm: Farm, start: Start) -> None:
    """Two workers that did 3 to 1 may lease 3 to 1: a quarter of what waits, between them."""
    fill(farm, 64)
    beat(farm, "fast")
    beat(farm, "slow")
    start()
    wait_until(planned(farm, "fast", 1))
    report(farm, "fast", 60_000, 1.0)
    report(farm, "slow", 20_000, 1.0)
    wait_until(planned(farm, "fast", 12))
    wait_until(planned(farm, "slow", 4))


def test_a_worker_without_work_is_told_so(farm: Farm, start: Start) -> None:
    """No job: an empty plan, so that a worker does not help itself; none for one that drains."""
    beat(farm, "worker")
    beat(farm, "leaving", "draining")
    start()
    wait_until(lambda: farm.plan("worker"))
    assert farm.plan("worker") == Plan(worker="worker", fence=1, shares=[])
    assert farm.plan("leaving") is None


def test_jobs_come_and_go(farm: Farm, start: Start) -> None:
    """Created, paused, resumed, deleted: the plan follows, and nothing of it stops the loop."""
    beat(farm, "worker")
    start()
    job = fill(farm, 4)
    wait_until(lambda: share(farm, "worker"))
    job.set_state("paused")
    wait_until(lambda: share(farm, "worker") is None)
    job.set_state("closed")
    wait_until(lambda: share(farm, "worker"))
    job.delete()
    wait_until(lambda: share(farm, "worker") is None)


def test_the_tail_is_copied_by_an_idle_worker(farm: Farm, start: Start) -> None:
    """With everything leased to a slow worker, the plan of the idle one names its blocks."""
    job = fill(farm, 4)
    beat(farm, "slow")
    beat(farm, "idle")
    remember(farm, "slow", 100)
    remember(farm, "idle", 10_000)
    assert len(job.read("slow", 4)) == 4
    start()
    wait_until(lambda: (now := share(farm, "idle")) is not None and len(now.copies) == 4)
    assert (now := share(farm, "slow")) is not None
    assert not now.copies


def test_one_of_two_is_active(server: LiveServer, farm: Farm, start: Start) -> None:
    """The lock has one holder; the other one stands by and publishes nothing."""
    beat(farm, "worker")
    start()
    wait_until(lambda: farm.plan("worker"))
    second = Scheduler(server.url, SETTINGS, threading.Event())
    second._step()
    assert not second.fence
    assert (plan := farm.plan("worker")) is not None
    assert plan.fence == 1
    second.farm.client.close()


def test_a_standby_goes_on_when_the_active_one_stops(farm: Farm, start: Start) -> None:
    """A clean stop gives the lock up: the next one has a higher fence, and plans."""
    beat(farm, "worker")
    first = start()
    wait_until(lambda: first.scheduler.fence)
    second = start()
    first.stop()
    wait_until(lambda: second.scheduler.fence)
    assert second.scheduler.fence > 1
    wait_until(lambda: (plan := farm.plan("worker")) is not None and plan.fence > 1)


def test_a_standby_takes_over_from_the_dead(farm: Farm, start: Start) -> None:
    """A holder that is gone without a word loses the lock when it is old."""
    assert farm.elect("dead", SETTINGS.scheduler_ttl_seconds) == 1
    beat(farm, "worker")
    second = start()
    wait_until(lambda: second.scheduler.fence == 2)
    wait_until(lambda: (plan := farm.plan("worker")) is not None and plan.fence == 2)


def test_a_fenced_scheduler_publishes_nothing(server: LiveServer, farm: Farm) -> None:
    """Plans of one that lost the lock while it thought are refused, and those of now stay."""

    def think_too_long(draft: Draft) -> Draft:
        farm.client.delete(wire.SCHEDULER)
        assert farm.publish([Plan(worker="worker", fence=2, shares=[])], farm.elect("new", 60), 60)
        return draft

    beat(farm, "worker")
    passes = (*default_passes(SETTINGS), think_too_long)
    old = Scheduler(server.url, SETTINGS, threading.Event(), passes)
    old._step()
    assert old.fence == 0
    assert (plan := farm.plan("worker")) is not None
    assert plan.fence == 2
    old.farm.client.close()


def test_who_lost_the_lock_reads_the_history_again(server: LiveServer, farm: Farm) -> None:
    """In between another one has learned: its rates count, not those from before."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    farm.client.delete(wire.SCHEDULER)
    assert farm.elect("other", 60) == 2
    remember(farm, "worker", 5000)
    farm.client.delete(wire.SCHEDULER)
    scheduler._step()
    assert scheduler.fence == 3
    assert scheduler._history.rate("worker", model_key(SPEC), 100) is not None
    scheduler.farm.client.close()


def test_what_one_has_learned_the_next_one_knows(farm: Farm, start: Start) -> None:
    """A second scheduler does not probe a worker that the first one has measured."""
    fill(farm, 64)
    beat(farm, "worker")
    first = start()
    wait_until(planned(farm, "worker", 1))
    report(farm, "worker", 60_000, 1.0)
    wait_until(planned(farm, "worker", 16))
    first.stop()
    farm.client.delete(wire.plan_key("worker"))
    start()
    wait_until(lambda: share(farm, "worker"))
    assert planned(farm, "worker", 16)()


def test_an_outage_is_waited_out(server: LiveServer, farm: Farm, start: Start) -> None:
    """The server is killed and comes back: the same scheduler plans again, for what is there."""
    beat(farm, "worker")
    running = start()
    wait_until(lambda: farm.plan("worker"))
    server.kill()
    wait_until(lambda: not running.scheduler.fence)
    server.start()
    with closing_client(server.url) as client:
        again = Farm(client)
        again.client.delete(wire.plan_key("worker"))
        beat(again, "worker")
        wait_until(lambda: again.plan("worker"), 20)
        fill(again, 4)
        wait_until(lambda: share(again, "worker"))


def test_a_clean_stop_leaves_everything_to_the_next(server: LiveServer, farm: Farm) -> None:
    """What was learned since the last time is stored, and the lock is free at once."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    report(farm, "worker", 60_000, 1.0)
    scheduler._listen()
    scheduler._history.learn([completion("worker", 90_000, 1.0)], {}, 2e9)
    scheduler.stop.set()
    scheduler.run()
    (rate,) = farm.history().values()
    assert rate.tokens_per_second > 60_000
    assert not farm.client.exists(wire.SCHEDULER)
    scheduler.farm.client.close()


def test_it_stops_while_the_server_is_away(server: LiveServer) -> None:
    """A stop is obeyed during an outage, and the lock that cannot be given back is no error."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    assert scheduler.fence
    server.kill()
    scheduler.stop.set()
    scheduler.run()
    scheduler.farm.client.close()
