"""Tests of the overview of jobs as people look at them, whoever made them."""

import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.watch.overview import JobChoice, read_job, read_jobs, read_page
from tests.contract.little_job import make_job


def test_a_job_that_cannot_be_read_hides_no_other(client: redis.Redis) -> None:
    """An unreadable spec is told, and a job whose counters are no numbers is left out."""
    farm = FarmClient(client)
    make_job(client, 2)
    client.hset(wire.JobKeys("spec").meta, mapping={"state": "open", "spec": b"\x01nonsense"})
    client.hset(wire.JobKeys("count").meta, mapping={"state": "open", "spec": b"", "weight": "x"})
    client.zadd(wire.JOBS, {"spec": 1, "count": 2})
    found = {each.job: each for each in read_jobs(farm, farm.job_ids())}
    assert found.keys() == {"little", "spec"}
    assert found["little"].model == "null:2"
    assert "every worker" in found["spec"].refused


def test_words_for_states(client: redis.Redis) -> None:
    """A submitted job is queued until a run has it, and running whether or not all is read."""
    farm, spec = FarmClient(client), JobSpec(model="null:2")
    job = farm.job("sent")
    job.create(spec, 0, notes={"out": "/out"})
    assert read_job(farm, "sent").state == "queued"
    assert [each.job for each in read_page(farm, "", 9, JobChoice("queued")).jobs] == ["sent"]
    assert not read_page(farm, "", 9, JobChoice("running")).jobs
    farm.job("sent", "owner").create(spec, 0, notes={"out": "/out"})  # as a run does that begins
    assert read_job(farm, "sent").state == "running"
    job.close(0)
    assert (read_job(farm, "sent").state, job.status().state) == ("running", "closed")
    job.cancel()
    farm.end("sent", "cancelled", "", Settings())
    assert [each.job for each in read_page(farm, "", 9, JobChoice("cancelled")).jobs] == ["sent"]


def test_a_feed_is_never_queued(client: redis.Redis) -> None:
    """A job that a program of its own fills is running from the first: nobody waits for it."""
    farm = FarmClient(client)
    farm.job("feed").create(JobSpec(model="null:2"), 0)
    assert read_job(farm, "feed").state == "running"
