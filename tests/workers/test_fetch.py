"""Tests of the first stage on a real server: whose turn a block is, and how often it was tried."""

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract import block_stream, wire
from embedfarm.contract.block_stream import BlockStream, Commit
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import encode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, JobShare, Plan, TokenIds, TokenisationSettings
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.workers import fetch as first_stage
from embedfarm.workers import job_engines
from embedfarm.workers.cut_results import results_of
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.engine import Chunk, Tokenised
from embedfarm.workers.fetch import Fetcher
from embedfarm.workers.job_engines import JobEngines
from embedfarm.workers.leased_blocks import pieces
from embedfarm.workers.leases import Holdings, MicroBatch
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.support import LiveServer, force_log, wait_until
from tests.workers.support import (
    FakeEngine,
    block_of,
    create_job,
    embedded,
    lease_of,
    let_models_take,
    null_vectors,
    results,
)

SHORT = Settings(lease_seconds=0.3, heartbeat_seconds=0.05)
LONG = Settings(lease_seconds=3600)
BLOCKS = "ef:{j}:in"


def fetcher_on(farm: FarmClient, worker: str = "w", settings: Settings = LONG) -> Fetcher:
    """A first stage; another one of the same name is the same worker after a crash."""
    models = ModelStore(farm, worker, "cpu", settings, Watchdog(settings))
    engines = JobEngines(farm, worker, models)
    return Fetcher(farm, worker, Holdings(), engines, settings, threading.Event())


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


def give_plan(farm: FarmClient, *shares: JobShare, worker: str = "w") -> None:
    """Publish a plan for a worker, valid for a minute."""
    fence = farm.plans.elect("test", 60)
    assert farm.plans.publish([Plan(worker=worker, fence=fence, shares=list(shares))], fence, 60)


def share(blocks: int, job: str = "j", copies: Sequence[str] = ()) -> JobShare:
    """A share of so many blocks of a job."""
    return JobShare(job=job, tokens=blocks, blocks=blocks, copies=list(copies))


def fetch(fetcher: Fetcher) -> MicroBatch:
    """The next micro-batch, as soon as the fetcher gets one."""
    deadline = time.monotonic() + 10
    while (batch := fetcher.fetch()) is None:
        assert time.monotonic() < deadline, "nothing to fetch"
    return batch


def starts(batch: MicroBatch | None) -> list[int]:
    """The start indices of a micro-batch's blocks."""
    return [] if batch is None else [lease.block.start for lease in batch.leases]


def deliveries(batch: MicroBatch) -> list[int]:
    """The number of deliveries of each block of a micro-batch."""
    return [lease.deliveries for lease in batch.leases]


def commit(fetcher: Fetcher, batch: MicroBatch) -> None:
    """Embed and store a micro-batch."""
    found = results_of(batch, Embedder().embed(batch), fetcher.worker)
    fetcher.farm.job(batch.job).stream.commit([(lease.entry, result) for lease, result in found])
    fetcher.holdings.remove(batch.leases)


def test_plan_decides_how_much(farm: FarmClient) -> None:
    """A fetch leases as many blocks as the plan says: the first job's first, the oldest first."""
    create_job(farm, [block_of(10 * i, 10) for i in range(6)], "a")
    create_job(farm, [block_of(0, 10)], "b")
    give_plan(farm, share(9, "b"), share(4, "a"))
    fetcher = fetcher_on(farm)
    found = [fetch(fetcher) for _ in range(3)]
    assert [batch.job for batch in found] == ["b", "a", "a"]
    assert [starts(batch) for batch in found] == [[0], [0, 10, 20, 30], [40, 50]]
    assert fetcher.holdings.tokens == 7 * 40


def test_without_plan_a_worker_goes_at_its_own_rate(farm: FarmClient) -> None:
    """A worker without a plan takes one block first, then as its rate says, at most half of all."""
    job = create_job(farm, [block_of(10 * i, 10) for i in range(20)])
    fetcher = fetcher_on(farm)
    assert starts(fetcher.fetch()) == [0]
    # Three blocks of 40 tokens.
    fetcher.own_rate = lambda _model: 3 * 40 / LONG.micro_batch_seconds_max
    assert starts(fetcher.fetch()) == [10, 20, 30]
    fetcher.own_rate = lambda _model: 1e9
    assert len(starts(fetcher.fetch())) == 10
    assert job.status().first_read_ms > 0


def test_rows_are_the_texts_end_to_end(farm: FarmClient) -> None:
    """Each lease knows its rows in the micro-batch, in which texts lie end to end."""
    create_job(farm, [block_of(0, 3), block_of(3, 5)])
    give_plan(farm, share(2))
    batch = fetch(fetcher_on(farm))
    rows = [(lease.block.start, rows) for lease, rows in batch.rows()]
    assert rows == [(0, slice(0, 3)), (3, slice(3, 8))]
    assert len(batch.tokenised.lengths) == 8


def test_nothing_to_do_is_no_error(farm: FarmClient) -> None:
    """A fetch with nothing to lease returns None after a short wait."""
    fetcher = fetcher_on(farm)
    assert fetcher.fetch() is None
    create_job(farm, [block_of(0, 3)])
    assert starts(fetcher.fetch()) == [0]
    assert fetcher.fetch() is None


