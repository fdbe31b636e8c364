"""Tests of collecting results of a real server into an output."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from embedfarm.collector import collect
from embedfarm.collector.collect import Collector, JobCancelled
from embedfarm.collector.manifest import About, OutputError
from embedfarm.collector.output import Output
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_results import JobResults
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.producer.submitter import Submitter
from tests.hash_worker import (
    VECTOR_BYTES,
    Bench,
    HashWorker,
    corpus,
    crash,
    log_bytes,
    result_of,
    text_of,
    vectors_of,
)
from tests.support import LiveServer, wait_until

SPEC = JobSpec(model="hash")
ABOUT = About(job="j", model="hash", fingerprint={}, source={"texts_sha256": ""})
PART_CHUNKS = 100
SETTINGS = Settings(
    part_bytes_max=PART_CHUNKS * VECTOR_BYTES,
    window_bytes_max=1 << 17,
    block_chunks_min=1,
    block_seconds=0.001,
    reconnect_seconds_max=15,
)


class Collecting:
    """A job, a worker that makes blocks of about ten chunks, and an output in small parts."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        self.bench = bench
        self.job = Job(bench.client(), "j")
        self.job.create(SPEC, 0)
        self.worker = HashWorker(bench.client(), "j", SETTINGS, tokens_per_second=70_000)
        self._directory = directory
        self.output = self._open()

    def _open(self) -> Output:
        size = SETTINGS.part_bytes_max
        return Output(self._directory, {}, sink="parquet", part_bytes_max=size)

    def reopen(self) -> None:
        """Open the output again, as another process does after this one has died."""
        self.output.close()
        self.output = self._open()

    def push(self, *bounds: int) -> None:
        """Push a whole job of blocks between these indices."""
        blocks = [block(first, end) for first, end in pairwise(bounds)]
        self.job.push([(each, encode(each)) for each in blocks])
        self.job.close(bounds[-1])

    def work(self) -> None:
        """Embed all that is there."""
        while self.worker.step():
            pass

    def produce(self, count: int) -> None:
        """Push the whole corpus, as the producer of a run does."""
        farm, start = FarmClient(self.bench.client()), self.output.next_index
        submitter = Submitter(
            farm,
            "j",
            SPEC,
            start,
            SETTINGS,
            self.bench.stop,
            on_disk=lambda: self.output.next_index,
        )
        source = corpus(submitter.start, count)
        self.bench.run(lambda: submitter.watch(submitter.submit(source)))

    def collect(self) -> int | None:
        """Collect to the end, and return the number of chunks."""
        return self.collector().collect()

    def collector(self) -> Collector:
        """Return a collector that has not begun."""
        return Collector(Job(self.bench.client(), "j"), self.output, SETTINGS, self.bench.stop)

    def waits(self) -> bool:
        """Tell whether the collector waits for results."""
        return any(each["cmd"] == "blpop" for each in self.job.client.client_list())

    def check(self, count: int) -> None:
        """Finish the output, and assert that each vector is there once, in order, under its id."""
        self.output.finish(count, ABOUT)
        parts = sorted(self._directory.glob("*.parquet"))
        rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
        assert [row["index"] for row in rows] == list(range(count))
        assert [row["id"] for row in rows] == [str(index) for index in range(count)]
        vectors = np.array([row["embedding"] for row in rows]).reshape(count, -1)
        assert (vectors == vectors_of([text_of(index) for index in range(count)])).all()


@pytest.fixture
def collecting(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Collecting]:
    """Yield a job, a worker and an output, with short waits."""
    monkeypatch.setattr(collect, "WAIT_SECONDS", 0.1)
    with Bench(server.url) as bench:
        collecting = Collecting(bench, tmp_path / "out")
        yield collecting
    collecting.output.close()


def block(first: int, end: int) -> Block:
    """Return a block of some chunks."""
    indices = range(first, end)
    texts, ids = [text_of(index) for index in indices], [str(index) for index in indices]
    return Block(start=first, texts=texts, ids=ids, token_count=7 * len(texts))


