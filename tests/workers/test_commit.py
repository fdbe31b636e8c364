"""Tests of the third stage on a real server: results stored and acknowledged once, and the rate."""

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import redis

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.canaries import canaries_of
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Parity
from embedfarm.workers.canary_keeper import make_canaries
from embedfarm.workers.commit import PIPELINE_BYTES, Committer
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.leases import Holdings, Lease, MicroBatch
from tests.support import LiveServer, force_log
from tests.workers.support import (
    NULL,
    block_of,
    create_job,
    embedded,
    lease_of,
    micro_batch,
    null_vectors,
    results,
)


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm on the test's server."""
    return FarmClient(client)


def committer_on(farm: FarmClient, settings: Settings | None = None) -> Committer:
    """A third stage on a farm."""
    return Committer(
        farm, "w", Holdings(), settings or Settings(), threading.Event(), "1", "a kind"
    )


def lease_all(job: Job, blocks: Sequence[Block], model: str = NULL) -> MicroBatch:
    """All blocks of a job, leased by worker w."""
    engine = NullEngine.open(JobSpec(model=model))
    entries = job.stream.read("w", 1000)
    leases = [Lease(job.id, e, b) for e, b in zip(entries, blocks, strict=True)]
    return micro_batch(blocks, engine, JobSpec(model=model), leases)


def commit(committer: Committer, batch: MicroBatch) -> None:
    """Embed and store a micro-batch."""
    committer.holdings.add(batch.leases)
    committer.commit(batch, Embedder().embed(batch))


def test_results_are_stored_and_acknowledged(farm: FarmClient) -> None:
    """A commit stores every block's result and leaves no lease, and the counters agree."""
    blocks = [block_of(0, 3), block_of(3, 5)]
    job = create_job(farm, blocks)
    committer = committer_on(farm)
    batch = lease_all(job, blocks)
    commit(committer, batch)
    assert np.array_equal(embedded(job), null_vectors([t for b in blocks for t in b.texts]))
    status = job.status()
    assert (status.chunks_done, status.tokens_done, status.blocks_done) == (8, 32, 2)
    assert status.real_tokens_done == batch.account.real_tokens == committer.total.real_tokens
    assert (job.stream.backlog(), committer.holdings.tokens, committer.total.chunks) == (
        (0, 0),
        0,
        8,
    )


def test_devices_time_and_its_price_are_counted(farm: FarmClient) -> None:
    """A worker of two devices takes twice its time, at the price that its settings have then."""
    blocks = [block_of(0, 3), block_of(3, 5)]
    job = create_job(farm, blocks)
    committer = committer_on(farm, Settings(device_cost_per_hour=3600))
    committer.devices = 2
    batch = lease_all(job, blocks)
    commit(committer, batch)
    spent, seconds = job.status().spent, 2 * batch.forward_seconds
    assert 3600 * spent.device_hours == pytest.approx(seconds, abs=2e-6)
    assert spent.cost == pytest.approx(seconds, abs=2e-6)


def test_vectors_of_two_models_are_not_mixed(farm: FarmClient) -> None:
    """A commit says anew which model a server has forgotten, and stores nothing of another one."""
    blocks = [block_of(0, 3), block_of(3, 5), block_of(8, 2)]
    job = create_job(farm, blocks)
    engine = NullEngine.open(JobSpec(model=NULL))
    agreed = farm.reports.agree("j", engine.fingerprint)
    asked: list[bytes] = []

    def agree_again(name: str, generation: str, with_engine: Engine) -> bytes:
        with contextlib.suppress(ModelRefused):
            asked.append(farm.reports.agree(name, with_engine.fingerprint, generation))
            return asked[-1]
        asked.append(b"")
        return b""

    committer = committer_on(farm)
    committer.agree_again = agree_again
    for number, (block, there, stored) in enumerate(
        zip(
            blocks,
            [b"", json.dumps(engine.fingerprint, indent=1).encode(), b'{"weights": "others"}'],
            [True, True, False],
            strict=True,
        )
    ):
        farm.client.hdel(job.keys.meta, "fingerprint")
        if there:
            farm.client.hset(job.keys.meta, "fingerprint", there)
        (entry,) = job.stream.read("w", 1)
        lease = Lease("j", entry, block, agreed=agreed)
        commit(committer, micro_batch([block], engine, leases=[lease]))
        assert len(asked) == number, "only where another one is there"
        assert (block.start in job.results.starts()) is stored
        assert farm.client.hget(job.keys.meta, "fingerprint") == (there or agreed)
    assert asked[-1] == b""
    assert job.stream.backlog() == (0, 1), "the lease ends by itself"


