"""Tests of jobs that RQ did not write: whoever may enqueue may put anything there."""

import contextlib
import itertools
import json
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

import psutil
import pytest
import redis
from rq import Retry

from embedfarm.ingest.task_worker import worker_name
from tests.ingest.rq_farm import START_SECONDS, Door, wait_for
from tests.support import wait_until

GARBAGE: Final = (b"\xff", b"[5]")
MORE_GARBAGE: Final = (
    b"", b"-1", b"0", b"9" * 30, b"9" * 5000, b"1e400", b"nan", b"[" * 100_000, b"\x00", b"{}",
    b'["x"]', b'{"deaths": "x", "done": [], "out": 5, "state": {}}', zlib.compress(b"\xff"),
    json.dumps([10**30, -1, "x"]).encode(),
)  # fmt: skip
SEED: Final = 7
ROUNDS: Final = 300  # of harm to every key while a worker looks at them
SHARED: Final = {
    "queue:embedfarm": "list", "queue:embedfarm:intermediate": "list", "wip:embedfarm": "zset",
    "scheduled:embedfarm": "zset", "canceled:embedfarm": "zset", "failed:embedfarm": "zset",
    "finished:embedfarm": "zset", "deferred:embedfarm": "zset", "workers": "set",
    "workers:embedfarm": "set", "queues": "set", "groups": "set",
    "scheduler-lock:embedfarm": "string",
}  # fmt: skip
WRONG: Final = (b"\xff\xfe", b"", b"a b", b"a:b:c", b"\x00", b"no-such-job")
FIELDS: Final = (
    "data", "created_at", "origin", "worker_name", "description", "enqueued_at", "started_at",
    "ended_at", "last_heartbeat", "group_id", "result", "timeout", "result_ttl", "failure_ttl",
    "status", "success_callback_name", "success_callback_timeout", "webhooks", "dependency_ids",
    "dependency_id", "allow_dependency_failures", "enqueue_at_front", "ttl", "meta",
    "number_of_retries", "retries_left", "retry_intervals", "enqueue_at_front_on_retry",
    "repeats_left", "repeat_intervals",
)  # fmt: skip


def worker_of(door: Door, role: psutil.Process) -> int:
    """Return the process id of a role's RQ worker, once it waits for jobs."""
    wait_until(lambda: door.connection.scard("rq:workers") == 1, START_SECONDS)
    [worker] = role.children()
    return int(worker.pid)


def test_one_that_cannot_be_read_costs_nobody(door: Door) -> None:
    """A worker refuses jobs with garbage in a field, names them in the log, and goes on."""
    ids: dict[tuple[str, bytes], str] = {}
    with door.ingest() as role:
        worker = worker_of(door, role)
        for field in FIELDS:
            for garbage in GARBAGE:
                job = door.enqueue("cleanup", 9)
                ids[field, garbage] = job.id
                door.connection.hset(job.key, field, garbage)
        wait_for(door.enqueue("cleanup", 9), "finished")
        # On a busy machine one may look lost, and is then refused once more.
        wait_until(door.queue.is_empty, START_SECONDS)
        assert worker_of(door, role) == worker
    assert f"{ids['status', GARBAGE[0]]} is refused" in door.log()


def test_one_that_is_found_elsewhere(door: Door) -> None:
    """Damaged jobs in RQ's registries end neither the worker nor the role."""
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


def spoil(door: Door, key: str, kind: str) -> None:
    """Add members that RQ never would to a key that all jobs share."""
    server, key = door.connection, f"rq:{key}"
    for member in WRONG:
        if kind == "zset":
            server.zadd(key, {member: 1})
        elif kind in {"list", "set"}:
            (server.lpush if kind == "list" else server.sadd)(key, member)


def replace(door: Door, key: str, kind: str) -> None:
    """Replace a key that all jobs share by one of another type."""
    server = door.connection
    server.delete(f"rq:{key}")
    if kind == "string":
        server.lpush(f"rq:{key}", "a list")
    else:
        server.set(f"rq:{key}", "text")


def all_are_sound(door: Door) -> bool:
    """Tell whether all shared keys have their own type or are missing."""
    types = {key: door.connection.type(f"rq:{key}") for key in SHARED}
    return all(types[key] in {kind.encode(), b"none"} for key, kind in SHARED.items())