# The whole way.


def test_path(collecting: Collecting) -> None:
    """Each chunk gets its own vector, in order, from producer over worker and collector."""
    collecting.bench.run(collecting.worker.run, collecting.bench.stop)
    collecting.produce(3_000)
    assert collecting.collect() == 3_000
    assert len(collecting.output.parts) >= 10
    assert collecting.job.status().drained_upto == collecting.output.next_index
    collecting.check(3_000)


def test_empty(collecting: Collecting) -> None:
    """A job of 0 chunks is complete as it is."""
    collecting.job.close(0)
    assert collecting.collect() == 0
    assert collecting.output.finish(0, ABOUT).count == 0
    assert not collecting.output.parts


@pytest.mark.parametrize("lost", ["nothing", "the last half", "all"])
def test_crash_of_the_server(server: LiveServer, collecting: Collecting, lost: str) -> None:
    """The output is whole even if the server crashes in the midst, and loses what came last."""
    size = log_bytes(server) if lost == "all" else None
    collecting.bench.run(collecting.worker.run, collecting.bench.stop)
    done = collecting.bench.run(collecting.collect)
    collecting.produce(15_000)
    wait_until(lambda: len(collecting.output.parts) > 5)
    if lost == "the last half":
        size = log_bytes(server)
    wait_until(lambda: len(collecting.output.parts) > 15)
    assert not done.done()
    crash(server, size)
    assert done.result(60) == 15_000
    assert collecting.job.status().chunk_count == 15_000
    collecting.check(15_000)


def test_crash_that_brings_back_a_job_further_on(
    server: LiveServer, collecting: Collecting
) -> None:
    """What a record of an earlier try takes for collected is embedded, though it is not here.

    The output was begun again from its start, as after a change of the corpus.
    """
    collecting.job.delete()
    collecting.job.create(SPEC, 500)
    size = log_bytes(server)
    collecting.job.end("failed", "the corpus was changed", 60)
    collecting.job.create(SPEC, 0)
    done = collecting.bench.run(collecting.collect)
    collecting.produce(15_000)
    wait_until(lambda: collecting.job.status().blocks_in > 5)
    crash(server, size)
    collecting.bench.run(collecting.worker.run, collecting.bench.stop)
    assert done.result(60) == 15_000
    collecting.check(15_000)


class Crash(Exception):
    """Raised to end a collector like a crash."""