def test_accounts_are_noted_with_the_job(farm: FarmClient) -> None:
    """A worker's account of a job is there before the job's last result, restarts included."""
    blocks = [block_of(0, 3), block_of(3, 5)]
    create_job(farm, blocks)
    seen = []
    for incarnation, block in zip("12", blocks, strict=True):
        committer = committer_on(farm)
        committer.incarnation = incarnation
        entry = farm.job("j").stream.read("w", 1)[0]
        engine, leases = NullEngine.open(JobSpec(model=NULL)), [Lease("j", entry, block)]
        batch = micro_batch([block], engine, leases=leases)
        vectors = Embedder().embed(batch)
        batch.parts[0].account.parity = Parity(texts=3)
        committer.commit(batch, vectors)
        seen.append(batch.account.real_tokens)
        account = farm.reports.accounts("j")["w"]
        assert account.real_tokens == sum(seen)
        assert (account.engine, account.device) == ("null float32", "a kind")
        assert account.parity == Parity(texts=3)
        assert account.chunks == farm.job("j").status().chunks_done > 0


def lease_both(farm: FarmClient) -> tuple[list[Job], MicroBatch]:
    """Two jobs, and all blocks of both in one micro-batch: a of five chunks, b of ten."""
    sizes = {"a": [3, 2], "b": [10]}
    jobs, leases = [], []
    for name, counts in sizes.items():
        starts = np.cumsum([0, *counts]).tolist()
        blocks = [block_of(at, n, name) for at, n in zip(starts, counts, strict=False)]
        jobs.append(create_job(farm, blocks, name))
        entries = jobs[-1].stream.read("w", 9)
        leases += [Lease(name, e, b) for e, b in zip(entries, blocks, strict=True)]
    engine = NullEngine.open(JobSpec(model=NULL))
    return jobs, micro_batch([lease.block for lease in leases], engine, leases=leases)


def test_jobs_of_one_micro_batch_get_each_their_own(farm: FarmClient) -> None:
    """Results of several jobs are stored with the job of their texts, and so are their counters."""
    jobs, batch = lease_both(farm)
    committer = committer_on(farm)
    commit(committer, batch)
    for job, name, count in zip(jobs, "ab", (5, 10), strict=True):
        texts = block_of(0, count, name).texts
        assert np.array_equal(embedded(job), null_vectors(texts))
        status = job.status()
        assert (status.chunks_done, status.tokens_done) == (count, 4 * count)
        assert job.stream.backlog() == (0, 0)
    assert (committer.total.chunks, committer.holdings.tokens) == (15, 0)


def test_a_job_with_other_canaries_is_handed_back(farm: FarmClient) -> None:
    """A job whose workers make other vectors gets nothing, and its leases go back untried."""
    jobs, batch = lease_both(farm)
    committer, refused = committer_on(farm), dict[str, str]()
    committer.refuse = refused.__setitem__
    batch.canaries = make_canaries(batch.engine)
    assert batch.canaries is not None
    others = canaries_of(batch.canaries.matrix()[:, ::-1])
    farm.reports.agree_on_canaries([("a", "")], others, "float32")
    commit(committer, batch)
    assert [job.status().chunks_done for job in jobs] == [0, 10]
    assert list(refused) == ["a"]
    assert "other vectors than the job has: a cosine of" in refused["a"]
    assert committer.holdings.tokens == 0
    back = jobs[0].stream.expired(jobs[0].keys.blocks, 60.0, 9)
    assert [pending.deliveries for pending in back] == [0, 0]
    assert (farm.reports.canaries("a"), farm.reports.canaries("b")) == (others, batch.canaries)


@pytest.mark.parametrize("honest", [True, False])
def test_a_server_that_forgot_the_canaries_has_them_before_a_result(
    farm: FarmClient, *, honest: bool
) -> None:
    """A crash may take what was agreed on before a commit: it is agreed on again, or not."""
    jobs, batch = lease_both(farm)
    committer = committer_on(farm)
    committer.agree_again = lambda job, of, engine: farm.reports.agree(job, engine.fingerprint, of)
    batch.canaries = make_canaries(batch.engine)
    assert batch.canaries is not None
    for job in jobs:
        committer._canaries[job.id, job.noted("generation")] = batch.canaries, "as agreed"
    others = canaries_of(batch.canaries.matrix()[:, ::-1])
    if not honest:  # somebody was there since
        farm.reports.agree_on_canaries([("a", "")], others, "float32")
    commit(committer, batch)
    assert [job.status().chunks_done for job in jobs] == [5 if honest else 0, 10]
    assert farm.reports.canaries("a") == (batch.canaries if honest else others)
    assert farm.reports.canaries("b") == batch.canaries


