"""Helpers that make a job of a few chunks, and do what its stations do, in one thread."""

import numpy as np
import redis

from embedfarm.contract import wire
from embedfarm.contract.coverage import reconcile
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.lane import Lane
from embedfarm.contract.records import (
    Block,
    ChunkError,
    Completion,
    Decision,
    Heartbeat,
    LaneAnswer,
    LanePiece,
    Plan,
    Rate,
    Result,
    Sample,
    SchedulerStats,
    text_checksums,
)
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Account
from embedfarm.contract.window import FarmWindow

SPEC = JobSpec(model="null:2")
CHUNKS = 2  # in each block
COMPLETION = Completion(
    worker="one",
    model="null:2",
    job="little",
    chunks=2,
    tokens=20,
    padded_tokens=24,
    real_tokens=18,
    seconds=0.5,
    overhead_seconds=0.1,
)

RATE = Rate(tokens_per_second=1.0, overhead_seconds=0.0, updated=1.0, samples=1)
DECISION = Decision(time=1.0, seconds=0.1, passes=["size"], notes=[("size", "nothing")])
STATS = SchedulerStats(
    passes=["size"],
    dropped={},
    decisions=1,
    decision_seconds_mean=0.1,
    decision_seconds_p99=0.1,
    micro_batches=1,
    tokens=20,
    micro_batch_seconds_mean=0.5,
    micro_batch_seconds_p99=0.5,
    tokens_per_second=40.0,
    prediction_error=0.0,
    padding=0.3,
    efficiency=1.0,
)
SAMPLE = Sample(
    seconds=10.0,
    workers={"one": (18, 2)},
    jobs={"little": (18, 2)},
    backlog_tokens=60,
    workers_alive=1,
    job_workers={"little": {"one": 18}},
)


def block(start: int) -> Block:
    """Return the block that begins at chunk `start`."""
    texts = [f"text {index}" for index in range(start, start + CHUNKS)]
    return Block(start=start, texts=texts, token_count=10 * CHUNKS)


def push(job: Job, *starts: int) -> list[str]:
    """Push the blocks that begin at `starts`."""
    return job.push([(block(start), encode(block(start))) for start in starts])


def make_job(client: redis.Redis, blocks: int, name: str = "little") -> Job:
    """Create an open job with so many blocks."""
    job = Job(client, name)
    job.create(SPEC, 0)
    push(job, *range(0, blocks * CHUNKS, CHUNKS))
    return job


def embed(entry: Entry, *failed: int) -> tuple[Entry, Result]:
    """Return an entry with its result, in which the given chunks have failed."""
    leased = decode(Block, entry.data)
    count = len(leased.texts)
    return entry, Result(
        start=leased.start,
        count=count,
        dimensions=2,
        dtype="<f4",
        vectors=np.ones((count, 2), "<f4").tobytes(),
        checksums=text_checksums(leased.texts),
        errors=[ChunkError(index=index, reason="bad", attempts=2) for index in failed],
        token_count=9 * count,
    )


def heartbeat(worker: str, incarnation: str = "1") -> Heartbeat:
    """Return a heartbeat of a worker."""
    return Heartbeat(
        worker=worker, incarnation=incarnation, host="h", pid=1, device="cpu-0", state="idle"
    )


