"""Tests of what a server has of a job, and of how a gap in it is filled."""

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import pytest
import redis

from embedfarm.contract.coverage import Coverage, is_waiting, reconcile
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import has_room
from embedfarm.contract.status import JobGone
from embedfarm.producer.refill import refill
from tests.hash_worker import Bench, HashWorker, corpus, result_of, text_of
from tests.support import LiveServer

COUNT: Final = 100
BLOCK: Final = 10
SETTINGS: Final = Settings()


@pytest.fixture
def bench(server: LiveServer) -> Iterator[Bench]:
    """Open connections to the server."""
    with Bench(server.url) as bench:
        yield bench


@pytest.fixture
def job(client: redis.Redis) -> Job:
    """Make a closed job of 100 chunks: 0 to 29 are embedded, 30 to 49 leased, the others wait."""
    job = Job(client, "j")
    job.create(JobSpec(model="hash"), 0)
    blocks = [make_block(start, start + BLOCK) for start in range(0, COUNT, BLOCK)]
    job.push([(block, encode(block)) for block in blocks])
    job.close(COUNT)
    entries = job.stream.read("one", 5)
    job.stream.commit([(entry, result_of(decode(Block, entry.data))) for entry in entries[:3]])
    return job


def make_block(first: int, end: int) -> Block:
    """Make a block of some chunks."""
    texts = [text_of(index) for index in range(first, end)]
    ids = [str(index) for index in range(first, end)]
    return Block(start=first, texts=texts, ids=ids, token_count=7 * len(texts))


def work(bench: Bench) -> None:
    """Embed all that is left, whoever held it."""
    worker = HashWorker(bench.client(), "j", SETTINGS)
    for stream in (worker.job.keys.retry, worker.job.keys.blocks):
        ids = [row.id for row in worker.job.stream.pending(stream, None, 100)]
        worker.job.stream.claim(stream, "hash", ids, 0)
    while worker.step():
        pass


def check(job: Job) -> None:
    """Assert that every chunk has one result, and that the counters say that all is done."""
    results = [job.results.at(start) for start in sorted(job.results.starts())]
    ids = [name for result in results if result for name in result.ids or ()]
    assert ids == [str(index) for index in range(COUNT)]
    status = job.status()
    assert status.embedded
    assert (status.chunks_in, status.chunks_done) == (COUNT, COUNT)
    assert (status.bytes_done, status.tokens_done) == (status.bytes_in, status.tokens_in)
    sizes = job.client.hvals(job.keys.results)
    assert status.result_bytes == sum(map(len, sizes))


def fill(bench: Bench, missing: list[range]) -> int:
    """Send missing chunks again, and return how many were sent."""
    return refill(Job(bench.client(), "j"), missing, corpus(0, COUNT, 7), SETTINGS, bench.stop)


def test_what_is_where(job: Job) -> None:
    """Results, leases and what waits tile the job; nothing is missing, nothing changes."""
    before = job.status()
    coverage = reconcile(job)
    assert list(coverage.results) == [range(10), range(10, 20), range(20, 30)]
    assert list(coverage.leased) == [range(30, 40), range(40, 50)]
    assert list(coverage.waiting) == [range(n, n + 10) for n in range(50, 100, 10)]
    assert (coverage.drained_upto, coverage.pushed_upto) == (0, COUNT)
    assert not coverage.missing()
    assert job.status() == before


def test_what_waits_for_a_worker(job: Job) -> None:
    """A chunk waits while its block is unread or leased, and its entry is there."""
    waiting = [index for index in range(COUNT + 5) if is_waiting(job, index)]
    assert waiting == list(range(30, 100))
    lose_unread(job)
    lose_acknowledged(job)
    waiting = [index for index in range(COUNT) if is_waiting(job, index)]
    assert waiting == [*range(30, 40), *range(50, 60), *range(70, 100)]
    lose_stream(job)
    assert not is_waiting(job, 50)


def test_nothing_waits_where_no_group_is(job: Job) -> None:
    """A chunk does not wait where the consumer group is gone, and the look is no error."""
    lose_group(job)
    assert not any(is_waiting(job, index) for index in range(COUNT))