def test_accounts_of_jobs_add_up_to_what_was_done(farm: FarmClient) -> None:
    """Each job's account has its share by tokens; together they are the micro-batch's."""
    jobs, batch = lease_both(farm)
    committer = committer_on(farm)
    commit(committer, batch)
    accounts = [farm.reports.accounts(job.id)["w"] for job in jobs]
    whole = batch.account
    for name in ("real_tokens", "padded_tokens", "batches", "batches_refused", "flops"):
        assert sum(getattr(each, name) for each in accounts) == getattr(whole, name)
    for name, seconds in whole.seconds.items():
        assert sum(each.seconds[name] for each in accounts) == pytest.approx(seconds)
    lengths = batch.tokenised.text_lengths
    assert [each.real_tokens for each in accounts] == [lengths[:5].sum(), lengths[5:].sum()]
    assert [each.chunks for each in accounts] == [5, 10]
    committed = [each.seconds["commit"] for each in committer._accounts.values()]
    assert sum(committed) == pytest.approx(committer.total.seconds["commit"])


def test_micro_batch_of_several_jobs_is_reported_as_one(farm: FarmClient) -> None:
    """The scheduler gets one report with the tokens and time of all, and what each job got."""
    _, batch = lease_both(farm)
    commit(committer_on(farm), batch)
    _, [done] = farm.statistics.events("0", 0.01)
    lengths = batch.tokenised.text_lengths
    assert (done.chunks, done.tokens, done.real_tokens) == (15, 60, lengths.sum())
    assert done.jobs == {"a": (lengths[:5].sum(), 5), "b": (lengths[5:].sum(), 10)}
    bars = farm.statistics.recent_batches(60)["w"]
    assert [(bar.job, bar.chunks) for bar in bars] == [("a", 5), ("b", 10)]
    assert sum(bar.seconds for bar in bars) == pytest.approx(done.seconds)


@pytest.mark.parametrize("fate", ["deleted", "cancelled", "lost", "made anew"])
def test_a_job_that_ends_leaves_the_others_of_its_micro_batch_alone(
    fate: str, farm: FarmClient
) -> None:
    """Results of one job are dropped, and those of the other one are stored and counted."""
    (one, other), batch = lease_both(farm)
    vectors = Embedder().embed(batch)
    if fate == "cancelled":
        one.set_state("cancelled")
    elif fate == "lost":
        for lease in batch.leases[:2]:
            lease.lost = True
    else:
        one.delete()
    if fate == "made anew":
        create_job(farm, [block_of(0, 3, "anew"), block_of(3, 2, "anew")], "a")
        one.stream.read("w", 9)  # so that entries of the same names are leased again
    committer = committer_on(farm)
    committer.holdings.add(batch.leases)
    committer.commit(batch, vectors)
    assert one.results.starts() == []
    assert np.array_equal(embedded(other), null_vectors(block_of(0, 10, "b").texts))
    assert (committer.total.chunks, committer.holdings.tokens) == (10, 0)
    _, [completion] = farm.statistics.events("0", 0.01)
    assert completion.by_job().keys() <= ({"b"} if fate == "lost" else {"a", "b"})
    assert farm.reports.accounts("b")["w"].chunks == 10
    if fate == "made anew":
        assert one.status().chunks_done == 0
        assert farm.reports.accounts("a") == {}, "nor is it told what was done for another one"


def test_large_results_go_in_several_round_trips(farm: FarmClient) -> None:
    """More vectors than one round trip takes are all stored."""
    model = "null:4096"
    blocks = [block_of(100 * i, 100) for i in range(10)]
    job = create_job(farm, blocks, model=model)
    assert 3 * PIPELINE_BYTES < 1000 * 4096 * 4
    commit(committer_on(farm), lease_all(job, blocks, model))
    texts = [text for block in blocks for text in block.texts]
    assert np.array_equal(embedded(job), null_vectors(texts, model))


def test_second_commit_changes_nothing(farm: FarmClient) -> None:
    """The first commit counts: a copy, or a commit after a lost reply, is a duplicate."""
    blocks = [block_of(0, 3)]
    job = create_job(farm, blocks)
    batch = lease_all(job, blocks)
    first, second = committer_on(farm), committer_on(farm)
    commit(first, batch)
    stored = results(job)
    batch.leases[0].copied = True
    second.worker = "another"
    commit(second, batch)
    assert (first.total.duplicates, second.total.duplicates) == (0, 1)
    assert (first.total.chunks, second.total.chunks) == (3, 0)
    assert results(job) == stored
    assert job.status().chunks_done == 3
    assert second.holdings.tokens == 0


