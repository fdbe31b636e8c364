"""Tests of a whole worker on a real server: what it does, and how it ends in every state."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from embedfarm.contract import plans, wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Heartbeat
from embedfarm.workers import model_store
from embedfarm.workers import worker as worker_module
from embedfarm.workers.cut_results import failure
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.leases import MicroBatch
from embedfarm.workers.renewal import hand_back, renew
from tests.support import LiveServer, force_log, wait_until
from tests.workers.running import Running, slow_process, worker_on, working
from tests.workers.support import (
    NULL,
    block_of,
    create_job,
    embedded,
    lease_of,
    let_models_take,
    null_vectors,
    plan_blocks,
    results,
)

SLOW = "null:8:40"  # tokens per second


def blocks_of(count: int, size: int = 10) -> list[Block]:
    """So many consecutive blocks of one size."""
    return [block_of(size * i, size) for i in range(count)]


def done(job: Job) -> bool:
    """Whether every chunk of a job has a result."""
    status = job.status()
    return status.chunks_done == status.chunk_count


def check(job: Job, blocks: Sequence[Block]) -> None:
    """Assert that every chunk has the vector of its own text, and that nothing is left over."""
    texts = [text for block in blocks for text in block.texts]
    assert np.array_equal(embedded(job), null_vectors(texts))
    assert job.stream.backlog() == (0, 0)
    assert job.status().chunks_done == len(texts)


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


# What a worker does.


def test_vectors_are_right(server: LiveServer, farm: FarmClient) -> None:
    """Two workers share a job without a scheduler; every vector is the one of its text."""
    blocks = blocks_of(60)
    job = create_job(farm, blocks)
    with working(worker_on(server)), working(worker_on(server, "cpu-1")):
        wait_until(lambda: done(job))
    check(job, blocks)
    assert {result.worker.split(":")[1] for result in results(job)} <= {"cpu-0", "cpu-1"}


def test_what_is_known_is_not_embedded(server: LiveServer, farm: FarmClient) -> None:
    """A worker embeds the other chunks of a block, in whichever pieces, or none at all."""
    known = bytes([1, 0, 0, 1, 0, 1, 1, 0])
    texts = ["a", "b", "c", "d"]
    ids = [str(index) for index in range(8)]
    block = Block(start=0, texts=texts, ids=ids, token_count=9, known=known)
    nothing = Block(start=8, texts=[], known=bytes([1, 1, 1]))
    job = create_job(farm, [block, nothing, block_of(11, 2)])
    (entry,) = job.stream.read("somebody", 1)
    job.stream.split(entry, [block.piece(0, 1), block.piece(1, 4), block.piece(4, 8)], 1)
    with working(worker_on(server)):
        wait_until(lambda: done(job))
    found = results(job)
    assert [result.start for result in found] == [0, 1, 4, 8, 11]
    assert (
        b"".join(result.known or bytes(result.count) for result in found) == known + b"\1\1\1\0\0"
    )
    assert [each for result in found[:3] for each in result.ids or ()] == ids
    vectors = np.concatenate([result.matrix() for result in found])
    expected = null_vectors([*texts, *block_of(11, 2).texts])
    assert np.array_equal(vectors, expected)
    status = job.status()
    assert (status.chunks_in, status.known_in) == (status.chunks_done, status.known_done) == (13, 7)
    assert sum(each.chunks for each in farm.reports.accounts("j").values()) == 6
    assert not any(result.errors for result in found)


def test_a_block_that_is_given_up_fails_what_was_to_be_embedded() -> None:
    """Where a block is given up, the chunks whose vectors are known do not fail with it."""
    block = Block(start=4, texts=["a"], known=bytes([1, 0, 1]))
    made = failure(lease_of(block), JobSpec(model=NULL), 8, "w", "it fails")
    assert [(error.index, error.reason) for error in made.errors] == [(5, "it fails")]
    assert (made.count, made.embedded, made.known) == (3, 1, block.known)
    assert made.matrix().shape == (1, 8)


def test_jobs_that_come_later_are_served(server: LiveServer, farm: FarmClient) -> None:
    """An idle worker notices a new job, and a block that is pushed late."""
    with working(worker_on(server)):
        wait_until(farm.workers)
        job = create_job(farm, blocks_of(1))
        wait_until(lambda: done(job))
        job.set_state("open")
        job.push([(block_of(10, 5), encode(block_of(10, 5)))])
        job.close(15)
        wait_until(lambda: done(job))
    check(job, [block_of(0, 10), block_of(10, 5)])


def test_heartbeat_tells_what_it_does(server: LiveServer, farm: FarmClient) -> None:
    """A heartbeat says "busy" with job and held tokens at work, and then "idle" with a rate."""
    create_job(farm, blocks_of(4), model=SLOW)
    beats: list[Heartbeat] = []

    def state() -> str:
        beats[:] = farm.workers()
        return beats[0].state if beats else ""

    with working(worker_on(server)) as worker:
        wait_until(lambda: state() == "busy")
        assert (beats[0].worker, beats[0].job, beats[0].kind) == (worker.name, "j", "cpu")
        assert (beats[0].held_tokens > 0, beats[0].pid) == (True, os.getpid())
        assert 0 <= beats[0].held_seconds < 60
        # The device is idle before the last results are on the server, and known to be there.
        wait_until(lambda: state() == "idle" and beats[0].chunks_done == 40)
        assert beats[0].tokens_per_second > 0
        assert beats[0].held_tokens == 0
        assert set(beats[0].where) == {"queue", "forward", "check", "tokenise", "commit"}
        assert done(farm.job("j"))


def test_the_first_speed_is_told_at_once(server: LiveServer, farm: FarmClient) -> None:
    """A worker without work beats as rarely as others, and tells its first speed when it has it."""

    def last_beat() -> float | None:
        return farm.client.zscore(wire.WORKERS, worker.name)

    with working(worker_on(server, heartbeat_seconds=600.0, heartbeat_ttl_seconds=600.0)) as worker:
        wait_until(last_beat)
        first = last_beat()
        assert first is not None
        wait_until(lambda: farm.client.time()[0] > first + 1)
        assert last_beat() == first
        create_job(farm, blocks_of(4))
        wait_until(lambda: farm.workers()[0].tokens_per_second > 0)


def test_no_more_than_the_next_micro_batch_is_leased(server: LiveServer, farm: FarmClient) -> None:
    """A worker has one micro-batch on the device and one in hand, and leases no others.

    A third is leased only for the moment in which its results are being stored.
    """
    job = create_job(farm, blocks_of(6, 20), model=SLOW)  # a second each, storing far less
    plan_blocks(farm, worker_on(server).name, 1)
    leased: list[int] = []
    with working(worker_on(server)):

        def seen() -> bool:
            leased.append(job.stream.backlog()[1])
            return job.status().blocks_done >= 3

        wait_until(seen)
    assert 2 in leased
    assert max(leased) <= 3


@pytest.mark.paced
def test_next_micro_batch_is_leased_late(server: LiveServer, farm: FarmClient) -> None:
    """A worker holds only what is on the device most of the time: others may need the rest."""
    blocks = [block_of(10 * i, 10, "x" * 32) for i in range(10)]  # half a second each
    job = create_job(farm, blocks, model="null:8:160")
    plan_blocks(farm, worker_on(server).name, 1)
    leased: list[int] = []
    with working(worker_on(server)):
        wait_until(lambda: job.status().blocks_done >= 2)  # its speed is known from then on

        def seen() -> bool:
            leased.append(job.stream.backlog()[1])
            return job.status().blocks_done >= 6

        wait_until(seen)
    assert 2 in leased
    assert leased.count(1) > len(leased) / 3
    assert leased.count(3) < len(leased) / 10


def test_refused_job_does_not_stop_the_worker(server: LiveServer, farm: FarmClient) -> None:
    """A model that cannot be loaded is noted as a refusal, and other jobs are served."""
    create_job(farm, blocks_of(1), "a-wrong", "null:nonsense")
    right = create_job(farm, blocks_of(3), "b-right")
    with working(worker_on(server)) as worker:
        wait_until(lambda: done(right))
        wait_until(lambda: farm.reports.refusals("a-wrong"))
        assert "nonsense" in farm.reports.refusals("a-wrong")[worker.name]
        wait_until(lambda: [beat.refused for beat in farm.workers()] == [["a-wrong"]])
    assert farm.job("a-wrong").stream.backlog() == (1, 0)


def test_more_dimensions_than_there_are_are_refused(server: LiveServer, farm: FarmClient) -> None:
    """A job that wants longer vectors than the model's is refused with both numbers."""
    job = farm.job("long")
    job.create(JobSpec(model="null:16", dimensions=1000), 0)
    blocks = blocks_of(1)
    job.push([(block, encode(block)) for block in blocks])
    with working(worker_on(server)):
        wait_until(lambda: farm.reports.refusals("long"))
    assert list(farm.reports.refusals("long").values()) == [
        "null:16 has vectors of 16 dimensions, and 1,000 are wanted"
    ]


