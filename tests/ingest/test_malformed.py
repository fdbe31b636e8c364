"""What becomes of jobs that RQ did not write: whoever may enqueue may put anything there."""

from typing import Final

import psutil

from tests.ingest.door import START_SECONDS, Door, wait_for
from tests.support import wait_until

GARBAGE: Final = (b"\xff", b"[5]")
FIELDS: Final = (
    "data", "created_at", "origin", "worker_name", "description", "enqueued_at", "started_at",
    "ended_at", "last_heartbeat", "group_id", "result", "timeout", "result_ttl", "failure_ttl",
    "status", "success_callback_name", "success_callback_timeout", "webhooks", "dependency_ids",
    "dependency_id", "allow_dependency_failures", "enqueue_at_front", "ttl", "meta",
    "number_of_retries", "retries_left", "retry_intervals", "enqueue_at_front_on_retry",
    "repeats_left", "repeat_intervals",
)  # fmt: skip


def worker_of(door: Door, role: psutil.Process) -> int:
    """The RQ worker of a role, once it waits for jobs."""
    wait_until(lambda: door.connection.scard("rq:workers") == 1, START_SECONDS)
    [worker] = role.children()
    return int(worker.pid)


def test_one_that_cannot_be_read_costs_nobody(door: Door) -> None:
    """Whatever stands in a field: the worker goes on with the next job, and names it in the log."""
    ids: dict[tuple[str, bytes], str] = {}
    with door.ingest() as role:
        worker = worker_of(door, role)
        for field in FIELDS:
            for garbage in GARBAGE:
                job = door.enqueue("cleanup", 9)
                ids[field, garbage] = job.id
                door.connection.hset(job.key, field, garbage)
        wait_for(door.enqueue("cleanup", 9), "finished")
        assert worker_of(door, role) == worker
    assert door.queue.is_empty()
    assert f"{ids['status', GARBAGE[0]]} is refused" in door.log()


def test_one_that_is_found_elsewhere(door: Door) -> None:
    """Lost, cancelled or postponed, or no hash at all: neither the worker nor the role ends."""
    for key, member in (("wip", "{}:1"), ("canceled", "{}"), ("scheduled", "{}")):
        for field in ("status", "data", ""):
            job = door.enqueue("cleanup", 9)
            door.connection.lrem("rq:queue:embedfarm", 0, job.id)
            if field:
                door.connection.hset(job.key, field, b"\xff")
            else:
                door.connection.set(job.key, "text")
            door.connection.zadd(f"rq:{key}:embedfarm", {member.format(job.id): 1})
    with door.ingest() as role:
        worker = worker_of(door, role)
        keys = ("rq:wip:embedfarm", "rq:scheduled:embedfarm")
        wait_until(lambda: not door.connection.exists(*keys), START_SECONDS)
        wait_for(door.enqueue("cleanup", 0), "finished")
        assert worker_of(door, role) == worker