@pytest.mark.parametrize("harm", [spoil, replace])
def test_what_all_jobs_share(door: Door, harm: Callable[[Door, str, str], None]) -> None:
    """Damage in keys that all RQ jobs share ends no worker, and is repaired.

    The damage is there when the role begins, and comes at any moment while it runs.
    """
    for each in SHARED.items():
        harm(door, *each)
    with door.ingest() as role:
        wait_until(partial(all_are_sound, door), START_SECONDS)
        worker = worker_of(door, role)
        for each in [*SHARED.items()] * ROUNDS:
            with contextlib.suppress(redis.ResponseError):  # it was made sound in between
                harm(door, *each)
        wait_until(partial(all_are_sound, door), START_SECONDS)
        wait_for(door.enqueue("cleanup", 9), "finished")
        assert worker_of(door, role) == worker
        assert role.is_running()


def test_a_key_that_no_worker_reads(door: Door) -> None:
    """A key that only programs that enqueue would fail over is made sound, too."""
    with door.ingest() as role:
        worker = worker_of(door, role)
        for key in ("deferred:embedfarm", "queues"):
            replace(door, key, SHARED[key])
            wait_until(partial(all_are_sound, door), START_SECONDS)
        wait_for(door.enqueue("cleanup", 9), "finished")
        assert worker_of(door, role) == worker


def test_orders_that_are_none(door: Door) -> None:
    """An order that is none, or a shutdown, ends no worker that listens to RQ's commands."""
    with door.ingest() as role:
        worker = worker_of(door, role)
        channel = f"rq:pubsub:{worker_name(worker)}"
        for order in (b"\xff", b"{}", b"[]", b"5", b'{"command": "shutdown"}'):
            # Its thread may still be on its way back from the order before.
            wait_until(lambda: door.connection.publish(channel, order) == 1)  # noqa: B023 # used up in this turn
        job = door.enqueue("cleanup", 9)
        wait_for(job, "finished")
        assert worker_of(door, role) == worker
        assert door.connection.publish(channel, b"{}") == 1


@pytest.mark.parametrize(
    "share", [40, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_garbage_in_any_field(door: Door, share: int | None) -> None:
    """A worker outlives garbage in the fields of jobs that succeed, fail, and are tried again."""
    cases = list(itertools.product(FIELDS, (*GARBAGE, *MORE_GARBAGE), (True, False)))
    chosen = random.Random(SEED).sample(cases, share or len(cases))
    with door.ingest() as role:
        worker = worker_of(door, role)
        for field, garbage, good in chosen:
            words = ("cleanup", 9) if good else ("embed_corpus", "a", "b")
            job = door.enqueue(*words, retry=Retry(max=2, interval=[0, 10**6]))
            door.connection.hset(job.key, field, garbage)
        wait_for(door.enqueue("cleanup", 9), "finished", 600)
        assert worker_of(door, role) == worker


def test_a_job_that_would_burst(door: Door) -> None:
    """Arguments that unpack to hundreds of MiB are refused, and cost the worker nothing."""
    packer = zlib.compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    job = door.enqueue("cleanup", 9)
    door.connection.hset(job.key, "data", bomb)
    with door.ingest() as role:
        worker = worker_of(door, role)
        wait_for(door.enqueue("cleanup", 9), "finished")
        assert worker_of(door, role) == worker
    assert f"{job.id} is refused" in door.log()


def test_keys_beside_a_job(door: Door) -> None:
    """Damaged keys of one job's results, runs and dependents cost no other job anything."""
    door.connection.sadd("rq:groups", "g")
    door.connection.set("rq:group:g", "text")
    with door.ingest() as role:
        worker = worker_of(door, role)
        for name in ("results:{}", "job:{}:dependents", "executions:{}"):
            for words in (("cleanup", 9), ("embed_corpus", "a", "b")):
                job = door.queue.create_job(f"producer.tasks.{words[0]}", args=words[1:])
                door.connection.set("rq:" + name.format(job.id), b"text")
                door.queue.enqueue_job(job)
        wait_for(door.enqueue("cleanup", 9), "finished")
        wait_until(lambda: not door.connection.zcard("rq:wip:embedfarm"), START_SECONDS)
        assert worker_of(door, role) == worker