def test_deleted_job_does_not_stop_the_worker(server: LiveServer, farm: FarmClient) -> None:
    """A job that is deleted in mid-work leaves nothing on the server or in the worker's hands."""
    job = create_job(farm, blocks_of(50), "a", SLOW)
    with working(worker_on(server)) as worker:
        wait_until(lambda: worker._current)
        job.delete()
        other = create_job(farm, blocks_of(2), "b")
        wait_until(lambda: done(other))
        wait_until(lambda: worker.holdings.wait_empty(0))
    assert not farm.client.exists(*job.keys.all())


def test_cancelled_job_is_left(server: LiveServer, farm: FarmClient) -> None:
    """A cancelled job gets no new lease, and what was begun of it is not stored."""
    job = create_job(farm, blocks_of(50, 40), model=SLOW)  # the first one takes 1.75 s
    with working(worker_on(server)) as worker:
        wait_until(lambda: worker._current)
        job.set_state("cancelled")
        wait_until(lambda: worker.holdings.wait_empty(0))
        assert job.stream.backlog()[1] == 0
    assert job.stream.backlog()[0] > 40
    assert job.results.starts() == []


@pytest.mark.paced
@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_micro_batch_of_an_ended_job_is_dropped(
    end: str, server: LiveServer, farm: FarmClient
) -> None:
    """A device stops work on an ended job within a heartbeat and a device batch, and takes others.

    The two micro-batches that the worker holds would take five seconds each.
    """
    job = create_job(farm, [block_of(100 * i, 100) for i in range(4)], "a", SLOW)
    plan_blocks(farm, worker_on(server).name, 1, "a")
    worker, begun = worker_on(server, batch_tokens_max=8), list[str]()  # 0.2 s each
    progress = worker.embedder.progress

    def note(batch: MicroBatch, left: float) -> None:
        begun.append(batch.job)
        progress(batch, left)

    worker.embedder.progress = note
    with working(worker):
        wait_until(lambda: job.stream.backlog()[1] == 2 and worker._current)
        other = create_job(farm, blocks_of(1), "b")
        plan_blocks(farm, worker.name, 1, "b")  # instead of a third block of the first job
        getattr(job, end)()
        ended = len(begun)
        wait_until(lambda: done(other))
        wait_until(lambda: worker.holdings.wait_empty(0))
    assert begun[ended:].count("a") <= 3
    assert worker.committer.total.chunks == 10
    if end == "cancel":
        assert (job.stream.backlog(), job.results.starts()) == ((2, 0), [])
    else:
        assert not farm.client.exists(*job.keys.all())


