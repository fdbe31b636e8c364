"""Tests of RQ jobs whose keys hold what RQ did not write."""

import logging

import pytest
import redis
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError

from embedfarm.ingest.rq_keys import ReadableJob


@pytest.fixture
def job(client: redis.Redis) -> ReadableJob:
    """A job in a queue."""
    queue = Queue("embedfarm", client, serializer="json", job_class=ReadableJob)
    made = queue.enqueue("producer.tasks.cleanup", 0)
    assert isinstance(made, ReadableJob)
    return made


def test_a_status_that_is_none(client: redis.Redis, job: ReadableJob) -> None:
    """A status that is no word, or a job that is no hash, counts as that of no job."""
    assert job.get_status() == "queued"
    client.hset(job.key, "status", b"\xff")
    with pytest.raises(InvalidJobOperation, match="cannot be read"):
        job.get_status()
    client.delete(job.key)
    client.set(job.key, "no hash")
    with pytest.raises(InvalidJobOperation, match="cannot be read"):
        job.get_status()
    with pytest.raises(NoSuchJobError):
        job.refresh()


def test_what_rq_cannot_delete_is_forgotten(
    client: redis.Redis, job: ReadableJob, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that RQ cannot delete loses its own keys, and no other job does."""
    other = Queue("embedfarm", client, serializer="json").enqueue("producer.tasks.cleanup", 0)
    client.delete("rq:queue:embedfarm")
    client.set("rq:queue:embedfarm", "no list")
    with caplog.at_level(logging.WARNING):
        job.forget()
    assert f"job {job.id} is dropped" in caplog.text
    assert list(client.scan_iter("rq:job:*")) == [other.key.encode()]
