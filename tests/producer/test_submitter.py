"""Tests of submission: a corpus goes into the stream of a real server."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import redis

from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import Job, JobTaken
from embedfarm.contract.records import Block, Rate, Rows, TokenisationSettings
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.producer import submitter as submission
from embedfarm.producer.submitter import GROUPS_PER_WINDOW, JobRefused, Rewind, Stale, Submitter
from tests.hash_worker import Bench, HashWorker, corpus, crash, log_bytes, text_of
from tests.support import LiveServer, wait_until
from tests.word_tokenizer import write_tokenizer

SPEC = JobSpec(model="hash")
LARGE = Settings(block_chunks_max=10, reconnect_seconds_max=15)
# A window that a few thousand short chunks fill, and a few dozen before their vectors are known.
SMALL = Settings(
    block_chunks_max=50,
    part_bytes_max=1 << 12,
    window_bytes_max=1 << 17,
    results_bytes_max=(1 << 17) + (1 << 14),
    reconnect_seconds_max=15,
)

FIRST = Block(start=0, texts=[text_of(i) for i in range(30)], ids=[str(i) for i in range(30)])

Open = Callable[..., Submitter]


@pytest.fixture
def bench(server: LiveServer) -> Iterator[Bench]:
    """Threads and connections for a test, closed at its end."""
    with Bench(server.url) as bench:
        yield bench


@pytest.fixture
def opened(bench: Bench) -> Open:
    """A function that opens the job as a run of the producer does."""

    def open_job(
        start: int = 0, settings: Settings = LARGE, tokenizer: Path | None = None
    ) -> Submitter:
        farm = FarmClient(bench.client())
        return Submitter(farm, "j", SPEC, start, settings, bench.stop, tokenizer)

    return open_job


@pytest.fixture
def job(bench: Bench) -> Job:
    """The job, for the test to look at."""
    return Job(bench.client(), "j")


@pytest.fixture
def worker(bench: Bench) -> HashWorker:
    """A worker that is alive and has a speed."""
    worker = HashWorker(bench.client(), "j", SMALL, tokens_per_second=1e6)
    worker.beat()
    return worker


def blocks_of(job: Job) -> list[Block]:
    """The blocks in the job's stream."""
    entries = cast("list[Any]", job.client.xrange(job.keys.blocks))
    return [decode(Block, fields[b"block"]) for _, fields in entries]


def tiling(job: Job, first: int = 0) -> int:
    """Check that the stream holds the corpus from `first` on without a gap; return its end."""
    for block in blocks_of(job):
        assert block.start == first
        first += len(block.texts)
        assert block.texts == [text_of(index) for index in range(block.start, first)]
        assert block.ids == [str(index) for index in range(block.start, first)]
    return first


def held_bytes(job: Job) -> int:
    """The bytes of text and results that the server holds."""
    status = job.status()
    return status.bytes_in - status.bytes_done + status.result_bytes


def stuck(job: Job, pushed: Future[Any]) -> bool:
    """Whether the producer waits for room, or has ended."""
    clients = job.client.client_list()
    return pushed.done() or any("b" in each["flags"] for each in clients)  # blocked just now


# What the producer sends.


def test_everything_is_sent(opened: Open, job: Job) -> None:
    """The stream holds every chunk in order, the counters say so, and the job is closed."""
    assert opened().submit(corpus(0, 500)) == 500
    assert tiling(job) == 500
    status = job.status()
    assert (status.state, status.chunk_count, status.chunks_in) == ("closed", 500, 500)
    assert status.blocks_in == len(blocks_of(job))
    assert status.tokens_in == sum(block.token_count for block in blocks_of(job))


@pytest.mark.parametrize(("long", "tokens"), [("truncate", 9), ("windows", 1002 + 166 * (2 + 1))])
def test_long_texts_count_as_the_model_takes_them(
    bench: Bench, job: Job, tmp_path: Path, long: str, tokens: int
) -> None:
    """A long text counts what the model keeps of it, or all of its windows, as worker and plan."""
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 9}', encoding="utf-8")
    spec = JobSpec(model=SPEC.model, long=long, long_overlap=1)
    farm = FarmClient(bench.client())
    Submitter(farm, "j", spec, 0, LARGE, bench.stop, tmp_path).submit([Rows(["word" * 1000], None)])
    assert job.status().tokens_in == tokens


