"""Test of the overview of jobs as people look at them, whoever made them."""

import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.watch.overview import read_jobs
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