def test_lost_leases_are_dropped(farm: FarmClient) -> None:
    """A lease that went to somebody else is not committed, and not held any longer."""
    blocks = [block_of(0, 3), block_of(3, 3)]
    job = create_job(farm, blocks)
    batch = lease_all(job, blocks)
    batch.leases[0].lost = True
    committer = committer_on(farm)
    commit(committer, batch)
    assert [result.start for result in results(job)] == [3]
    assert (committer.total.chunks, committer.holdings.tokens) == (3, 0)


@pytest.mark.parametrize("fate", ["deleted", "cancelled"])
def test_unwanted_results_are_dropped(fate: str, farm: FarmClient) -> None:
    """Results of a job that was deleted or cancelled meanwhile leave nothing on the server."""
    blocks = [block_of(0, 3)]
    job = create_job(farm, blocks)
    batch = lease_all(job, blocks)
    if fate == "deleted":
        job.delete()
    else:
        job.set_state("cancelled")
    committer = committer_on(farm)
    commit(committer, batch)
    assert job.results.starts() == []
    assert committer.holdings.tokens == 0
    assert fate == "cancelled" or not farm.client.exists(*job.keys.all())


def test_failed_chunks_are_counted_and_listed(farm: FarmClient) -> None:
    """A chunk that could not be embedded is in the job's error stream, with reason and attempts."""
    blocks = [block_of(0, 3)]
    job = create_job(farm, blocks)
    batch = lease_all(job, blocks)
    batch.reasons[1] = "no"
    commit(committer_on(farm), batch)
    assert job.status().chunks_failed == 1
    entries = farm.client.xrange(job.keys.failed) or []
    assert [fields for _, fields in entries] == [
        {b"index": b"1", b"reason": b"no", b"attempts": b"1"}
    ]


def test_rate_counts_the_whole_pipeline(farm: FarmClient) -> None:
    """The rate is tokens over the time from one commit to the next, or from fetch to commit.

    The scheduler gets the same numbers.
    """
    committer = committer_on(farm, Settings(rate_half_life_seconds=10))
    batch = micro_batch([block_of(0, 3)], NullEngine.open(JobSpec(model=NULL)))
    batch.fetch_began = 100.0
    batch.account.spend("forward", 1.5)
    committer._report(batch, {"j": 3}, 200, 102.0)
    assert committer.tokens_per_second == 100
    batch.fetch_began = 101.0  # while the one before was on the device
    committer._report(batch, {"j": 3}, 2000, 112.0)
    assert committer.tokens_per_second == pytest.approx(150), "ten seconds count half"
    batch.fetch_began = 500.0
    committer._report(batch, {"j": 3}, 0, 510.0)
    assert committer.tokens_per_second == pytest.approx(75), "idle time does not count"
    batch.account.spend("check", 4.0)
    batch.fetch_began = 600.0
    committer._report(batch, {"j": 3}, 600, 610.0)
    _, completions = farm.statistics.events("0", 0.01)
    assert [c.first for c in completions] == [True, False, False, False]
    assert completions.pop().seconds == 6.0, "nor does the parity check"
    assert [c.seconds for c in completions] == [2.0, 10.0, 10.0]
    assert [c.tokens for c in completions] == [200, 2000, 0]
    assert completions[0].overhead_seconds == 0.5


def test_commit_waits_for_the_server(server: LiveServer, farm: FarmClient) -> None:
    """A server that is killed during a commit and starts again gets the commit, once."""
    blocks = [block_of(0, 3)]
    job = create_job(farm, blocks)
    batch = lease_all(job, blocks)
    force_log(farm.client)
    server.kill()
    restart = threading.Timer(0.3, server.start)
    restart.start()
    commit(committer_on(farm), batch)
    restart.join()
    assert np.array_equal(embedded(job), null_vectors(blocks[0].texts))
    assert job.status().chunks_done == 3


def test_stop_ends_the_waiting(server: LiveServer, farm: FarmClient) -> None:
    """A worker that is to stop while the server is away gives up its commit at once."""
    blocks = [block_of(0, 3)]
    committer = committer_on(farm)
    batch = lease_all(create_job(farm, blocks), blocks)
    server.kill()
    committer.stop.set()
    with pytest.raises(UNAVAILABLE):
        commit(committer, batch)
    assert committer.holdings.tokens


def test_a_lease_that_comes_again_is_held_until_its_own_end() -> None:
    """The end of an earlier lease of a block leaves the later one, by which its model stays."""
    holdings = Holdings()
    first, again = (replace(lease_of(block_of(0, 3)), engine="e") for _ in range(2))
    holdings.add([first])
    holdings.add([again])
    holdings.remove([first])
    assert holdings.engines() == {"e"}
    holdings.remove([again])
    assert holdings.wait_empty(0)