def test_ids_are_sent_once_workers_say_how(opened: Open, job: Job, tmp_path: Path) -> None:
    """Token ids are sent once workers agree on how, texts before; no row is left out."""
    submitter = opened(tokenizer=write_tokenizer(tmp_path))
    encoder = TokenEncoder.describe(tmp_path, "", 9)

    def source() -> Iterator[Rows]:
        yield from corpus(0, 100)
        FarmClient(job.client).reports.agree_on_tokens("j", encoder.tokenisation)
        submitter._look_at = 0.0
        yield from corpus(100, 300)

    assert submitter.submit(source()) == 300
    blocks = blocks_of(job)
    ends = [0, *(block.end for block in blocks)]
    assert [*(block.start for block in blocks), 300] == ends
    encoded = [block for block in blocks if block.tokens is not None]
    assert [block.tokens is not None for block in blocks] == [
        block.start >= 100 for block in blocks
    ]
    assert sum(block.count for block in encoded) == 200
    assert np.asarray(encoded[0].chunks()[0]).tolist() == [4, 5, 0]  # "chunk number 100"


def test_texts_are_sent_with_another_tokenizer(opened: Open, job: Job, tmp_path: Path) -> None:
    """Texts are sent where the producer's tokenizer is not the workers'."""
    submitter = opened(tokenizer=write_tokenizer(tmp_path))
    tokenisation = TokenisationSettings(tokenizer="0" * 64, prompt="", tokens_max=9)
    FarmClient(job.client).reports.agree_on_tokens("j", tokenisation)
    assert submitter.submit(corpus(0, 300)) == 300
    assert tiling(job) == 300


@pytest.mark.parametrize("source", [[], [Rows([], None)]])
def test_empty_source(opened: Open, job: Job, source: list[Rows]) -> None:
    """A source without rows makes a job of 0 chunks that is closed."""
    assert opened().submit(source) == 0
    assert (job.status().state, job.status().chunk_count) == ("closed", 0)


def test_blocks_follow_the_slowest_worker(opened: Open, job: Job, worker: HashWorker) -> None:
    """A block is `block_seconds` of the slowest worker's work; unknown speeds do not count."""
    settings = Settings(block_chunks_min=1, block_seconds=0.01)
    worker.beat()  # 1e6 tokens/s, else 10,000 tokens in a block
    HashWorker(job.client, "j", SMALL, tokens_per_second=6_000).beat("slow")
    HashWorker(job.client, "j", SMALL).beat("new")
    opened(settings=settings).submit(corpus(0, 500))
    tokens = {block.token_count for block in blocks_of(job)[:-1]}
    assert all(60 <= each < 70 for each in tokens)


def test_blocks_follow_history(opened: Open, job: Job, bench: Bench) -> None:
    """Blocks for workers without a speed follow what is remembered of them for the model."""
    HashWorker(bench.client(), "j", SMALL).beat()
    rate = Rate(tokens_per_second=6_000, overhead_seconds=0, updated=0, samples=1)
    fast = Rate(tokens_per_second=1, overhead_seconds=0, updated=0, samples=1)
    FarmClient(job.client).statistics.remember(
        {f"hash|{model_key(SPEC)}|3": rate, "hash|other|3": fast}, []
    )
    opened(settings=Settings(block_chunks_min=1, block_seconds=0.01)).submit(corpus(0, 500))
    assert all(60 <= block.token_count < 70 for block in blocks_of(job)[:-1])