def test_small_jobs_go_through_the_model_together(server: LiveServer, farm: FarmClient) -> None:
    """Workers embed jobs that are alike in common micro-batches, and each job gets its vectors."""
    blocks = {f"j{number}": [block_of(0, 4, f"text of {number}")] for number in range(40)}
    jobs = {name: create_job(farm, some, name) for name, some in blocks.items()}
    found: list[MicroBatch] = []
    with working(worker_on(server)) as one, working(worker_on(server, "cpu-1")) as another:
        for worker in (one, another):
            worker.embedder.progress = lambda batch, _left: found.append(batch)
        wait_until(lambda: all(map(done, jobs.values())))
    for name, job in jobs.items():
        check(job, blocks[name])
        accounts = farm.reports.accounts(name)
        assert sum(each.chunks for each in accounts.values()) == 4
    assert max(len(batch.parts) for batch in found) > 1


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_job_that_ends_leaves_its_micro_batch_to_the_others(
    end: str, server: LiveServer, farm: FarmClient
) -> None:
    """A job that is cancelled or deleted while it is embedded with others costs them nothing."""
    blocks = {name: [block_of(0, 4, name)] for name in "abc"}
    jobs = {name: create_job(farm, some, name, SLOW) for name, some in blocks.items()}
    worker = worker_on(server, batch_tokens_max=8)  # 0.2 s each
    worker.committer._rates[model_key(JobSpec(model=SLOW))] = 1e6
    with working(worker):
        wait_until(lambda: worker._current)
        assert worker._current is not None
        assert worker._current.jobs == {*"abc"}
        getattr(jobs["b"], end)()
        wait_until(lambda: done(jobs["a"]) and done(jobs["c"]))
    for name in "ac":
        check(jobs[name], blocks[name])
    assert jobs["b"].results.starts() == []
    assert worker.committer.total.chunks == 8


