"""Tests of the farm's own keys on the real server: workers, plans, the lock, statistics."""

import itertools
import threading

import pytest
import redis

from embedfarm.contract import broker, wire
from embedfarm.contract.broker import SOCKET_SECONDS, closing_client
from embedfarm.contract.farm_client import FarmClient, FarmFull, length_class
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_files import differences
from embedfarm.contract.records import JobShare, Plan, Rate, TokenisationSettings
from embedfarm.contract.status import JobGone
from tests.contract.little_job import COMPLETION, embed, heartbeat, make_job, snapshot
from tests.support import LiveServer, wait_until


def plan(worker: str, fence: int) -> Plan:
    """Return a plan with one share."""
    return Plan(worker=worker, fence=fence, shares=[JobShare(job="little", tokens=9, blocks=1)])


# Workers.


def test_newest_incarnation_owns_the_name(client: redis.Redis) -> None:
    """A process started later takes a worker's name; the earlier one is told at its next beat."""
    farm = FarmClient(client)
    assert farm.beat(heartbeat("w", "1"), 60)
    assert farm.beat(heartbeat("w", "2"), 60)
    assert not farm.beat(heartbeat("w", "1"), 60)
    assert farm.beat(heartbeat("w", "2"), 60)
    assert farm.workers() == [heartbeat("w", "2")]


def test_silent_worker_is_forgotten(client: redis.Redis) -> None:
    """A worker that beats no more is off the list after its time, and a later start is welcome."""
    farm = FarmClient(client)
    assert farm.beat(heartbeat("b", "2"), 60)
    assert farm.beat(heartbeat("a", "2"), 0.2)
    wait_until(lambda: farm.workers() == [heartbeat("b", "2")])
    assert farm.beat(heartbeat("a", "1"), 60)
    assert farm.workers() == [heartbeat("a", "1"), heartbeat("b", "2")]
    farm.leave("b")
    assert farm.workers() == [heartbeat("a", "1")]
    after, done = farm.statistics.events("0", 0.01)
    assert (after, done) != ("0", []), "the scheduler is to look at once"
    assert not done


def test_names_are_forgotten_after_an_hour(client: redis.Redis) -> None:
    """The list of names does not grow with every worker there ever was."""
    farm = FarmClient(client)
    farm.beat(heartbeat("new"), 60)
    client.zadd(wire.WORKERS, {"old": client.time()[0] - 3601})
    farm.workers()
    assert client.zrange(wire.WORKERS, 0, -1) == [b"new"]


# The scheduler.


def test_one_scheduler_is_active(client: redis.Redis) -> None:
    """The holder keeps the lock and its fence; another one stands by."""
    farm = FarmClient(client)
    fence = farm.plans.elect("one", 60)
    assert fence
    assert farm.plans.elect("two", 60) == 0
    assert farm.plans.elect("one", 60) == fence


def test_standby_takes_over_with_a_higher_fence(client: redis.Redis) -> None:
    """A standby takes over from a silent holder, whose plans are refused from then on."""
    farm = FarmClient(client)
    old = farm.plans.elect("one", 60)
    assert farm.plans.publish([plan("w", old), plan("x", old)], old, 60)
    assert farm.plans.elect("one", 0.2) == old
    wait_until(lambda: farm.plans.elect("two", 60))
    new = farm.plans.elect("two", 60)
    assert new > old
    assert not farm.plans.publish([plan("w", old)], old, 60)
    assert farm.plans.elect("one", 60) == 0
    assert farm.plans.publish([plan("w", new)], new, 60)
    assert (farm.plans.plan("w"), farm.plans.plan("x")) == (plan("w", new), plan("x", old))


def test_renewal_keeps_the_lock(client: redis.Redis) -> None:
    """An election that is won again starts the time of the lock anew."""
    farm = FarmClient(client)
    farm.plans.elect("one", 5)
    farm.plans.elect("one", 60)
    assert client.pttl(wire.SCHEDULER) > 5000


def test_abdication(client: redis.Redis) -> None:
    """A scheduler that stops frees the lock at once, but not somebody else's."""
    farm = FarmClient(client)
    fence = farm.plans.elect("one", 60)
    farm.plans.abdicate(fence - 1)
    farm.plans.abdicate(0)
    assert farm.plans.elect("two", 60) == 0
    farm.plans.abdicate(fence)
    assert not farm.plans.publish([], fence, 60)
    assert farm.plans.elect("two", 60) > fence


def test_plan_expires(client: redis.Redis) -> None:
    """A plan that nobody renews is not followed for ever."""
    farm = FarmClient(client)
    assert farm.plans.plan("w") is None
    fence = farm.plans.elect("one", 60)
    assert farm.plans.publish([plan("w", fence)], fence, 0.2)
    wait_until(lambda: farm.plans.plan("w") is None)


# Statistics.