def test_results_stay_small(opened: Open, job: Job) -> None:
    """A block's vectors take no more than a small part of the window, however fast the farm."""
    opened(settings=SMALL)
    job.client.hset(job.keys.meta, "vector_bytes", 1024)
    opened(settings=SMALL).submit(corpus(0, 100, batch=10))
    most = SMALL.window_bytes_max // GROUPS_PER_WINDOW // 1024
    counts = [len(block.texts) for block in blocks_of(job)]
    assert max(counts) == most


# The window.


def test_window(opened: Open, job: Job, worker: HashWorker, bench: Bench) -> None:
    """The producer stops when the window is full, goes on as it empties, and never exceeds it."""
    submitter = opened(settings=SMALL)
    pushed = bench.run(submitter.submit, corpus(0, 20_000))
    most = 0
    while not pushed.done():
        wait_until(lambda: stuck(job, pushed))
        most = max(most, held_bytes(job))
        while worker.step():
            most = max(most, held_bytes(job))
        job.results.drain(job.status().pushed_upto, job.results.starts())
    assert pushed.result() == 20_000
    assert most <= SMALL.window_bytes_max
    assert most > SMALL.window_bytes_max / 4


def test_paused_collector(
    opened: Open,
    job: Job,
    worker: HashWorker,
    bench: Bench,
) -> None:
    """The server holds no more than the workers' limit and a group while nothing is collected."""
    pushed = bench.run(opened(settings=SMALL).submit, corpus(0, 50_000))
    bench.run(worker.run, bench.stop)
    wait_until(lambda: job.status().result_bytes >= SMALL.results_bytes_max)
    wait_until(lambda: job.status().blocks_in > job.status().blocks_done and stuck(job, pushed))
    group = SMALL.window_bytes_max // GROUPS_PER_WINDOW
    assert held_bytes(job) <= SMALL.results_bytes_max + 16 * group
    held = job.status().pushed_upto
    assert not pushed.done()
    job.results.drain(held, job.results.starts())
    wait_until(lambda: job.status().pushed_upto > held)


def test_what_is_there_needs_no_room(
    opened: Open, job: Job, worker: HashWorker, bench: Bench
) -> None:
    """A producer reads on to where the server is, while results that nobody can take fill it.

    A crash brings back what was lost on purpose: the producer is behind the server then, and who
    collects waits until the source has been read.
    """
    full = LARGE.model_copy(update={"farm_window_bytes_max": 100})
    behind = opened(settings=full)
    behind._send(
        [Block(start=0, texts=[text_of(i) for i in range(100)], ids=[str(i) for i in range(100)])]
    )
    assert worker.step()
    behind.start = 0
    assert bench.run(behind.submit, corpus(0, 100)).result(60) == 100
    assert job.status().chunks_in == 100


def test_probe(opened: Open, job: Job, bench: Bench, worker: HashWorker) -> None:
    """A few small blocks are sent before a speed is known; then the window is filled."""
    worker.farm.leave("hash")
    pushed = bench.run(opened().submit, corpus(0, 15_000))
    wait_until(lambda: job.status().blocks_in >= submission.PROBE_BLOCKS)
    wait_until(lambda: stuck(job, pushed))
    assert not pushed.done()
    assert all(block.token_count < 2 * submission.PROBE_TOKENS for block in blocks_of(job))
    worker.beat()
    assert pushed.result(60) == 15_000


def test_kept_is_bounded(
    opened: Open,
    job: Job,
    worker: HashWorker,
    bench: Bench,
) -> None:
    """The text kept for an outage is at most a window, and nothing that is on disk."""
    long = [Rows(["x" * 1000], None)] * 600
    submitter = opened(settings=SMALL)
    pushed = bench.run(submitter.submit, long)
    bench.run(worker.run, bench.stop)
    wait_until(lambda: job.status().result_bytes > 300 * 36)  # a window has 131 of the texts
    kept = sum(len(sent.data) for sent in list(submitter._kept))
    group = SMALL.window_bytes_max // GROUPS_PER_WINDOW + 50 * 1_020  # a block is 50 chunks at most
    assert kept <= SMALL.window_bytes_max + group
    assert pushed.result(60) == 600
    wait_until(lambda: job.status().blocks_done == job.status().blocks_in)
    job.results.drain(600, job.results.starts())
    submitter._status()
    assert not submitter._kept
    assert submitter._kept_bytes == 0