@pytest.mark.parametrize("command", ["xrevrange", "xpending_range"])
def test_nothing_waits_of_a_job_that_goes(
    job: Job, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A chunk of a job that is deleted just when somebody looks does not wait."""
    look = getattr(job.client, command)

    def look_at_last(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 # those of the client
        found = look(*arguments, **options)
        job.delete()
        return found

    monkeypatch.setattr(job.client, command, look_at_last)
    assert not is_waiting(job, 50)


def lose_unread(job: Job) -> None:
    """Delete an entry that nobody has read."""
    assert job.client.xdel(job.keys.blocks, "61-10") == 1


def lose_leased(job: Job) -> None:
    """Delete an entry that is leased, so that it can no longer be committed."""
    assert job.client.xdel(job.keys.blocks, "31-10") == 1


def lose_acknowledged(job: Job) -> None:
    """Acknowledge a lease without a result: the entry is there, and nobody gets it."""
    assert job.client.xack(job.keys.blocks, "farm", "41-10") == 1


def lose_result(job: Job) -> None:
    """Delete a result that nobody has collected."""
    assert job.client.hdel(job.keys.results, "10") == 1


def lose_first(job: Job) -> None:
    """Delete the oldest entries and the first result."""
    assert job.client.xtrim(job.keys.blocks, maxlen=3, approximate=False) == 4
    job.client.hdel(job.keys.results, "0")


def lose_stream(job: Job) -> None:
    """Delete the stream with its leases, as a server that evicts does."""
    job.client.delete(job.keys.blocks)


def lose_all(job: Job) -> None:
    """Delete all of the job but its counters."""
    job.client.delete(job.keys.blocks, job.keys.retry, job.keys.results)


def lose_group(job: Job) -> None:
    """Destroy the consumer group, so that everything is delivered again."""
    job.client.xgroup_destroy(job.keys.blocks, "farm")


GAPS: Final[dict[Callable[[Job], None], list[range]]] = {
    lose_unread: [range(60, 70)],
    lose_leased: [range(30, 40)],
    lose_acknowledged: [range(40, 50)],
    lose_result: [range(10, 20)],
    lose_first: [range(10), range(30, 70)],
    lose_stream: [range(30, 100)],
    lose_all: [range(100)],
    lose_group: [range(30, 100)],
}


@pytest.mark.parametrize("lose", GAPS)
def test_holes_are_filled(bench: Bench, job: Job, lose: Callable[[Job], None]) -> None:
    """Chunks that are lost are found, and sent again, embedded and counted once."""
    lose(job)
    missing = reconcile(job).missing()
    assert missing == GAPS[lose]
    sent = fill(bench, missing)
    assert sent == (0 if lose is lose_group else sum(map(len, missing)))
    assert not reconcile(job).missing()
    assert fill(bench, missing) == 0
    work(bench)
    check(job)


def test_pieces_of_a_failed_block_are_there(bench: Bench, job: Job) -> None:
    """Pieces of a split block are found, and one that is lost is sent again alone."""
    (entry,) = job.stream.claim(job.keys.blocks, "one", ["31-10"], 0)
    job.stream.split(entry, [make_block(first, first + 2) for first in range(30, 40, 2)])
    assert not reconcile(job).missing()
    pieces = cast("list[Any]", job.client.xrange(job.keys.retry))
    job.client.xdel(job.keys.retry, pieces[1][0])
    missing = reconcile(job).missing()
    assert missing == [range(32, 34)]
    assert fill(bench, missing) == 2
    work(bench)
    check(job)


def test_many_at_once(bench: Bench, job: Job) -> None:
    """Several processes that fill the same gap at once fill it once."""
    lose_all(job)
    done = [bench.run(fill, bench, [range(COUNT)]) for _ in range(4)]
    assert sum(each.result(20) for each in done) == COUNT
    work(bench)
    check(job)


def test_beside_the_producer(bench: Bench, client: redis.Redis) -> None:
    """Chunks that are not pushed yet, or are on disk, are not missing."""
    job = Job(client, "j")
    job.create(JobSpec(model="hash"), 0)
    blocks = [make_block(start, start + BLOCK) for start in range(0, COUNT, BLOCK)]
    job.push([(block, encode(block)) for block in blocks[:6]])
    job.results.drain(20, [])
    lose_all(job)
    assert reconcile(job).missing() == [range(20, 60)]
    assert reconcile(job).missing(30) == [range(30, 60)]
    coverage = reconcile(job, [blocks[1], blocks[3], blocks[6]])
    assert list(coverage.added) == [range(30, 40)]
    assert coverage.missing() == [range(20, 30), range(40, 60)]
    assert job.push([(block, encode(block)) for block in blocks[5:7]]) == ["exists", "added"]
    fill(bench, coverage.missing())
    assert not reconcile(job).missing()


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_job_that_ended_takes_nothing(job: Job, end: str) -> None:
    """Nothing is sent again of a job that was cancelled or deleted."""
    lose_all(job)
    getattr(job, end)()
    if end == "delete":
        with pytest.raises(JobGone):
            reconcile(job, [make_block(0, 10)])
    else:
        assert not reconcile(job, [make_block(0, 10)]).added
    assert not job.client.xlen(job.keys.retry)


def test_results_do_not_block_what_they_wait_for(bench: Bench, job: Job) -> None:
    """A gap is embedded though the results behind it are at their limit."""
    work(bench)
    small = Settings(window_bytes_max=1000, results_bytes_max=2000, part_bytes_max=100)
    job.client.hdel(job.keys.results, "0")
    assert not has_room(job.status(), small)
    fill(bench, reconcile(job).missing())
    assert has_room(job.status(), small)
    job.results.drain(10, [])
    assert not has_room(job.status(), small)


def test_missing() -> None:
    """The missing ranges are right when others overlap, and wherever the disk is."""
    coverage = Coverage(
        drained_upto=5,
        pushed_upto=50,
        results=[range(8), range(30, 35)],
        waiting=[range(7, 10)],
        leased=[range(12, 20), range(14, 16)],
        added=[],
    )
    assert coverage.missing() == [range(10, 12), range(20, 30), range(35, 50)]
    assert coverage.missing(33) == [range(35, 50)]
    assert coverage.missing(60) == []


@pytest.mark.parametrize("rows", [1, 9, 1000])
def test_the_source_is_read_as_far_as_needed(bench: Bench, job: Job, rows: int) -> None:
    """Missing ranges are read from batches of any size, and no batch behind them."""
    lose_all(job)
    read = []

    def source() -> Iterator[Rows]:
        for each in corpus(0, COUNT, rows):
            read.append(each)
            yield each

    missing = [range(1, 3), range(5, 6), range(6, 30), range(40, 41)]
    assert refill(Job(bench.client(), "j"), missing, source(), SETTINGS, bench.stop) == 28
    assert sum(len(each.texts) for each in read) <= max(41, rows) + rows
    entries = cast("list[Any]", job.client.xrange(job.keys.retry))
    blocks = [decode(Block, fields[b"block"]) for _, fields in entries]
    assert {i for b in blocks for i in range(b.start, b.end)} == {i for r in missing for i in r}
    assert all(b.texts == [text_of(i) for i in range(b.start, b.end)] for b in blocks)