# Leases.


def test_leases_are_renewed(server: LiveServer, farm: FarmClient) -> None:
    """A micro-batch that takes longer than a lease stays with its worker."""
    job = create_job(farm, [block_of(0, 95)], model=SLOW)  # 4.5 s
    with working(worker_on(server, lease_seconds=2.0)) as worker:
        wait_until(lambda: worker._current)
        with working(worker_on(server, "cpu-1", lease_seconds=2.0)) as other:
            wait_until(lambda: done(job))
    assert other.committer.total.duplicates == 0, "it never got the block"
    (result,) = results(job)
    assert (result.worker, result.errors) == (worker.name, [])
    assert result.seconds > 2.0


def test_work_of_a_killed_worker_is_taken_over(server: LiveServer, farm: FarmClient) -> None:
    """A job whose worker got kill -9 in mid-work is finished by another worker."""
    blocks = blocks_of(10)
    job = create_job(farm, blocks, model=f"{NULL}:1000000")
    with slow_process(server):
        wait_until(lambda: job.stream.backlog()[1], 30)
    assert job.stream.backlog()[1]
    with working(worker_on(server)):
        wait_until(lambda: done(job))
    check(job, blocks)


def test_lost_leases_are_marked(server: LiveServer, farm: FarmClient) -> None:
    """A lease that the server gave to somebody else is marked before the device reaches it."""
    job = create_job(farm, blocks_of(3))
    worker = worker_on(server)
    batch = worker.fetcher.fetch()
    assert batch is not None
    job.stream.claim(job.keys.blocks, "thief", [batch.leases[0].entry.id], 0)
    renew(farm, worker.name, worker.holdings)
    assert batch.leases[0].lost
    assert job.stream.pending(job.keys.blocks, "thief", 9)
    job.delete()
    worker.holdings.add(batch.leases)
    renew(farm, worker.name, worker.holdings)
    hand_back(farm, worker.name, worker.holdings)  # as if it was there
    worker.client.close()


def test_server_killed_and_restarted_in_mid_work(server: LiveServer, farm: FarmClient) -> None:
    """A worker waits for a server that comes back, and every chunk is embedded once."""
    blocks = blocks_of(30)
    job = create_job(farm, blocks, model="null:8:2000")
    force_log(farm.client)
    with working(worker_on(server)) as worker:
        wait_until(lambda: worker.committer.total.chunks)
        server.kill()
        server.start()
        wait_until(lambda: done(job), 20)
    check(job, blocks)