# How a submission ends.


@pytest.mark.parametrize("end", ["cancelled", "deleted"])
def test_refused_while_waiting(opened: Open, job: Job, bench: Bench, end: str) -> None:
    """A producer that waits for room gives up when the job is cancelled or deleted."""
    pushed = bench.run(opened(settings=SMALL).submit, corpus(0, 50_000))
    wait_until(lambda: stuck(job, pushed))
    if end == "cancelled":
        job.set_state("cancelled")
    else:
        job.delete()
    with pytest.raises(JobRefused, match=end):
        pushed.result(60)


@pytest.mark.parametrize("end", ["cancelled", "deleted"])
def test_refused_at_the_end(opened: Open, job: Job, end: str) -> None:
    """A job that ends while the source is read is refused, and not closed."""

    def source() -> Iterator[Rows]:
        if end == "cancelled":
            job.set_state("cancelled")
        else:
            job.delete()
        yield from ()

    with pytest.raises(JobRefused, match=end):
        opened().submit(source())
    assert job.client.hget(job.keys.meta, "state") == (b"cancelled" if end == "cancelled" else None)


def test_paused(opened: Open, job: Job) -> None:
    """A paused job is filled, and stays paused."""
    submitter = opened()
    job.set_state("paused")
    assert submitter.submit(corpus(0, 100)) == 100
    assert (job.status().state, job.status().chunk_count) == ("paused", 100)


def test_stop_while_waiting(opened: Open, job: Job, bench: Bench) -> None:
    """`stop` ends the waiting for room; the job stays open."""
    pushed = bench.run(opened(settings=SMALL).submit, corpus(0, 50_000))
    wait_until(lambda: stuck(job, pushed))
    bench.stop.set()
    pushed.result(60)
    assert (job.status().state, job.status().chunk_count) == ("open", -1)


def test_stop_ends_the_source(opened: Open, job: Job, bench: Bench) -> None:
    """A source that ends because of `stop` is not taken for the whole corpus."""

    def source() -> Iterator[Rows]:
        yield from corpus(0, 100)
        bench.stop.set()

    opened().submit(source())
    assert (job.status().state, job.status().chunk_count) == ("open", -1)


def test_stop_without_server(opened: Open, server: LiveServer, bench: Bench) -> None:
    """`stop` ends the waiting for a server that is away."""
    submitter = opened(settings=SMALL)
    server.kill()
    pushed = bench.run(submitter.submit, corpus(0, 100))
    bench.stop.set()
    with pytest.raises(redis.ConnectionError):
        pushed.result(60)


# A second run.


def test_resume(opened: Open, job: Job) -> None:
    """A second run goes on after the last block of the first, whatever the disk has."""
    first = opened()
    first._send([FIRST])
    second = opened(start=10)
    assert second.start == 30
    assert second.submit(corpus(30, 100)) == 100
    assert tiling(job) == 100
    assert job.status().chunks_in == 100


def test_resume_when_all_is_in(opened: Open, job: Job) -> None:
    """A second run over a job that is closed changes nothing."""
    assert opened().submit(corpus(0, 100)) == 100
    second = opened(start=10)
    assert second.start == 100
    assert second.submit([]) == 100
    assert job.status().chunk_count == 100
    assert tiling(job) == 100


def test_new_server(opened: Open, job: Job) -> None:
    """A server that does not know the job gets it from the first chunk that is not on disk."""
    submitter = opened(start=40)
    assert submitter.start == 40
    assert submitter.submit(corpus(40, 100)) == 100
    assert tiling(job, 40) == 100
    assert job.status().first_chunk == 40


def test_disk_is_ahead(opened: Open) -> None:
    """Chunks that the server has lost but the disk has are not sent again."""
    opened()._send([FIRST])
    second = opened(start=50)
    assert second.start == 50
    assert second.submit(corpus(50, 100)) == 100


