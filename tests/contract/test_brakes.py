"""Tests of jobs that pause themselves when they have taken as much as they may."""

import msgspec
import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import ChangeRefused, Job
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.scheduler.change_watch import ChangeWatch
from embedfarm.scheduler.state import JobState
from tests.contract.little_job import CHUNKS, SPEC, embed, make_job
from tests.support import LiveServer, force_log


def work(job: Job, seconds: float = 0.0, cost: float = 0.0) -> str:
    """Embed the next block of a job, which takes so long and costs so much; return its state."""
    entry, result = embed(job.stream.read("one", 1)[0])
    said = msgspec.structs.replace(result, seconds=seconds, cost=cost)
    assert job.stream.commit([(entry, said)]) == ["committed"]
    return job.status().state


def limited(client: redis.Redis, blocks: int = 6, **limits: float) -> Job:
    """Return a job of some blocks with limits."""
    job = make_job(client, blocks)
    job.set_terms(**limits)  # type: ignore[arg-type] # all are limits
    return job


def test_a_job_pauses_itself_and_goes_on_when_it_may(client: redis.Redis) -> None:
    """Job that has taken its device-hours pauses, says why, and goes on when these are raised."""
    job = limited(client, max_hours=1)
    assert work(job, 3599) == "open"
    late = embed(job.stream.read("two", 1)[0])
    assert work(job, 1) == "paused"
    assert job.status().reason == "has taken as much as it may: max_hours 1"
    assert job.stream.commit([late]) == ["committed"]
    with pytest.raises(ChangeRefused, match=r"1 h 00 min of devices.*raise its max_hours"):
        job.resume()
    job.set_terms(max_hours=0.5)
    assert job.status().state == "paused"
    job.set_terms(max_hours=1.5, priority=1)
    status = job.status()
    assert (status.state, status.reason, status.begun_at > 0) == ("open", "", True)
    assert work(job, 1800) == "paused"
    job.set_terms(max_hours=0)
    assert job.status().state == "open"


def test_a_limit_of_cost(client: redis.Redis) -> None:
    """Job that has cost its limit pauses, and to raise that of its hours changes nothing."""
    job = limited(client, max_cost=2.5, max_hours=9)
    assert work(job, 1, 2.4) == "open"
    assert work(job, 1, 0.1) == "paused"
    job.set_terms(max_hours=99)
    assert job.status().reason == "has taken as much as it may: max_cost 2.5"
    job.close(6 * CHUNKS)
    job.set_terms(max_cost=3)
    assert job.status().state == "closed"


def test_what_is_in_work_is_not_stopped_at_the_end(client: redis.Redis) -> None:
    """A job that reaches its limit with its last block has nothing left to pause."""
    job = limited(client, 1, max_hours=1)
    job.close(CHUNKS)
    assert work(job, 9999) == "closed"


def test_who_pauses_a_job_that_paused_itself_keeps_it_so(client: redis.Redis) -> None:
    """Paused by hand it stays paused when its limit is raised, until somebody resumes it."""
    job = limited(client, max_hours=1)
    work(job, 3600)
    job.pause()
    assert job.status().reason == ""
    job.set_terms(max_hours=9)
    assert job.status().state == "paused"
    assert job.resume() == "open"


def test_a_limit_below_what_was_taken(client: redis.Redis) -> None:
    """A limit that is lowered counts with the next result; a job paused by hand stays so."""
    job = limited(client)
    assert work(job, 3600) == "open"
    job.pause()
    job.set_terms(max_hours=0.1)
    assert job.status().reason == ""
    with pytest.raises(ChangeRefused, match="as much as it may"):
        job.resume()
    job.set_terms(max_hours=2)
    assert job.resume() == "open"
    job.set_terms(max_hours=0.1)
    assert work(job) == "paused"


def test_cancelled_and_ended(client: redis.Redis) -> None:
    """A job that has paused itself can be cancelled, and its end has no reason left."""
    job = limited(client, max_hours=1)
    work(job, 3600)
    job.cancel()
    job.set_terms(max_hours=9)
    assert job.status().state == "cancelled"
    FarmClient(client).end(job.id, "cancelled", "", Settings())
    assert (job.status().reason, job.status().spent.device_hours) == ("", 1.0)


def test_a_limit_survives_a_restart_of_the_server(server: LiveServer, client: redis.Redis) -> None:
    """A server that crashes comes back with the job paused, with its reason, and what it took."""
    job = limited(client, max_hours=1)
    work(job, 3600)
    force_log(client)
    server.kill()
    server.start()
    status = job.status()
    assert (status.state, status.spent.device_hours) == ("paused", 1.0)
    assert status.reason == "has taken as much as it may: max_hours 1"
    assert job.create(SPEC, 0) == "paused"  # as the same command does, run again
    job.set_terms(max_hours=2)
    assert job.status().state == "open"


def test_the_timeline_says_so_once() -> None:
    """A scheduler that sees a job pause itself tells it, once, and again the next time."""
    watch = ChangeWatch()
    running, braked = (
        [JobState("j", "m", JobStatus(state=state, braked=why, reason=why), 1)]
        for state, why in (("open", ""), ("paused", "has taken as much as it may: max_hours 1"))
    )
    told = [
        [event.sentence() for event in watch.look({}, set(), jobs)]
        for jobs in (running, braked, braked, running, braked)
    ]
    said = ["job j was paused: it has taken as much as it may: max_hours 1"]
    assert told == [[], said, [], [], said]