def test_block_ends_the_waiting(farm: FarmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for work has a new block long before the wait would end."""
    monkeypatch.setattr("embedfarm.contract.broker.BLOCK_SECONDS_MAX", 8.0)
    job = create_job(farm, [])
    job.set_state("open")
    fetcher = fetcher_on(farm)
    waiting = threading.Thread(target=job.stream.wait_for_block, args=[8.0])
    waiting.start()
    wait_until(lambda: farm.client.info("clients")["blocked_clients"])
    job.push([(block_of(0, 3), encode(block_of(0, 3)))])
    waiting.join(6)
    assert not waiting.is_alive()
    assert job.stream.backlog() == (1, 0), "waiting leases nothing"
    assert starts(fetch(fetcher)) == [0]


@pytest.mark.parametrize("state", ["cancelled", "paused"])
def test_jobs_that_are_not_open_are_left_alone(state: str, farm: FarmClient) -> None:
    """Nothing is leased of a cancelled or paused job."""
    job = create_job(farm, [block_of(0, 3)])
    job.set_state(state)
    assert fetcher_on(farm).fetch() is None
    assert job.stream.backlog() == (1, 0)


def test_stop_leases_nothing_more(farm: FarmClient) -> None:
    """A first stage that comes back from loading a model after a stop leaves the blocks alone."""
    job = create_job(farm, [block_of(0, 3)])
    fetcher = fetcher_on(farm)
    fetcher.stop.set()
    assert fetcher.fetch() is None
    assert job.stream.backlog() == (1, 0)


# Leases that other workers left, and a worker's own that it lost sight of.


def test_leases_of_a_dead_worker_are_rescued(farm: FarmClient) -> None:
    """Leases that nobody renews go to a live worker once they have expired, and not before."""
    job = create_job(farm, [block_of(0, 3), block_of(3, 3)])
    give_plan(farm, share(2), worker="dead")
    give_plan(farm, share(2), worker="live")
    assert starts(fetch(fetcher_on(farm, "dead"))) == [0, 3]
    assert fetcher_on(farm, "live", LONG).fetch() is None
    found = fetch(fetcher_on(farm, "live", SHORT))
    assert starts(found) == [0, 3]
    assert deliveries(found) == [2, 2]
    assert [row.worker for row in job.stream.pending(BLOCKS, None, 9)] == ["live", "live"]


def test_a_job_full_of_results_is_rescued_all_the_same(farm: FarmClient) -> None:
    """An expired lease of a job full of results is rescued: its collector may wait for it."""
    job = create_job(farm, [block_of(0, 3), block_of(3, 3)])
    farm.client.hset(job.keys.meta, "result_bytes", SHORT.results_bytes_max)
    fetcher = fetcher_on(farm, "live", SHORT)
    assert fetcher.fetch() is None
    job.stream.read("dead", 1)
    wait_until(lambda: job.stream.expired(BLOCKS, SHORT.lease_seconds, 1))
    assert starts(fetch(fetcher)) == [0]


def test_rescue_takes_no_more_than_the_plan_allows(farm: FarmClient) -> None:
    """A rescuer takes a micro-batch at a time, and goes on with the rest at once."""
    create_job(farm, [block_of(3 * i, 3) for i in range(5)])
    give_plan(farm, share(5), worker="dead")
    give_plan(farm, share(2), worker="live")
    assert len(starts(fetch(fetcher_on(farm, "dead")))) == 5
    live = fetcher_on(farm, "live", SHORT)
    assert [starts(fetch(live)) for _ in range(3)] == [[0, 3], [6, 9], [12]]


def test_each_job_is_rescued(farm: FarmClient) -> None:
    """Looking for expired leases of one job does not put off looking for those of the next."""
    for name in ("a", "b"):
        create_job(farm, [block_of(0, 3), block_of(3, 3)], name)
        farm.job(name).stream.read("dead", 1)
    wait_until(lambda: farm.job("b").stream.expired("ef:{b}:in", SHORT.lease_seconds, 1))
    give_plan(farm, share(1, "a"), share(1, "b"))
    fetcher = fetcher_on(farm, settings=SHORT)
    found = [fetch(fetcher) for _ in range(4)]
    assert [batch.job for batch in found] == ["a", "b", "a", "b"]
    assert [starts(batch) for batch in found] == [[0], [0], [3], [3]]


def test_what_nobody_works_on_does_not_wait_behind_another_job(farm: FarmClient) -> None:
    """A block that was handed back is leased before what is new of a job that may never end."""
    create_job(farm, [block_of(10 * i, 10) for i in range(20)], "large")
    small = create_job(farm, [block_of(0, 3)], "small")
    [entry] = small.stream.read("busy", 1)
    give_plan(farm, share(2, "large"), share(1, "small"))
    fetcher = fetcher_on(farm, settings=SHORT)
    assert fetch(fetcher).job == "large"
    small.stream.release(entry.stream, "busy", [entry.id])
    fetcher.recover()  # it looks at once
    assert fetch(fetcher).job == "small"


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_jobs_that_nobody_works_on_the_plan_s_first_is_first(
    farm: FarmClient, first: str
) -> None:
    """A worker rescues blocks of the job that the plan puts first, whatever others have left.

    The plan puts a job first whose model is loaded. Whoever began with another job would load that
    one's model, have a plan with that job first, and load the former model again, for ever.
    """
    for name in ("a", "b"):
        create_job(farm, [block_of(0, 3), block_of(3, 3)], name)
        farm.job(name).stream.read("w", 2)  # the process dies
    give_plan(farm, *(share(1, name) for name in sorted("ab", key=lambda name: name != first)))
    fetcher = fetcher_on(farm)
    assert fetch(fetcher).job == first
    assert fetch(fetcher).job == first


def test_own_leases_are_taken_up_after_a_crash(farm: FarmClient) -> None:
    """A worker that starts again has at once what it had before, without waiting for it to expire.

    Leases that a live process holds are not taken for stranded.
    """
    create_job(farm, [block_of(0, 3)])
    first = fetcher_on(farm)
    assert starts(first.fetch()) == [0]
    assert first.fetch() is None
    assert deliveries(fetch(fetcher_on(farm))) == [2]


def test_lost_reply_strands_nothing(farm: FarmClient) -> None:
    """A block whose delivery never arrived is found after `recover`, without waiting."""
    create_job(farm, [block_of(0, 3), block_of(3, 3)])
    fetcher = fetcher_on(farm)
    assert starts(fetcher.fetch()) == [0]
    farm.job("j").stream.read("w", 1)  # the reply goes to nobody
    assert fetcher.fetch() is None
    fetcher.recover()
    found = fetch(fetcher)
    assert (starts(found), deliveries(found)) == ([3], [2])


def test_outage_after_leasing_forgets_no_lease(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is found again when the server goes away between lease and hand-over.

    A lease that was held but not handed on would be renewed for ever, and never embedded.
    """
    begin = block_stream.begin

    def go_away(client: redis.Redis, jobs: Sequence[str]) -> None:
        force_log(client)
        server.kill()
        begin(client, jobs)

    create_job(farm, [block_of(0, 3)])
    fetcher = fetcher_on(farm)
    with monkeypatch.context() as patched:
        patched.setattr(block_stream, "begin", go_away)
        with pytest.raises(UNAVAILABLE):
            fetcher.fetch()
    server.start()
    fetcher.recover()
    assert starts(fetch(fetcher)) == [0]


def test_copies_are_second_tries(farm: FarmClient) -> None:
    """An idle worker repeats blocks that the plan names as copies, and renews no lease of them."""
    job = create_job(farm, [block_of(0, 3), block_of(3, 3)])
    give_plan(farm, share(2), worker="slow")
    slow = fetcher_on(farm, "slow")
    original = fetch(slow)
    give_plan(farm, share(2, copies=[wire.entry_id(3, 3), wire.entry_id(99, 1)]))
    fetcher = fetcher_on(farm)
    found = fetch(fetcher)
    assert [(lease.block.start, lease.copied) for lease in found.leases] == [(3, True)]
    assert not fetcher.holdings.by_stream()
    assert fetcher.fetch() is None, "a copy in hand is not made again"
    commit(fetcher, found)
    commit(slow, original)
    assert job.status().blocks_done == 2
    assert fetcher.fetch() is None, "what is gone is not copied"


# Poison messages: blocks that bring workers down.


def test_block_that_failed_before_goes_alone(farm: FarmClient) -> None:
    """A block at its last delivery is leased alone: no other block counts as tried with it."""
    job = create_job(farm, [block_of(10 * i, 10) for i in range(3)])
    give_plan(farm, share(3))
    for times in (1, 2):  # the process dies each time
        found = fetch(fetcher_on(farm))
        assert (starts(found), deliveries(found)) == ([0, 10, 20], [times] * 3)
    fetcher = fetcher_on(farm)
    found = fetch(fetcher)
    assert (starts(found), deliveries(found)) == ([0], [3])
    assert fetcher.fetch() is None, "nothing is leased beside it"
    assert [row.deliveries for row in job.stream.pending(BLOCKS, None, 9)] == [3, 2, 2]
    commit(fetcher, found)
    assert (starts(fetch(fetcher))) == [10]


def test_healthy_blocks_and_poisonouss_are_kept_apart(farm: FarmClient) -> None:
    """A healthy block goes before one that may be poison, and nothing is leased beside either."""
    job = create_job(farm, [block_of(10 * i, 10) for i in range(3)])
    for _ in range(2):
        assert starts(fetch(fetcher_on(farm))) == [0]
    job.stream.read("w", 1)
    give_plan(farm, share(2))
    fetcher = fetcher_on(farm)
    healthy = fetch(fetcher)
    assert starts(healthy) == [10]
    assert fetcher.fetch() is None
    commit(fetcher, healthy)
    poisonous = fetch(fetcher)
    assert starts(poisonous) == [0]
    assert fetcher.fetch() is None
    assert job.stream.backlog() == (1, 1)
    commit(fetcher, poisonous)
    assert starts(fetch(fetcher)) == [20]


def test_try_that_failed_knowingly_is_settled_at_once(farm: FarmClient) -> None:
    """A last try whose failure is known splits the block, or fails the chunk with that reason."""
    job = create_job(farm, [block_of(0, 2)])
    give_plan(farm, share(8))
    fetcher = fetcher_on(farm, settings=LONG.model_copy(update={"deliveries_max": 1}))
    (whole,) = fetch(fetcher).leases
    fetcher.tries.conclude([whole], "it did not end")
    assert whole.tried
    fetcher.holdings.remove([whole])
    (piece,) = fetch(fetcher).leases
    assert (piece.block.count, piece.deliveries, piece.attempts) == (1, 1, 2)
    fetcher.tries.conclude([piece], "it did not end")
    (error,) = results(job)[0].errors
    assert (error.index, error.reason, error.attempts) == (0, "it did not end, 1 times", 2)


def test_poison_costs_only_its_chunk(farm: FarmClient) -> None:
    """A chunk that kills every worker fails alone, with the reason; all others are embedded.

    Its block is split after three deliveries, each piece after one; the single chunk has three.
    Chunks that were only beside it are not counted out with it.
    """
    block = block_of(0, 100)
    job = create_job(farm, [block])
    give_plan(farm, share(8))
    poison = 42
    sizes = []
    fetcher = fetcher_on(farm)
    while any(job.stream.backlog()):
        batch = fetcher.fetch()
        if batch is None:
            continue
        (lease,) = batch.leases
        if lease.block.start <= poison < lease.block.start + len(lease.block.texts):
            sizes.append(len(lease.block.texts))
            fetcher = fetcher_on(farm)  # the process dies, and another one takes its name
        else:
            commit(fetcher, batch)
    assert sizes == [100] * 3 + [13] + [2] + [1] * 3
    (error,) = [error for result in results(job) for error in result.errors]
    assert (error.index, error.attempts) == (poison, len(sizes))
    assert error.reason == "the worker died or hung 3 times while embedding it"
    expected = null_vectors(block.texts)
    expected[poison] = 0
    assert (embedded(job) == expected).all()
    status = job.status()
    assert (status.chunks_done, status.chunks_failed, job.stream.backlog()) == (100, 1, (0, 0))


@given(st.integers(1, 300), st.integers(1, 20), st.booleans())
def test_pieces_make_up_the_block(count: int, number: int, with_ids: bool) -> None:  # noqa: FBT001 # hypothesis passes it by position
    """Pieces are consecutive, at most as many as asked for, and have the block's texts and ids."""
    block = block_of(17, count)
    block.ids = [str(i) for i in range(count)] if with_ids else None
    parts = pieces(block, number)
    assert len(parts) <= number
    assert [text for part in parts for text in part.texts] == block.texts
    assert [part.start for part in parts] == [
        17 + sum(len(part.texts) for part in parts[:i]) for i in range(len(parts))
    ]
    if with_ids:
        assert [name for part in parts for name in part.ids or []] == block.ids
    assert sum(part.token_count for part in parts) == block.token_count


def test_unreadable_block_fails_with_the_reason(farm: FarmClient) -> None:
    """A damaged block costs its own chunks and stops nobody."""
    job = farm.job("j")
    job.create(JobSpec(model="null:8"), 0)
    job.push([(block_of(0, 3), encode(block_of(0, 3))), (block_of(3, 4), b"\x01junk")])
    give_plan(farm, share(2))
    fetcher = fetcher_on(farm)
    commit(fetcher, fetch(fetcher))
    assert [result.start for result in results(job)] == [0, 3]
    assert [(e.index, e.reason) for e in results(job)[1].errors] == [
        (index, "not a Block record: Expected `array`, got `int`") for index in range(3, 7)
    ]
    assert fetcher.holdings.tokens == 0


@pytest.mark.parametrize(
    "block", [block_of(0, 4), block_of(3, 2), Block(start=3, texts=["a"] * 4, ids=["1"])]
)
def test_a_block_that_is_not_its_entry_s_fails(farm: FarmClient, block: Block) -> None:
    """A block that contradicts its entry costs the chunks that the entry names, and no others."""
    job = farm.job("j")
    job.create(JobSpec(model="null:8"), 0)
    job.push([(block_of(0, 3), encode(block_of(0, 3))), (block_of(3, 4), encode(block))])
    give_plan(farm, share(2))
    fetcher = fetcher_on(farm)
    commit(fetcher, fetch(fetcher))
    good, bad = results(job)
    assert (good.start, good.count, good.errors) == (0, 3, [])
    assert [error.index for error in bad.errors] == [3, 4, 5, 6]


def test_tokenizer_that_raises_costs_only_the_chunk(farm: FarmClient) -> None:
    """A text that the tokenizer cannot take fails by name; the others are tokenised."""

    class Picky(FakeEngine):
        def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
            if any("bad" in chunk for chunk in chunks):
                raise ValueError("cannot be")
            return super().tokenise(chunks)

    fetcher = fetcher_on(farm)
    create_job(farm, [])
    lease = lease_of(Block(start=5, texts=["one", "a bad one", "three"]))
    batch = fetcher._tokenise(Picky(), [lease], 0.0)
    assert batch.reasons == {1: "the tokenizer raised ValueError: cannot be"}
    assert batch.tokenised.lengths.tolist() == [3, 0, 5]
    (result,) = [result for _, result in results_of(batch, Embedder().embed(batch), "w")]
    assert [error.index for error in result.errors] == [6]


# Jobs that go, and models that come.


def test_deleted_job_is_forgotten(farm: FarmClient) -> None:
    """A job that is deleted under the worker is no error, and may come back as another one."""
    give_plan(farm, share(1))
    job = create_job(farm, [block_of(0, 3), block_of(3, 3)])
    fetcher = fetcher_on(farm)
    assert starts(fetcher.fetch()) == [0]
    job.delete()
    assert fetcher.fetch() is None
    fetcher.holdings.remove(list(fetcher.holdings._leases.values()))
    create_job(farm, [block_of(0, 3)], model="null:4")
    assert fetch(fetcher).engine.dimensions == 4
    assert job.status().first_read_ms > 0


def test_refused_job_says_why_and_others_go_on(farm: FarmClient) -> None:
    """A model that cannot be loaded is noted as a refusal, and costs other jobs nothing."""
    create_job(farm, [block_of(0, 3)], "a-wrong", "null:nonsense")
    create_job(farm, [block_of(0, 3)], "b-right")
    fetcher = fetcher_on(farm)
    assert fetch(fetcher).job == "b-right"
    (reason,) = farm.reports.refusals("a-wrong").values()
    assert "null:nonsense" in reason
    assert farm.job("a-wrong").stream.backlog() == (1, 0)
    assert farm.reports.refusals("b-right") == {}


def test_refused_job_that_is_made_anew_is_looked_at_afresh(farm: FarmClient) -> None:
    """A job that was refused and made anew is at once embedded by the worker that refused it."""
    job = create_job(farm, [block_of(0, 3)], model="null:nonsense")
    fetcher = fetcher_on(farm)
    assert fetcher.fetch() is None
    assert fetcher.engines.refusals() == ["j"]
    job.end("failed", "no such model", 60)
    create_job(farm, [block_of(0, 3)], model="null:4")
    assert fetcher.engines.refusals() == [], "as the next heartbeat says"
    assert fetch(fetcher).engine.dimensions == 4


def test_what_a_late_worker_says_is_not_of_a_job_made_anew(farm: FarmClient) -> None:
    """A worker that slept while its job was made anew says nothing about the new one."""
    job = create_job(farm, [block_of(0, 3)], model="null:4")
    late, (_, before) = fetcher_on(farm), job.identity()
    late.engines.spec("j")
    job.end("failed", "a bad row", 60)
    create_job(farm, [block_of(0, 3)], model="null:8")
    late.engines.refuse("j", "no memory")
    with pytest.raises(JobGone):
        farm.reports.agree("j", {"weights": "null:4"}, before)
    with pytest.raises(JobGone):
        farm.reports.agree_on_tokens("j", None, before)
    assert (
        farm.reports.refusals("j"),
        farm.reports.fingerprint("j"),
        late.engines.refusals(),
    ) == ({}, {}, [])
    assert fetch(late).engine.dimensions == 8


def test_a_refused_key_that_is_no_job_stops_nobody(farm: FarmClient) -> None:
    """A refused job whose key something else has got is simply not there."""
    job = create_job(farm, [block_of(0, 3)], model="null:nonsense")
    fetcher = fetcher_on(farm)
    assert fetcher.fetch() is None
    job.delete()
    farm.client.set(job.keys.meta, "what")
    assert fetcher.engines.refusals() == []


def test_spec_that_cannot_be_read_is_refused(farm: FarmClient) -> None:
    """A job written by hand, or by a newer version, stops no worker."""
    job = create_job(farm, [block_of(0, 3)])
    farm.client.hset(job.keys.meta, "spec", b"\x07what")
    fetcher = fetcher_on(farm)
    assert fetcher.fetch() is None
    assert "version 7, but this program reads version 1" in farm.reports.refusals("j")["w"]


FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("*", {"block": encode(block_of(3, 2)), "count": 2, "tokens": 9}),
    ("*", {"task": "something else"}),
    ("4-2", {"text": "no block"}),
    ("4-0", {"block": encode(Block(start=3, texts=[]))}),
    ("9-999999999999", {"block": b"", "count": "many", "tokens": "-1"}),
]