# Outages.


def outage(server: LiveServer, at: int, lost_from: int | None) -> Iterator[Rows]:
    """500 chunks; before chunk `at` the server crashes and loses what came after `lost_from`."""
    size = None
    for first in range(0, 501, 100):
        if first == lost_from:
            size = log_bytes(server)
        if first == at:
            crash(server, size)
        yield from corpus(first, min(first + 100, 500))


@pytest.mark.parametrize("at", [400, 500])
@pytest.mark.parametrize("lost_from", [None, 0, 300])
def test_outage(opened: Open, job: Job, server: LiveServer, at: int, lost_from: int | None) -> None:
    """A server that crashes, even with loss of blocks, has all of them in the end, each once.

    The connection is idle during the crash, and the client renews it without an error.
    """
    assert opened().submit(outage(server, at, lost_from)) == 500
    assert tiling(job) == 500
    status = job.status()
    assert (status.state, status.chunk_count, status.chunks_in) == ("closed", 500, 500)


def test_outage_while_waiting(
    opened: Open,
    job: Job,
    server: LiveServer,
    worker: HashWorker,
    bench: Bench,
) -> None:
    """A producer that waits for room during a crash sends all lost blocks again."""
    size = log_bytes(server)  # not even the job is known afterwards
    pushed = bench.run(opened(settings=SMALL).submit, corpus(0, 20_000))
    wait_until(lambda: stuck(job, pushed))
    crash(server, size)
    bench.run(worker.run, bench.stop)

    def drained() -> bool:
        job.results.drain(0, job.results.starts())
        return pushed.done()

    wait_until(drained, 60)
    assert pushed.result() == 20_000
    wait_until(lambda: job.status().chunks_done == 20_000)