@pytest.mark.parametrize("when", ["before drain", "after drain"])
def test_crash_of_the_collector(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A collector that ends between the disk and the server is continued without a trace."""
    collecting.push(*range(0, 1_001, 10))
    collecting.work()
    drain = JobResults.drain

    def crash_at_third_part(self: JobResults, upto: int, starts: list[int]) -> str:
        answer = drain(self, upto, starts) if when == "after drain" else "drained"
        if upto >= 3 * PART_CHUNKS:
            raise Crash
        return answer

    monkeypatch.setattr(JobResults, "drain", crash_at_third_part)
    with pytest.raises(Crash):
        collecting.collect()
    monkeypatch.setattr(JobResults, "drain", drain)
    collecting.reopen()
    assert collecting.output.next_index == 3 * PART_CHUNKS
    assert collecting.collect() == 1_000
    assert collecting.job.results.starts() == [990]
    collecting.check(1_000)


# What is on the server.


def test_drained(collecting: Collecting) -> None:
    """Results that are on disk leave the server, but for the last one; those in memory stay."""
    collecting.push(*range(0, 251, 10))
    collecting.work()
    size = collecting.job.status().result_bytes
    assert collecting.collect() == 250
    assert (collecting.output.next_index, collecting.output.buffered.stop) == (200, 250)
    assert sorted(collecting.job.results.starts()) == [190, *range(200, 250, 10)]
    assert collecting.job.status().drained_upto == 200
    assert 0 < collecting.job.status().result_bytes < size / 3


def test_results_that_fill_no_part_leave_room(collecting: Collecting) -> None:
    """A part is closed before it is full if its results alone are as many as workers make."""
    settings = SETTINGS.model_copy(update={"results_bytes_max": 500})
    worker = HashWorker(collecting.bench.client(), "j", settings)
    collecting.push(*range(0, 50, 2))  # more blocks than are leased at a time, less than a part
    collecting.bench.run(worker.run, collecting.bench.stop)
    collector = Collector(
        Job(collecting.bench.client(), "j"), collecting.output, settings, collecting.bench.stop
    )
    assert collecting.bench.run(collector.collect).result(20) == 48
    collecting.check(48)


def test_stale_results(collecting: Collecting) -> None:
    """Results that a server made anew after a loss, and the disk has, are forgotten."""
    collecting.output.add(result_of(block(0, PART_CHUNKS)))
    collecting.push(*range(0, 151, 10))
    collecting.work()
    assert collecting.collect() == 150
    assert min(collecting.job.results.starts()) == PART_CHUNKS - 10


def test_stale_results_that_nobody_noticed(collecting: Collecting) -> None:
    """Results that a crash brings back while the collector waits are deleted."""
    blocks = [block(start, start + 10) for start in range(0, 200, 10)]
    collecting.job.push([(each, encode(each)) for each in blocks])
    done = collecting.bench.run(collecting.collect)
    collecting.work()
    wait_until(lambda: collecting.job.results.starts() == [190])
    for start in range(0, 190, 10):  # as the end of a log brings them back
        stale = encode(result_of(block(start, start + 10)))
        collecting.job.client.hset(collecting.job.keys.results, str(start), stale)
    wait_until(lambda: collecting.job.results.starts() == [190])
    collecting.push(*range(200, 251, 10))
    collecting.work()
    assert done.result() == 250
    collecting.check(250)


def test_disorder(collecting: Collecting) -> None:
    """Results are taken in order, however they come."""
    collecting.push(*range(0, 301, 10))
    done = collecting.bench.run(collecting.collect)
    for entry in reversed(collecting.worker.lease(100)):
        wait_until(collecting.waits)
        collecting.worker.job.stream.commit([(entry, result_of(decode(Block, entry.data)))])
    assert done.result(60) == 300
    collecting.check(300)


def test_no_result_is_taken_before_its_model_is_known(collecting: Collecting) -> None:
    """A result that a server loses while its model is asked for is not taken, but its next try."""
    collecting.push(*range(0, 31, 10))
    collecting.work()
    answers = iter([False, True])

    def settle() -> bool:
        collecting.job.results.lose(0)
        collecting.push(*range(0, 31, 10))
        collecting.work()
        assert collecting.output.buffered.stop < 30
        return next(answers)

    collector = collecting.collector()
    collector.settle = settle
    assert collector.collect() == 30
    assert next(answers, None) is None
    collecting.check(30)


def test_a_model_is_asked_for_again_with_the_next_try(collecting: Collecting) -> None:
    """If a server loses a result while its model is asked for, more of that may be lost."""
    collecting.push(*range(0, 31, 10))
    collecting.work()
    asked: list[int] = []

    def settle() -> bool:
        asked.append(collecting.output.buffered.stop)
        if len(asked) == 1:
            collecting.job.results.lose(0)
            collecting.push(*range(0, 31, 10))
        return True

    collector = collecting.collector()
    collector.settle = settle
    done = collecting.bench.run(collector.collect)
    wait_until(lambda: asked)
    wait_until(collecting.waits)
    collecting.work()
    assert done.result(60) == 30
    assert asked == [0, 0]
    collecting.check(30)


@pytest.mark.parametrize("collector", ["goes on", "starts anew"])
@pytest.mark.parametrize("pieces", [1, 6, 12])
def test_lost_split(
    server: LiveServer, collecting: Collecting, collector: str, pieces: int
) -> None:
    """The rest of a block is taken that a server embeds whole, since it lost the split.

    Some of the pieces are on disk, and some in memory only.
    """
    collecting.push(0, 200)
    (entry,) = collecting.worker.lease()
    size = log_bytes(server)
    collecting.job.stream.split(entry, [block(first, first + 10) for first in range(0, 200, 10)])
    collecting.worker.job.stream.commit(
        [(e, result_of(decode(Block, e.data))) for e in collecting.job.stream.read("hash", pieces)]
    )
    done = collecting.bench.run(collecting.collect)
    wait_until(lambda: collecting.output.buffered.stop == 10 * pieces and collecting.waits())
    if collector == "starts anew":
        collecting.bench.stop.set()
        assert done.result(60) is None
        collecting.reopen()
        collecting.bench.stop.clear()
    crash(server, size)
    wait_until(collecting.worker.step)
    assert collecting.job.results.starts() == [0]
    if collector == "starts anew":
        done = collecting.bench.run(collecting.collect)
    assert done.result(60) == 200
    collecting.check(200)


def test_cut_in_another_way(collecting: Collecting) -> None:
    """Results that begin elsewhere than those in memory are taken from where these end."""
    for first in range(0, 180, 30):
        collecting.output.add(result_of(block(first, first + 30)))
    assert (collecting.output.next_index, collecting.output.buffered.stop) == (120, 180)
    collecting.push(0, 70, 140, 210)
    collecting.work()
    assert collecting.collect() == 210
    assert sorted(collecting.job.results.starts()) == [70, 140]
    collecting.check(210)


# Ends.


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"\x01\x93\x00\x01", "not a Result record"),
        (encode(result_of(block(0, 10))), "result 0 is where"),
        (encode(replace(result_of(block(150, 160)), vectors=b"")), "has not the sizes"),
    ],
)
def test_a_damaged_result_is_made_anew(
    collecting: Collecting, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged result is sent and embedded once more."""
    collecting.bench.run(collecting.worker.run, collecting.bench.stop)
    collecting.produce(3_000)
    wait_until(lambda: max(collecting.job.results.starts(), default=0) > 150)
    start = min(each for each in collecting.job.results.starts() if each >= 150)
    collecting.job.client.hset(collecting.job.keys.results, str(start), data)
    assert collecting.collect() == 3_000
    collecting.check(3_000)
    assert f"result {start} of job j is made anew: " in caplog.text
    assert says in caplog.text


def test_what_came_before_a_damaged_result_is_kept(collecting: Collecting) -> None:
    """What was collected before a damaged result is put on disk, and not embedded a second time."""
    collecting.push(0, 70, 140, 210, 280)
    collecting.work()
    collecting.job.client.hset(collecting.job.keys.results, "210", b"\x01")
    done = collecting.bench.run(collecting.collect)
    wait_until(lambda: not collecting.job.results.starts())
    assert collecting.job.status().pushed_upto == 210
    collecting.push(210, 280)
    collecting.work()
    assert done.result(60) == 280
    collecting.check(280)


def test_a_result_that_stays_damaged_ends_the_run(collecting: Collecting) -> None:
    """A result that is damaged a second time ends the run, with an error that names it."""
    collecting.push(0, 10)
    collecting.job.client.hset(collecting.job.keys.results, "0", b"\x01")
    done = collecting.bench.run(collecting.collect)
    wait_until(lambda: not collecting.job.results.starts())
    collecting.job.client.hset(collecting.job.keys.results, "0", b"\x01")
    with pytest.raises(OutputError, match="result 0 of job j, once more: not a Result"):
        done.result(60)


def test_a_damaged_result_of_a_cancelled_job(collecting: Collecting) -> None:
    """A job that is cancelled ends so, though a result is damaged and nobody makes it anew."""
    collecting.push(0, 10)
    collecting.job.client.hset(collecting.job.keys.results, "0", b"\x01")
    collecting.job.cancel()
    with pytest.raises(JobCancelled):
        collecting.collect()


def test_a_server_brings_a_damaged_result_back(
    server: LiveServer, collecting: Collecting, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged result that a server brings back, since it lost the new one, is made anew again."""
    collecting.push(0, 10)
    collecting.job.client.hset(collecting.job.keys.results, "0", b"\x01")
    size = log_bytes(server)
    done = collecting.bench.run(collecting.collect)
    wait_until(lambda: not collecting.job.results.starts())
    crash(server, size)
    wait_until(lambda: caplog.text.count("result 0 of job j is made anew") == 2)
    wait_until(lambda: not collecting.job.results.starts())
    collecting.push(0, 10)
    collecting.work()
    assert done.result(60) == 10
    collecting.check(10)


def test_a_result_of_another_version_ends_the_run(collecting: Collecting) -> None:
    """A result of another version ends the run, and stays for a program that reads it."""
    collecting.push(0, 10)
    newer = b"\x03" + encode(result_of(block(0, 10)))[1:]
    collecting.job.client.hset(collecting.job.keys.results, "0", newer)
    with pytest.raises(OutputError, match="result 0 of job j: Result record of version 3"):
        collecting.collect()
    assert collecting.job.results.starts() == [0]


def test_cancelled(collecting: Collecting) -> None:
    """A cancelled job ends the collection, with all on disk that comes before the first gap."""
    collecting.push(0, 10, 20, 30, 40)
    done = collecting.bench.run(collecting.collect)
    wait_until(collecting.waits)
    first, second, _, fourth = collecting.worker.lease(4)
    collecting.job.stream.commit(
        [(each, result_of(decode(Block, each.data))) for each in (first, second, fourth)]
    )
    collecting.job.cancel()
    with pytest.raises(JobCancelled, match="on disk up to chunk 20"):
        done.result(60)
    assert collecting.output.next_index == 20


def test_paused_when_all_is_there(collecting: Collecting) -> None:
    """A job of which every result came is complete, whatever became of its state."""
    collecting.push(0, 10)
    collecting.work()
    collecting.job.set_state("paused")
    assert collecting.collect() == 10


@pytest.mark.parametrize("server_is", ["there", "away"])
def test_stop(server: LiveServer, collecting: Collecting, server_is: str) -> None:
    """`stop` ends the waiting for results, and for a server."""
    done = collecting.bench.run(collecting.collect)
    wait_until(collecting.waits)
    if server_is == "away":
        server.kill()
    collecting.bench.stop.set()
    assert done.result(60) is None


def test_deleted(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted job ends the collection after the looks of grace."""
    monkeypatch.setattr(collect, "GONE_LOOKS", 1)
    done = collecting.bench.run(collecting.collect)
    wait_until(collecting.waits)
    collecting.job.delete()
    with pytest.raises(JobGone):
        done.result(60)


def test_a_job_that_was_forgotten_is_waited_for(collecting: Collecting) -> None:
    """A collector waits for a job that is gone, which may be made again."""
    collecting.job.delete()
    done = collecting.bench.run(collecting.collect)
    wait_until(collecting.waits)
    collecting.job.create(SPEC, 0)
    collecting.push(0, 10)
    collecting.work()
    assert done.result(60) == 10


def test_grace_is_that_of_one_server(
    server: LiveServer, collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The looks of grace for a job that is gone begin anew when the server starts again."""
    monkeypatch.setattr(collect, "GONE_LOOKS", 1)
    collector = collecting.collector()
    collecting.job.delete()
    for _ in range(3):
        assert collector._status() is None
        server.kill()
        server.start()
    assert collector._status() is None
    with pytest.raises(JobGone):
        collector._status()


def test_idle_is_quiet(collecting: Collecting) -> None:
    """A collector without results waits on the server, and asks little."""
    collecting.bench.run(collecting.collect)

    def calls(*names: str) -> int:
        statistics = cast("dict[str, dict[str, int]]", collecting.job.client.info("commandstats"))
        return sum(statistics.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)

    wait_until(lambda: calls("blpop") >= 5)
    assert calls("hget", "hmget", "hkeys", "exists") <= 5 * (calls("blpop") + 2)
