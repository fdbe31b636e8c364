"""Tests of how each process shows that it is at work again."""

import os
import time

import msgspec
import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.utils import now

from embedfarm.contract.broker import host_name
from embedfarm.contract.farm_client import FarmClient
from embedfarm.ingest.task_worker import worker_name
from embedfarm.ingest.tasks import QUEUE
from tests.chaos.tally import Tally
from tests.chaos.victims import Witness
from tests.chaos.watch import Watch
from tests.contract.little_job import DECISION, STATS, embed, make_job
from tests.support import LiveServer, wait_until

HIT = f"{host_name()}:cpu-0"
OTHER = f"{host_name()}:cpu-1"


@pytest.fixture
def witness(server: LiveServer) -> Witness:
    """Return a witness of a farm in which the test plays all roles."""
    return Witness(server.url, Watch(server.url), Tally())


def test_of_a_worker_all_that_it_held_counts(witness: Witness, client: redis.Redis) -> None:
    """A worker is at work once each lease it held is committed, taken, renewed or claimed anew."""
    job = make_job(client, 5)
    stream = job.keys.blocks
    held = job.stream.read(HIT, 4)
    proof = witness.proof("worker-cpu-0")
    job.stream.read(OTHER, 1)
    since = time.monotonic()
    assert not proof(since)
    wait_until(lambda: time.monotonic() > since + 0.2)
    job.stream.commit([embed(held[0])])
    job.stream.claim(stream, OTHER, [held[1].id], 0)
    job.stream.renew(stream, HIT, [held[2].id])
    assert not proof(since)
    job.stream.claim(stream, HIT, [held[3].id], 0)
    assert proof(since)
    assert not proof(time.monotonic())  # nothing has happened since now


def test_what_is_handed_back_must_be_taken(witness: Witness, client: redis.Redis) -> None:
    """A released lease counts only once somebody has taken it."""
    job = make_job(client, 1)
    [entry] = job.stream.read(HIT, 1)
    proof = witness.proof("worker-cpu-0")
    since = time.monotonic()
    job.stream.release(entry.stream, HIT, [entry.id])
    assert not proof(since)
    job.stream.claim(entry.stream, OTHER, [entry.id], 0)
    assert proof(since)


def test_a_scheduler_has_decided(witness: Witness, client: redis.Redis) -> None:
    """A scheduler is at work once it has the lock and has decided after the fault."""
    farm, proof = FarmClient(client), witness.proof("scheduler")
    farm.plans.tell(msgspec.structs.replace(DECISION, time=time.time()), STATS)
    since = time.monotonic()
    assert farm.plans.elect("token", 60)
    assert not proof(since)
    farm.plans.tell(msgspec.structs.replace(DECISION, time=time.time()), STATS)
    assert proof(since)
    farm.plans.abdicate(1)
    assert not proof(since)


def test_an_rq_job_has_begun(witness: Witness, client: redis.Redis) -> None:
    """`ingest` is at work once one of its own processes has begun a job after the fault."""
    queue = Queue(QUEUE, client, serializer="json")
    old = queue.enqueue("producer.tasks.cleanup", job_id="old")
    old.worker_name = worker_name(os.getpid())
    old.started_at = now()
    old.save()
    client.zadd(queue.started_job_registry.key, {"old:run": time.time() + 60})
    orphaned = witness.proof("ingest", lambda: 1)
    proof = witness.proof("ingest", os.getppid)
    queue.empty()
    since = time.monotonic()
    assert not proof(since)
    assert not proof(since)
    [probe] = queue.job_ids
    begun = Job.fetch(probe, client, "json")
    begun.worker_name = worker_name(os.getpid())
    begun.started_at = now()
    begun.save()
    assert proof(since)
    client.zadd(queue.started_job_registry.key, {f"{probe}:run": time.time() + 60})
    assert not orphaned(since)


def test_a_web_server_has_answered(witness: Witness) -> None:
    """A web server is at work once it has answered a request that began after the fault."""
    proof, since = witness.proof("web"), time.monotonic()
    witness.tally.served = since - 1
    assert not proof(since)
    witness.tally.served = since + 1
    assert proof(since)


def test_embed_has_written(witness: Witness, client: redis.Redis) -> None:
    """The command is at work once it has written, and not when workers have done chunks."""
    job = make_job(client, 4)
    watch = witness.watch
    watch.job = job.id
    with watch:
        proof, since = witness.proof("embed"), time.monotonic()
        wait_until(lambda: watch._looked_at > since)
        job.stream.commit([embed(entry) for entry in job.stream.read(HIT, 2)])
        wait_until(lambda: watch.moved_after > since)
        assert not proof(since)
        job.results.drain(4, [0, 2])
        wait_until(lambda: proof(since))


def test_growth_that_began_before_does_not_count(witness: Witness, client: redis.Redis) -> None:
    """Chunks done between the last look and the fault do not count as done after it."""
    job = make_job(client, 4)
    watch, farm = witness.watch, FarmClient(client)
    watch.job = job.id
    watch._look(farm)
    job.stream.commit([embed(entry) for entry in job.stream.read(HIT, 1)])
    since = time.monotonic()
    watch._look(farm)
    assert watch.chunks_done == 2
    assert watch.moved_after < since
    job.stream.commit([embed(entry) for entry in job.stream.read(HIT, 1)])
    watch._look(farm)
    assert watch.moved_after > since