def test_outage_between_look_and_push(
    opened: Open, job: Job, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the last look at the server and the next block leaves no gap."""
    submitter = opened()
    size = log_bytes(server)
    submitter._send([Block(start=0, texts=[text_of(0)], ids=["0"])])
    has_room = submitter._has_room
    crashes = iter([partial(crash, server, size)])

    def crash_once(*args: object) -> bool:
        for each in itertools.islice(crashes, 1):
            each()
        return bool(has_room(*args))  # type: ignore[arg-type] # handed through

    monkeypatch.setattr(submitter, "_has_room", crash_once)
    assert submitter.submit(corpus(1, 100)) == 100
    assert tiling(job) == 100


def test_close_is_repeated(
    opened: Open,
    job: Job,
    server: LiveServer,
    bench: Bench,
) -> None:
    """A server that lost the end of a job is told of it again, its last blocks included."""
    submitter = opened()
    size = log_bytes(server)
    submitter.submit(corpus(0, 100))
    watched = bench.run(submitter.watch, 100)
    crash(server, size)
    wait_until(lambda: job.client.exists(job.keys.meta) and job.status().chunk_count == 100)
    assert tiling(job) == 100
    bench.stop.set()
    watched.result(60)


def test_an_earlier_try_comes_back(
    opened: Open, job: Job, server: LiveServer, bench: Bench
) -> None:
    """A server that brings back a try that failed, with as many chunks, gets this one again."""
    opened().submit(corpus(0, 100))
    FarmClient(bench.client()).end("j", "failed", "no room", LARGE)
    size = log_bytes(server)
    submitter = opened()
    submitter.submit(corpus(0, 100))
    crash(server, size)  # of which an idle connection is not told
    watched = bench.run(submitter.watch, 100)
    wait_until(lambda: watched.done() or job.status().state == "closed")
    assert tiling(job) == 100
    bench.stop.set()
    watched.result(60)


def test_an_earlier_try_that_had_sent_more_comes_back(
    opened: Open, job: Job, server: LiveServer, bench: Bench
) -> None:
    """A server that brings back a try of more rows than there are now is told to begin anew."""
    opened()._send([Block(start=0, texts=[text_of(i) for i in range(100)])])
    size = log_bytes(server)
    submitter = opened()
    submitter.start_over(0)
    submitter.submit(corpus(0, 90))
    crash(server, size)
    watched = bench.run(submitter.watch, 90)
    with pytest.raises(Stale, match="has 90 chunks; an earlier run had sent 100"):
        watched.result(60)
    submitter.start_over(0)
    assert submitter.submit(corpus(0, 90)) == 90
    assert (job.status().pushed_upto, job.status().chunks_in) == (90, 90)


def test_the_try_of_another_output_comes_back_behind_the_creation(
    job: Job, server: LiveServer, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that brings back another output's try is said to have that, not other vectors."""

    def begin(owner: str, spec: JobSpec) -> Submitter:
        farm = FarmClient(bench.client())
        return Submitter(farm, "j", spec, 0, LARGE, bench.stop, owner=owner)

    begin("one", JobSpec(model="hash", stored="/mnt/one"))
    size = log_bytes(server)
    FarmClient(bench.client()).end("j", "failed", "no model", LARGE, owner="one")
    create, crashes = Job.create, iter([partial(crash, server, size)])

    def create_then_crash(*args: Any) -> None:  # noqa: ANN401 # handed through
        create(*args)
        for each in itertools.islice(crashes, 1):
            each()

    monkeypatch.setattr(Job, "create", create_then_crash)
    with pytest.raises(JobTaken, match="fills another output"):
        begin("two", JobSpec(model="hash", stored="/mnt/two"))
    assert job.spec().stored == "/mnt/one"


def test_watch_outlives_the_job(
    opened: Open, job: Job, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is finished, and so removed, is no error to the producer that watches it."""
    submitter = opened()
    submitter.submit(corpus(0, 100))
    close, seen = submitter._close, threading.Event()

    def look(count: int) -> None:
        try:
            close(count)
        except JobGone:
            seen.set()
            raise

    monkeypatch.setattr(submitter, "_close", look)
    watched = bench.run(submitter.watch, 100)
    wait_until(lambda: job.status().state == "closed")
    job.delete()
    assert seen.wait(30)
    assert not watched.done()
    bench.stop.set()
    watched.result(60)
    assert not job.client.exists(*job.keys.all())


def test_rewind(opened: Open, job: Job, server: LiveServer) -> None:
    """Blocks of an earlier run that the server has lost must be read from the source again."""
    first = opened()
    size = log_bytes(server)
    first._send([FIRST])
    second = opened()

    def source() -> Iterator[Rows]:
        yield from corpus(30, 60)
        crash(server, size)
        yield from corpus(60, 100)

    with pytest.raises(Rewind):
        second.submit(source())
    second.attach()
    assert second.start == 0
    assert second.submit(corpus(0, 100)) == 100
    assert tiling(job) == 100


def test_no_rewind_for_what_is_on_disk(opened: Open, job: Job, server: LiveServer) -> None:
    """Lost blocks whose vectors are on disk are not missed, an earlier run's included."""
    first = opened()
    size = log_bytes(server)
    first._send([FIRST])
    second = opened()

    def source() -> Iterator[Rows]:
        yield from corpus(30, 60)
        job.results.drain(30, [])
        yield from corpus(60, 80)
        crash(server, size)
        yield from corpus(80, 100)

    assert second.submit(source()) == 100
    assert tiling(job, 30) == 100


def test_what_is_on_disk_is_not_the_server_s_to_say(
    bench: Bench, job: Job, server: LiveServer
) -> None:
    """Blocks that only an earlier try's record takes for collected are kept, and sent again."""
    size = log_bytes(server)
    submitter = Submitter(
        FarmClient(bench.client()), "j", SPEC, 0, LARGE, bench.stop, on_disk=lambda: 0
    )

    def source() -> Iterator[Rows]:
        yield from corpus(0, 60)
        job.results.drain(30, [])
        yield from corpus(60, 80)
        crash(server, size)
        yield from corpus(80, 100)

    assert submitter.submit(source()) == 100
    assert tiling(job) == 100