def test_events_go_on_where_they_ended(client: redis.Redis) -> None:
    """Every completion is read once; other events only end the waiting."""
    farm = FarmClient(client)
    farm.statistics.report(COMPLETION, 100)
    make_job(client, 0)
    last, completions = farm.statistics.events("0", 0)
    assert completions == [COMPLETION]
    assert farm.statistics.events(last, 0) == (last, [])
    farm.statistics.report(COMPLETION, 100)
    assert farm.statistics.events(last, 0)[1] == [COMPLETION]


def test_events_wait_for_the_next(
    client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for what is new ends with the first event, such as a new job."""
    monkeypatch.setattr(broker, "BLOCK_SECONDS_MAX", SOCKET_SECONDS / 2)
    seen: list[str] = []
    with closing_client(server.url) as other:
        waiting = threading.Thread(
            target=lambda: seen.append(FarmClient(other).statistics.events("$", 99)[0])
        )
        waiting.start()
        wait_until(lambda: client.info("clients")["blocked_clients"])
        make_job(client, 0)
        waiting.join(10)
    assert seen not in ([], ["$"])


def test_events_are_capped(client: redis.Redis) -> None:
    """The stream of statistics stays about as long as it may be."""
    farm = FarmClient(client)
    for _ in range(300):
        farm.statistics.report(COMPLETION, 10)
    assert client.xlen(wire.EVENTS) < 200


def test_history(client: redis.Redis) -> None:
    """Remembered rates come back as they were, and those given up are gone."""
    farm = FarmClient(client)
    rates = {
        f"w{number}|m|3": Rate(
            tokens_per_second=0.1 + number, overhead_seconds=0.01, updated=1e9, samples=number
        )
        for number in range(3)
    }
    farm.statistics.remember(rates, [])
    farm.statistics.remember({}, [])
    assert farm.statistics.history() == rates
    farm.statistics.remember({}, ["w0|m|3", "never|known|3"])
    assert farm.statistics.history() == {name: rates[name] for name in ("w1|m|3", "w2|m|3")}


def test_length_classes() -> None:
    """Chunks of a class differ in length by less than a factor of two."""
    assert [length_class(mean) for mean in (0, 1, 1.9, 2, 3.9, 4, 512, 1023.9)] == [
        *(0, 0, 0, 1, 1, 2, 9, 9)
    ]


def test_model_key() -> None:
    """Jobs that differ in what changes a worker's speed have different keys."""
    specs = [
        JobSpec(model="m"),
        JobSpec(model="n"),
        JobSpec(model="m", dtype="float16"),
        JobSpec(model="m", max_length=9),
    ]
    assert all(model_key(one) != model_key(two) for one, two in itertools.combinations(specs, 2))
    assert model_key(JobSpec(model="m", name="a")) == model_key(specs[0])


# What workers say about a job.


def test_the_dead_are_told_from_those_who_left(client: redis.Redis) -> None:
    """A worker whose heartbeat has expired is lost, one that left or is alive is not."""
    farm = FarmClient(client)
    for name in ("alive", "left", "dead"):
        assert farm.beat(heartbeat(name), 60)
    farm.leave("left")
    client.delete(wire.worker_key("dead"))
    _, lost_seconds = farm.call_roll()
    assert list(lost_seconds) == ["dead"]
    assert 0 <= lost_seconds["dead"] < 60


def test_workers_agree_on_a_model(client: redis.Redis) -> None:
    """The first fingerprint counts; another one is refused by name of what differs."""
    farm = FarmClient(client)
    make_job(client, 0)
    assert farm.reports.fingerprint("little") == {}
    farm.reports.agree("little", {"weights": "1", "dtype": "f"})
    farm.reports.agree("little", {"dtype": "f", "weights": "1"})
    with pytest.raises(ModelRefused, match="model than the job's: dtype, pooling, weights differ"):
        farm.reports.agree("little", {"weights": "2", "pooling": "mean"})
    assert farm.reports.fingerprint("little") == {"weights": "1", "dtype": "f"}
    assert differences({"a": "1"}, {"a": "1"}) == []


def test_refusals(client: redis.Redis) -> None:
    """The last reason of each worker that refuses a job is kept."""
    farm = FarmClient(client)
    make_job(client, 0)
    for worker, reason in (("h:cpu-0", "old"), ("h:cpu-0", "no memory"), ("g:cpu-1", "no files")):
        farm.reports.refuse("little", worker, reason)
    assert farm.reports.refusals("little") == {"h:cpu-0": "no memory", "g:cpu-1": "no files"}


def test_jobs_are_listed_oldest_first(client: redis.Redis) -> None:
    """Jobs come in the order in which they were submitted."""
    farm = FarmClient(client)
    for name in ("c", "b", "a", "b"):
        farm.job(name).create(JobSpec(model="m"), 0)
    assert farm.job_ids() == ["c", "b", "a"]


def test_workers_agree_on_token_ids(client: redis.Redis) -> None:
    """The first tokenisation settings are the job's; whoever has others, or none, is refused."""
    job, farm = make_job(client, 0), FarmClient(client)
    one = TokenisationSettings(tokenizer="1", prompt="", tokens_max=9)
    assert farm.reports.tokenisation(job.id) is None
    farm.reports.agree_on_tokens(job.id, one)
    farm.reports.agree_on_tokens(job.id, one)
    assert farm.reports.tokenisation(job.id) == one
    for other in (None, TokenisationSettings(tokenizer="1", prompt="", tokens_max=8)):
        with pytest.raises(ModelRefused, match="token ids"):
            farm.reports.agree_on_tokens(job.id, other)
    with pytest.raises(JobGone):
        farm.reports.agree_on_tokens("another", one)


def test_a_job_of_texts_is_for_all(client: redis.Redis) -> None:
    """Others may have settings where the first worker needs texts; nobody will use them."""
    job, farm = make_job(client, 0), FarmClient(client)
    farm.reports.agree_on_tokens(job.id, None)
    farm.reports.agree_on_tokens(
        job.id, TokenisationSettings(tokenizer="1", prompt="", tokens_max=9)
    )
    assert farm.reports.tokenisation(job.id) is None


def full(farm: FarmClient, jobs: int) -> list[Job]:
    """Make so many jobs, of two blocks each."""
    return [make_job(farm.client, 2, f"job-{index}") for index in range(jobs)]


def test_full_farm_takes_no_new_job(client: redis.Redis) -> None:
    """A full farm refuses a new job without a trace, and admits those that exist."""
    farm = FarmClient(client)
    jobs = full(farm, 3)
    before = snapshot(client)
    with pytest.raises(FarmFull, match=r"the farm is full \(3 jobs\), try again in 3,600 s"):
        farm.admit("new", 3)
    farm.admit(jobs[0].id, 3)
    farm.admit(jobs[0].id, 1)
    assert snapshot(client) == before
    farm.admit("new", 4)
    with pytest.raises(FarmFull):
        farm.admit("newer", 4)


def test_room_for_a_new_job(client: redis.Redis) -> None:
    """A job that is deleted or cancelled makes room for one."""
    farm = FarmClient(client)
    jobs = full(farm, 3)
    jobs[0].delete()
    farm.admit("new", 3)
    jobs[1].cancel()
    farm.admit("newer", 3)
    with pytest.raises(FarmFull):
        farm.admit("newest", 3)


def test_creators_at_once(client: redis.Redis, server: LiveServer) -> None:
    """Creators that come at once get no more places than there are."""
    refused: list[str] = []

    def create(name: str) -> None:
        with closing_client(server.url) as own:
            farm = FarmClient(own)
            try:
                farm.admit(name, 5)
                farm.job(name).create(JobSpec(model="m"), 0)
            except FarmFull:
                refused.append(name)

    threads = [threading.Thread(target=create, args=[f"job-{n}"]) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(FarmClient(client).statuses()) == len(FarmClient(client).job_ids()) == 5
    assert len(refused) == 15


def test_place_of_a_creator_that_died(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserved place is given away in time; a slow creator gets on the list all the same."""
    farm = FarmClient(client)
    farm.admit("slow", 1)
    with pytest.raises(FarmFull):
        farm.admit("new", 1)
    monkeypatch.setattr("embedfarm.contract.farm_client.PLACE_SECONDS", 0)
    farm.admit("new", 1)
    make_job(client, 1, "slow")
    assert set(farm.job_ids()) == {"slow", "new"}
    assert list(farm.statuses()) == ["slow"]


@pytest.mark.parametrize(("speed", "seconds"), [(20.0, 3), (10_000.0, 1), (0.001, 3600)])
def test_when_to_try_again(client: redis.Redis, speed: float, seconds: int) -> None:
    """A refused creator is told when the workers will have done all jobs that are not cancelled."""
    farm = FarmClient(client)
    done, cancelled = full(farm, 3)[:2]
    done.stream.commit([embed(entry) for entry in done.stream.read("one", 1)])
    cancelled.cancel()
    for name in ("one", "two"):
        beat = heartbeat(name)
        beat.tokens_per_second = speed / 2
        farm.beat(beat, 60)
    with pytest.raises(FarmFull) as refused:
        farm.admit("new", 2)
    assert refused.value.retry_after_seconds == seconds


def test_ended_jobs(client: redis.Redis) -> None:
    """Jobs that were cancelled or deleted are told from those that go on."""
    farm = FarmClient(client)
    running, paused, cancelled, deleted = full(farm, 4)
    paused.pause()
    cancelled.cancel()
    deleted.delete()
    names = [job.id for job in (running, paused, cancelled, deleted)]
    assert farm.ended(names) == {cancelled.id, deleted.id}
    assert farm.ended([]) == set()