def snapshot(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Return every key with its content, but the farm's window, which goes by itself."""
    keys = [key for key in client.scan_iter() if key != wire.WINDOW.encode()]
    return {key: _content(client, key) for key in keys}


def _content(client: redis.Redis, key: bytes) -> bytes | None:
    """Return what a key holds; a hash in an order of its own, which the server may change."""
    if client.type(key) == b"hash":
        return repr(sorted(client.hgetall(key).items())).encode()
    return client.dump(key)


def ask_everything(client: redis.Redis) -> None:
    """Use the lane until every kind of its keys is there."""
    lane, engine = Lane(client), engine_key(SPEC)
    for name in ("asked", "left"):
        lane.send([LanePiece(id=name, spec=SPEC, place=0, texts=["a"], timeout_seconds=9)])
    assert lane.oldest(engine) is not None
    taken, _ = lane.take(engine, "one", 10**6)
    lane.renew(engine, "one", [taken.entry])
    assert lane.answer(engine, [(taken.entry, taken.id, LaneAnswer(reason="no"))]) == [True]
    assert lane.claim_loading(engine, "one")
    lane.refuse(engine, "one", "no memory")


def enqueue_everything(client: redis.Redis) -> None:
    """Write the keys that the ingest role keeps beside RQ's own."""
    elect, advance = (client.register_script(wire.script(each)) for each in ("elect", "advance"))
    fence = elect(keys=[wire.INGEST, wire.INGEST_FENCE], args=["token", 60_000])
    advance(keys=[wire.INGEST, wire.recurring_key("asked")], args=[fence, 1, 60, 1])


def log_everything(client: redis.Redis) -> None:
    """Write the keys of a process's log."""
    client.xadd(wire.log_key("one"), {"level": "INFO", "text": "ready"})
    client.zadd(wire.LOGS, {"one": 1_790_000_000})


def load_everything(farm: FarmClient) -> None:
    """Write the keys about a model that is loaded."""
    farm.loads.begin("one", "null:2")
    farm.models.pin("null:2", pinned=True)
    farm.model_counts.add("null:2", {"loads": 1})
    farm.loads.quarantine("one", "null:2", "it did not finish")


def run_everything(client: redis.Redis) -> Job:
    """Make a job and a farm that have every kind of key, and return the job."""
    farm = FarmClient(client)
    assert farm.beat(heartbeat("one"), 60)
    fence = farm.plans.elect("scheduler", 60)
    plan = Plan(worker="one", fence=fence, shares=[])
    assert farm.plans.publish([plan], fence, 60, wake=["one"])
    farm.plans.set_policy(["size"])
    farm.plans.tell(DECISION, STATS)
    farm.statistics.remember({"one|null:2|3": RATE}, ["two|null:2|3"])
    farm.statistics.report(COMPLETION, 100)
    farm.statistics.sample(SAMPLE)
    farm.statistics.long_sample(SAMPLE)
    farm.statistics.learn_budget("cpu", "null:2", 16_384)
    load_everything(farm)
    farm.admit("little", 1)
    ask_everything(client)
    enqueue_everything(client)
    client.set(wire.answer_key("a"), "{}")
    client.set(wire.session_key("a"), "0" * 64)
    client.set(wire.in_work_key("a"), 1)
    client.zadd(wire.tenant_key("one"), {"little": 1})
    other = make_job(client, 1, "other")
    other.stream.commit([embed(other.stream.read("one", 1)[0], 1)])
    farm.end("other", "failed", "no memory", Settings(), chunks_done=1)
    job = make_job(client, 4)
    job.set_terms(priority=1, weight=2)
    job.pause()
    assert job.resume() == "open"
    farm.timeline.add(FarmEvent(kind="joined", worker="one"))
    log_everything(client)
    assert (list(farm.statuses()), farm.ended([job.id])) == ([job.id], set())
    farm.reports.agree(job.id, {"weights": "1"})
    farm.reports.agree_on_tokens(job.id, None)
    farm.reports.refuse(job.id, "two", "no memory")
    farm.reports.account("one", "1", {(job.id, ""): Account()})
    job.stream.begin()
    entries = job.stream.read("one", 4)
    stream = job.keys.blocks
    assert not job.stream.renew(stream, "one", [entry.id for entry in entries])
    assert job.stream.split(entries[3], [block(6)]) == "split"
    job.stream.release(stream, "one", [entries[2].id])
    assert job.stream.commit([embed(entries[0]), embed(entries[1], 3)]) == ["committed"] * 2
    job.results.drain(CHUNKS, [0])
    assert job.close(4 * CHUNKS) == "closed"
    assert job.wait(job.keys.result_wakeup, 0)
    assert job.stream.commit([embed(job.stream.claim(stream, "two", [entries[2].id], 60)[0])]) == [
        "committed"
    ]
    assert not reconcile(job, [block(0)]).added
    FarmWindow(client, Settings()).look()
    return job