# How a worker ends.


def test_drain_hands_leases_back(server: LiveServer, farm: FarmClient) -> None:
    """A stopped worker finishes what is on the device, hands the rest back, and leaves the list.

    Deliveries of blocks that were handed back do not count, since nobody tried them.
    """
    job = create_job(farm, blocks_of(200, 4), model=SLOW)
    plan_blocks(farm, worker_on(server).name, 1)
    running = Running(worker_on(server))
    wait_until(lambda: job.status().blocks_done >= 1 and job.stream.backlog()[1] == 2)
    running.stop()
    assert running.error is None
    assert farm.workers() == []
    held = job.stream.pending(job.keys.blocks, None, 99)
    assert all(row.deliveries == 0 and row.idle_ms > 1000 * 3600 for row in held)
    committed = job.status().blocks_done
    with working(worker_on(server, "cpu-1", lease_seconds=3600.0)) as other:
        wait_until(lambda: job.status().blocks_done > committed + len(held))
    assert other.committer.total.chunks
    assert [r.start for r in results(job)][: committed + len(held)] == [
        4 * i for i in range(committed + len(held))
    ]


def test_idle_worker_ends_at_once(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker that is stopped ends at once, not when its waits are over, and leaves."""
    wait = 4.0
    monkeypatch.setattr(worker_module, "QUEUE_SECONDS", wait)
    monkeypatch.setattr(worker_module, "FETCH_SECONDS_MAX", wait)
    monkeypatch.setattr(plans, "block_ms", lambda _seconds: 1000 * wait)
    running = Running(worker_on(server))
    wait_until(lambda: any(each["cmd"] == "blpop" for each in farm.client.client_list()))
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < wait / 2
    assert running.error is None
    assert farm.workers() == []


def test_newer_process_takes_the_name(server: LiveServer, farm: FarmClient) -> None:
    """A second process of the same name wins: the first stops, and takes nothing from it."""
    old = Running(worker_on(server))
    wait_until(farm.workers)
    with working(worker_on(server, heartbeat_seconds=4.0, heartbeat_ttl_seconds=60.0)) as new:
        old.end()
        assert old.error is None
        assert [beat.incarnation for beat in farm.workers()] == [new.incarnation]


def test_stop_while_the_server_is_away(server: LiveServer, farm: FarmClient) -> None:
    """A worker with results in hand and no server gives up; its leases expire by themselves."""
    create_job(farm, blocks_of(50), model="null:8:400")
    running = Running(worker_on(server))
    wait_until(lambda: running.worker.committer.total.chunks)
    server.kill()
    running.stop()
    assert running.error is None


def test_failed_server_connection_is_a_failure(server: LiveServer, farm: FarmClient) -> None:
    """A server that stays away ends a worker that was not stopped with a `ConnectionError`."""
    create_job(farm, blocks_of(50), model="null:8:400")
    running = Running(worker_on(server, reconnect_seconds_max=0.2))
    wait_until(lambda: running.worker.committer.total.chunks)
    server.kill()
    running.end()
    assert isinstance(running.error, redis.ConnectionError)


class Failure(Exception):
    """Raised by a stage in these tests."""


@pytest.mark.parametrize("stage", ["fetch", "embed", "commit", "facts"])
def test_failed_stage_ends_the_worker(stage: str, server: LiveServer, farm: FarmClient) -> None:
    """A failure of any stage, with the queues full, ends `run`, which raises it.

    Blocks that were not begun are handed back; blocks that were begun count as tried.
    """
    job = create_job(farm, blocks_of(50), model="null:8:400")
    worker = worker_on(server)
    calls = 0

    def fail(*_: object) -> Any:  # noqa: ANN401 # in the place of any stage
        nonlocal calls
        calls += 1
        raise Failure(stage)

    running = Running(worker)
    wait_until(lambda: worker.committer.total.chunks)
    target = {"fetch": worker.fetcher, "embed": worker.embedder, "commit": worker.committer}
    if stage == "facts":
        worker.facts = fail
    else:
        setattr(target[stage], stage, fail)
    running.end()
    assert isinstance(running.error, Failure)
    assert calls == 1
    tried = [row.deliveries for row in job.stream.pending(job.keys.blocks, None, 99)]
    assert set(tried) <= {0, 1}
    assert (1 in tried) or stage in {"fetch", "facts"}
    assert farm.workers() == []


def test_stop_while_a_model_is_loading(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes for ever to load does not keep the worker from ending.

    When it has loaded after all, nothing is leased any more.
    """
    loading, loaded = threading.Event(), threading.Event()

    def load(*arguments: Any) -> Engine:  # noqa: ANN401 # those of open_engine
        loading.set()
        loaded.wait(30)
        return NullEngine.open(arguments[0])

    monkeypatch.setattr(model_store, "open_engine", load)
    monkeypatch.setattr("embedfarm.workers.worker.FETCH_SECONDS_MAX", 0.2)
    job = create_job(farm, blocks_of(3))
    running = Running(worker_on(server))
    assert loading.wait(10)
    wait_until(lambda: [beat.state for beat in farm.workers()] == ["loading"])
    running.stop()
    assert running.error is None
    fetching = [t for t in threading.enumerate() if t.name == "fetch"]
    loaded.set()
    for thread in fetching:
        thread.join(10)
        assert not thread.is_alive()
    assert job.stream.backlog() == (3, 0)


@pytest.mark.parametrize("moment", ["loading", "working"])
def test_process_ends_with_sigterm(moment: str, server: LiveServer, farm: FarmClient) -> None:
    """SIGTERM ends the process with status 0, even while a model is being loaded."""
    model = "null:8" if moment == "working" else "sentence-transformers/all-MiniLM-L6-v2"
    job = create_job(farm, blocks_of(3), model=model)
    command = [sys.executable, "-m", "embedfarm.workers.main", "--device", "cpu-0"]
    environment = os.environ | {
        "EMBEDFARM_REDIS_URL": server.url,
        "EMBEDFARM_HEARTBEAT_SECONDS": "0.1",  # so that one tells of the loading
    }
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        state = "loading" if moment == "loading" else "idle"
        wait_until(lambda: [beat.state for beat in farm.workers()] == [state], 30)
        wait_until(lambda: moment == "loading" or done(job))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    assert farm.workers() == []


def test_memory_of_a_micro_batch_ends_with_its_commit(server: LiveServer, farm: FarmClient) -> None:
    """A worker that waits for work keeps no micro-batch, nor the model that it refers to."""
    job = create_job(farm, blocks_of(3))
    kept: list[weakref.ref[MicroBatch]] = []
    worker = worker_on(server)
    embed = worker.embedder.embed

    def note(batch: MicroBatch) -> NDArray[np.floating[Any]]:
        kept.append(weakref.ref(batch))
        return embed(batch)

    worker.embedder.embed = note  # type: ignore[method-assign] # to see what is alive
    with working(worker):
        wait_until(lambda: done(job))
        wait_until(lambda: gc.collect() >= 0 and not any(ref() for ref in kept))
    assert kept


def test_model_is_gone_before_the_next_one_is_loaded(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two models do not fit, one is gone from memory before the other one loads."""
    let_models_take(monkeypatch, 2)
    opened: list[weakref.ref[Engine]] = []

    def load(*arguments: Any) -> Engine:  # noqa: ANN401 # those of open_engine
        wait_until(lambda: gc.collect() >= 0 and not any(ref() for ref in opened))
        engine = NullEngine.open(arguments[0])
        opened.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(model_store, "open_engine", load)
    jobs = [create_job(farm, blocks_of(2), f"j{size}", f"null:{size}") for size in (4, 8)]
    with working(worker_on(server, models_bytes_max=3)):
        wait_until(lambda: all(map(done, jobs)), 25)
    assert len(opened) == 2