@pytest.mark.parametrize(("entry", "fields"), FOREIGN)
@pytest.mark.parametrize("stream", [BLOCKS, "ef:{j}:retry"])
def test_an_entry_that_is_none_of_the_job_s_goes(
    farm: FarmClient,
    entry: str,
    fields: dict[str, Any],
    stream: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A foreign entry in a stream is named in the log, taken off, and counted nowhere."""
    job = create_job(farm, [block_of(0, 3)])
    give_plan(farm, share(9))
    farm.client.xadd(stream, cast("Any", fields), id=entry)
    fetcher = fetcher_on(farm)
    while any(job.stream.backlog()):
        batch = fetcher.fetch()
        if batch is not None:
            commit(fetcher, batch)
    status = job.status()
    assert "block" not in fields or "is no block" in caplog.text or stream != BLOCKS
    assert job.results.at(0) is not None
    assert (status.blocks_in, status.chunks_failed) == (1, 0)


def test_a_damaged_piece_fails_by_what_is_beside_it(farm: FarmClient) -> None:
    """A damaged piece of a split block fails exactly the chunks that its entry names."""
    job = create_job(farm, [block_of(0, 4)])
    (entry,) = job.stream.read("w", 1)
    job.stream.split(entry, [block_of(0, 2), block_of(2, 2)])
    _, (damaged, fields) = cast("Any", farm.client.xrange("ef:{j}:retry"))
    farm.client.xdel("ef:{j}:retry", damaged)
    farm.client.xadd("ef:{j}:retry", fields | {b"block": b"\x01damaged"})
    give_plan(farm, share(9))
    fetcher = fetcher_on(farm)
    while any(job.stream.backlog()):
        batch = fetcher.fetch()
        if batch is not None:
            commit(fetcher, batch)
    good, bad = results(job)
    assert (good.start, good.count, good.errors) == (0, 2, [])
    assert [error.index for error in bad.errors] == [2, 3]


def test_a_block_of_another_version_waits_for_who_reads_it(farm: FarmClient) -> None:
    """A worker hands back a block of a newer version, says so, and takes other jobs."""
    job = farm.job("j")
    job.create(JobSpec(model="null:8"), 0)
    newer = bytes([Block.versions + 1]) + encode(block_of(0, 3))[1:]
    job.push([(block_of(0, 3), newer), (block_of(3, 3), encode(block_of(3, 3)))])
    create_job(farm, [block_of(0, 3)], "other")
    give_plan(farm, share(9), share(9, "other"))
    fetcher = fetcher_on(farm)
    batch = fetch(fetcher)
    assert batch.job == "other"
    assert farm.reports.refusals("j")["w"] == (
        "Block record of version 4, but this program reads version 3: update this program"
    )
    assert fetcher.engines.refusals() == ["j"]
    assert job.status().chunks_failed == 0
    assert {lease.deliveries for lease in job.stream.pending(BLOCKS, None, 9)} == {0}, (
        "nobody tried"
    )


def test_what_is_known_of_jobs_is_bounded(
    farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has done very many jobs remembers the last ones only."""
    monkeypatch.setattr(job_engines, "JOBS_MAX", 3)
    monkeypatch.setattr(first_stage, "JOBS_MAX", 3)
    fetcher = fetcher_on(farm)
    for number in range(8):
        job = create_job(farm, [block_of(0, 3)], f"j{number}", "null:8" if number % 2 else "null:?")
        give_plan(farm, share(1, job.id))
        batch = fetcher.fetch()
        if batch is not None:
            commit(fetcher, batch)
            assert fetcher.fetch() is None
    known = fetcher.engines
    for held in (known._identities, known._agreed, known._refusals, known._known):
        assert len(held) <= 3
    assert len(fetcher._begun) <= 3
    assert len(fetcher._rescue_at) <= 3


def test_foreign_token_ids_fail_by_name(farm: FarmClient) -> None:
    """Ids made by other settings than the job's are given up on; its other blocks are embedded."""
    tokens = TokenIds(
        tokenisation=TokenisationSettings(tokenizer="0" * 64, prompt="", tokens_max=9),
        ids=b"\1\0\2\0",
        width=2,
        lengths=b"\1\0\0\0" * 2,
        checksums=bytes(8),
    )
    job = create_job(farm, [block_of(0, 3), Block(start=3, texts=[], tokens=tokens)])
    give_plan(farm, share(2))
    fetcher = fetcher_on(farm)
    commit(fetcher, fetch(fetcher))
    good, bad = results(job)
    assert (good.count, good.errors) == (3, [])
    assert [(each.index, each.reason.split()[:3]) for each in bad.errors] == [
        (3, ["its", "token", "ids"]),
        (4, ["its", "token", "ids"]),
    ]


def test_who_cannot_read_the_jobs_token_ids_is_refused(farm: FarmClient) -> None:
    """A worker without the job's tokenisation settings leaves the job to workers that have it."""
    create_job(farm, [block_of(0, 3)])
    farm.reports.agree_on_tokens(
        "j", TokenisationSettings(tokenizer="0" * 64, prompt="", tokens_max=9)
    )
    assert fetcher_on(farm).fetch() is None
    assert "token ids" in farm.reports.refusals("j")["w"]


def test_other_files_than_the_jobs_are_refused(farm: FarmClient) -> None:
    """A worker whose model files are not those that the job began with says what differs."""
    create_job(farm, [block_of(0, 3)])
    farm.reports.agree("j", {"weights": "others"})
    assert fetcher_on(farm).fetch() is None
    assert "weights" in farm.reports.refusals("j")["w"]


def test_model_is_swapped_only_for_work_and_when_the_device_is_idle(farm: FarmClient) -> None:
    """A model is swapped only when a block waits for the other one and the device is idle.

    Two models at a time may not fit, and swapping for nothing would cost the job at hand.
    """
    create_job(farm, [block_of(0, 3), block_of(3, 3)], "a")
    other = create_job(farm, [], "b", "null:4")
    give_plan(farm, share(1, "b"), share(1, "a"))
    fetcher = fetcher_on(farm)
    engine = fetcher.engines.prepare("a")
    commit(fetcher, fetch(fetcher))
    batch = fetch(fetcher)
    assert batch.job == "a"
    assert batch.engine is engine, "b has no blocks"
    other.set_state("open")
    other.push([(block_of(0, 3), encode(block_of(0, 3)))])
    assert fetcher.fetch() is None
    commit(fetcher, batch)
    assert fetch(fetcher).engine.dimensions == 4


def test_a_model_is_loaded_ahead_where_there_is_room(
    farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loads a model before its turn, keeps those of its plan, and goes on with them."""
    let_models_take(monkeypatch, 2)
    for name, model in (("a", "null:8"), ("b", "null:4"), ("c", "null:2")):
        create_job(farm, [block_of(3 * n, 3) for n in range(3)], name, model)
    ahead = [JobShare(job=job, tokens=0, blocks=1, ahead=True) for job in "bc"]
    fetcher = fetcher_on(farm, settings=Settings(lease_seconds=3600, models_bytes_max=4))
    models = fetcher.engines.models

    def loaded() -> list[str]:
        wait_until(lambda: not models.is_loading)
        return sorted(each.spec.model for each in models.resident)

    give_plan(farm, share(1, "a"))
    commit(fetcher, fetch(fetcher))
    give_plan(farm, share(1, "a"), ahead[0])
    commit(fetcher, fetch(fetcher))
    assert loaded() == ["null:4", "null:8"]
    give_plan(farm, share(1, "a"), share(1, "b"), ahead[1])
    batch = fetch(fetcher)
    assert batch.job == "a"
    assert loaded() == ["null:4", "null:8"], "both are in the plan"
    commit(fetcher, batch)
    give_plan(farm, ahead[1], share(1, "b"))
    assert fetch(fetcher).job == "b", "nothing is leased for what is only loaded"
    assert loaded() == ["null:2", "null:4"]


def test_a_spec_that_cannot_be_read_is_refused_beside_a_model_ahead(farm: FarmClient) -> None:
    """A job of the plan that nobody can read is refused as ever while another model is loaded."""
    for name, model in (("a", "null:8"), ("b", "null:4"), ("odd", "null:8")):
        create_job(farm, [block_of(0, 3), block_of(3, 3)], name, model)
    fetcher = fetcher_on(farm)
    give_plan(farm, share(1, "a"))
    commit(fetcher, fetch(fetcher))
    farm.client.hset(farm.job("odd").keys.meta, "spec", b"\x07what")
    give_plan(
        farm, share(1, "odd"), share(1, "a"), JobShare(job="b", tokens=0, blocks=1, ahead=True)
    )
    assert fetch(fetcher).job == "a"
    assert "w" in farm.reports.refusals("odd")


def test_same_model_serves_every_job(farm: FarmClient) -> None:
    """Jobs whose specs differ in nothing that the engine does share one engine."""
    create_job(farm, [block_of(0, 3)], "a")
    other = farm.job("b")
    other.create(JobSpec(model="null:8", vector_dtype="float16", name="another"), 0)
    other.push([(block_of(0, 3), encode(block_of(0, 3)))])
    fetcher = fetcher_on(farm)
    assert fetch(fetcher).engine is fetch(fetcher).engine


# Small jobs that share a micro-batch.


def small_jobs(farm: FarmClient, names: str, **spec: Any) -> list[Job]:  # noqa: ANN401 # any field
    """Jobs of three chunks each, 12 tokens, whose texts name the job."""
    jobs = []
    for name in names:
        jobs.append(farm.job(name))
        jobs[-1].create(JobSpec(**{"model": "null:8", "name": name, **spec}), 0)
        jobs[-1].push([(block_of(0, 3, name), encode(block_of(0, 3, name)))])
        jobs[-1].close(3)
    return jobs


def knowing_its_rate(farm: FarmClient, tokens: float = 1e6, settings: Settings = LONG) -> Fetcher:
    """A first stage that does so many tokens in the time for which jobs may share a micro-batch."""
    fetcher = fetcher_on(farm, settings=settings)
    fetcher.own_rate = lambda _model: tokens / first_stage.SHARED_SECONDS
    return fetcher


def names(batch: MicroBatch) -> list[str]:
    """The jobs of a micro-batch, in their order."""
    return [part.job for part in batch.parts]


def commit_all(fetcher: Fetcher, batch: MicroBatch) -> None:
    """Embed and store a micro-batch of several jobs."""
    found = results_of(batch, Embedder().embed(batch), fetcher.worker)
    done = [Commit(each.job, each.entry, result, each.agreed) for each, result in found]
    assert block_stream.commit(fetcher.farm.client, done) == ["committed"] * len(done)
    fetcher.holdings.remove(batch.leases)


def test_small_jobs_share_a_micro_batch(farm: FarmClient) -> None:
    """Jobs that are alike are leased together in the plan's order, and each gets its vectors."""
    jobs = small_jobs(farm, "cab")
    give_plan(farm, *(share(2, name) for name in "cab"))
    fetcher = knowing_its_rate(farm)
    batch = fetch(fetcher)
    assert names(batch) == ["c", "a", "b"]
    assert [part.texts for part in batch.parts] == [slice(0, 3), slice(3, 6), slice(6, 9)]
    assert sorted(fetcher.holdings.jobs()) == ["a", "b", "c"]
    assert all(job.status().first_read_ms for job in jobs)
    commit_all(fetcher, batch)
    for job in jobs:
        assert (embedded(job) == null_vectors(block_of(0, 3, job.id).texts)).all()


@pytest.mark.parametrize(("tokens", "together"), [(0, "a"), (24, "ab"), (35, "ab"), (36, "abc")])
def test_jobs_share_a_moment_of_work(tokens: float, together: str, farm: FarmClient) -> None:
    """A worker joins as many jobs as it does in a moment; none while it does not know its rate."""
    small_jobs(farm, "abc")
    give_plan(farm, *(JobShare(job=name, tokens=12, blocks=1) for name in "abc"))
    assert names(fetch(knowing_its_rate(farm, tokens))) == list(together)


def test_a_large_job_is_no_company(farm: FarmClient) -> None:
    """What is not done in a moment has a micro-batch of its own, and nobody overtakes it."""
    small_jobs(farm, "abcd")
    create_job(farm, [block_of(10 * i, 10) for i in range(20)], "large")
    plan = [JobShare(job=name, tokens=12, blocks=1) for name in "abcd"]
    plan.insert(2, JobShare(job="large", tokens=400, blocks=10))
    give_plan(farm, *plan)
    fetcher = knowing_its_rate(farm, 100)
    found = [names(fetch(fetcher)) for _ in range(4)]
    assert found == [["a", "b"], ["large"], ["large"], ["c", "d"]]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "null:4"},
        {"normalize": True},
        {"dimensions": 4},
        {"vector_dtype": "float16"},
        {"prompt": "query: "},
        {"max_length": 7},
        {"long": "error"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_jobs_that_are_not_alike_are_kept_apart(other: dict[str, Any], farm: FarmClient) -> None:
    """A job that is embedded or stored in another way waits for its turn; one after it does not."""
    small_jobs(farm, "ac")
    small_jobs(farm, "b", **other)
    give_plan(farm, *(share(1, name) for name in "abc"))
    fetcher = knowing_its_rate(farm)
    batch = fetch(fetcher)
    assert names(batch) == ["a", "c"]
    commit_all(fetcher, batch)
    found = fetch(fetcher)
    assert names(found) == ["b"]
    assert getattr(found.spec, next(iter(other))) == next(iter(other.values()))


def test_nobody_urgent_waits_for_others(farm: FarmClient) -> None:
    """A job of a higher priority shares a micro-batch with its like only."""
    small_jobs(farm, "abcd")
    levels = {"a": 2, "b": 2, "c": 0, "d": 0}
    give_plan(farm, *(JobShare(job=n, tokens=1, blocks=1, priority=p) for n, p in levels.items()))
    fetcher = knowing_its_rate(farm)
    assert [names(fetch(fetcher)) for _ in range(2)] == [["a", "b"], ["c", "d"]]


def test_what_was_tried_before_has_no_company(farm: FarmClient) -> None:
    """Blocks beside which a worker died are tried again job by job, so that one costs no other."""
    small_jobs(farm, "abc")
    give_plan(farm, *(share(1, name) for name in "abc"))
    assert names(fetch(knowing_its_rate(farm))) == ["a", "b", "c"]
    fetcher = knowing_its_rate(farm)  # the process died
    found = [fetch(fetcher) for _ in range(3)]
    assert sorted(map(names, found)) == [["a"], ["b"], ["c"]]
    assert [deliveries(batch) for batch in found] == [[2]] * 3


def test_poison_has_no_company(farm: FarmClient) -> None:
    """A piece of a block that failed is neither joined to others nor has others joined to it."""
    small_jobs(farm, "abc")
    give_plan(farm, *(share(1, name) for name in "bac"))
    strict = knowing_its_rate(farm, settings=LONG.model_copy(update={"deliveries_max": 1}))
    whole = fetch(strict)
    assert names(whole) == ["b"], "each block may be poison where one try is all"
    strict.tries.conclude(whole.leases, "it hung")
    give_plan(farm, *(share(1, name) for name in "abc"))
    fetcher = knowing_its_rate(farm)
    healthy = fetch(fetcher)
    assert names(healthy) == ["a"]
    assert fetcher.fetch() is None, "nothing is leased while it may be beside poison"
    commit_all(fetcher, healthy)
    for _ in range(3):
        piece = fetch(fetcher)
        assert (names(piece), piece.leases[0].block.count) == (["b"], 1)
        commit_all(fetcher, piece)
    assert names(fetch(fetcher)) == ["c"]


def test_an_outage_strands_the_job_whose_reply_was_lost(
    farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was leased before the server went away is embedded, and the rest is found again."""
    small_jobs(farm, "abc")
    give_plan(farm, *(share(1, name) for name in "abc"))
    fetcher = knowing_its_rate(farm)
    read = BlockStream.read

    def lose_reply(stream: BlockStream, worker: str, count: int) -> list[Entry]:
        entries = read(stream, worker, count)
        if stream.id == "b":
            raise redis.ConnectionError("the reply is lost")
        return entries

    with monkeypatch.context() as patched:
        patched.setattr(BlockStream, "read", lose_reply)
        batch = fetch(fetcher)
    assert names(batch) == ["a"]
    commit_all(fetcher, batch)
    found = [fetch(fetcher), fetch(fetcher)]
    assert [(names(each), deliveries(each)) for each in found] == [(["b"], [2]), (["c"], [1])]


@pytest.mark.parametrize("fate", ["deleted", "made anew", "unreadable"])
def test_a_job_that_is_no_more_is_no_company(fate: str, farm: FarmClient) -> None:
    """A job of the plan that is gone, or is another one now, costs the others nothing."""
    jobs = small_jobs(farm, "abc")
    give_plan(farm, *(share(1, name) for name in "abc"))
    fetcher = knowing_its_rate(farm)
    assert fetcher.engines.alike("a", "b"), "it is known as it was"
    if fate == "unreadable":
        fetcher.engines.forget("b")
        farm.client.hset(jobs[1].keys.meta, "spec", b"\x01nothing")
    else:
        jobs[1].delete()
    if fate == "made anew":
        small_jobs(farm, "b", prompt="another: ")
    batch = fetch(fetcher)
    assert names(batch) == ["a", "c"]
    commit_all(fetcher, batch)
    if fate == "made anew":
        found = fetch(fetcher)
        assert (names(found), found.spec.prompt) == (["b"], "another: ")


def test_who_embeds_a_job_with_other_files_joins_it_to_none(farm: FarmClient) -> None:
    """Model files are compared with those of each job's other workers before it is joined."""
    small_jobs(farm, "abc")
    farm.reports.agree("b", {"weights": "others"})
    give_plan(farm, *(share(1, name) for name in "abc"))
    fetcher = knowing_its_rate(farm)
    assert names(fetch(fetcher)) == ["a", "c"]
    assert "weights differ" in farm.reports.refusals("b")["w"]
    assert farm.reports.refusals("a") == farm.reports.refusals("c") == {}
    known = fetcher.engines.prepare("a")
    assert known is not None
    assert farm.reports.fingerprint("c") == known.fingerprint


def test_a_job_that_was_refused_before_is_joined(farm: FarmClient) -> None:
    """What a worker's last process refused is taken back when it leases beside other jobs."""
    small_jobs(farm, "abc")
    farm.reports.refuse("b", "w", "no such model then")
    give_plan(farm, *(share(1, name) for name in "abc"))
    assert names(fetch(knowing_its_rate(farm))) == ["a", "b", "c"]
    assert farm.reports.refusals("b") == {}
