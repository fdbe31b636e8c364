"""Test of a source that is read more than once in one run: its last reading counts."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embedfarm.collector import collect
from embedfarm.collector.collect import Collector, JobCancelled
from embedfarm.collector.manifest import About
from embedfarm.collector.output import Output
from embedfarm.collector.source_check import SourceCheck
from embedfarm.contract.encoding import encode
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from tests.hash_worker import VECTOR_BYTES, Bench, HashWorker, text_of, vectors_of
from tests.support import LiveServer, wait_until

COUNT = 50
CHANGED = 43  # the row that is another one when the source is read again


@pytest.fixture
def bench(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Yield connections and threads, with short waits."""
    monkeypatch.setattr(collect, "WAIT_SECONDS", 0.1)
    with Bench(server.url) as bench:
        yield bench


def rows(*, changed: bool) -> Rows:
    """Return the rows of the source, with one changed or not."""
    indices = range(COUNT)
    texts = [text_of(index) for index in indices]
    if changed:
        texts[CHANGED] = "something else"
    return Rows(texts, [str(index) for index in indices])


def push(job: Job, source: Rows, first: int) -> None:
    """Push all of the source from a row on, in blocks of ten."""
    assert source.ids is not None
    for start, end in pairwise(range(first, COUNT + 1, 10)):
        texts, ids = source.texts[start:end], source.ids[start:end]
        block = Block(start=start, texts=texts, ids=ids, token_count=7 * len(texts))
        assert job.push([(block, encode(block))]) == ["added"]
    job.close(COUNT)


@pytest.mark.parametrize("on_disk", [0, 20])
def test_what_was_taken_of_an_earlier_reading(bench: Bench, tmp_path: Path, on_disk: int) -> None:
    """Results that are not on disk are compared with a second reading, and made anew."""
    settings = Settings(part_bytes_max=(on_disk or 2 * COUNT) * VECTOR_BYTES)
    job, worker = Job(bench.client(), "j"), HashWorker(bench.client(), "j", settings)
    job.create(JobSpec(model="hash"), 0)
    source, before, after = SourceCheck(), rows(changed=False), rows(changed=True)
    with Output(tmp_path, {}, sink="parquet", part_bytes_max=settings.part_bytes_max) as output:
        source.begin(output.parts)
        source.feed(before)
        push(job, before, 0)
        worker.step()
        collector = Collector(Job(bench.client(), "j"), output, settings, bench.stop, source=source)
        done = bench.run(collector.collect)
        wait_until(lambda: output.buffered.stop == COUNT)
        kept = output.next_index
        source.begin(output.parts)
        source.feed(after)
        wait_until(lambda: job.status().state == "open")
        assert kept == (on_disk and 40)
        # What the second reading has as well is on the disk before the rest is made anew.
        assert job.status().pushed_upto == 40
        push(job, after, 40)
        worker.step()
        source.end()
        assert done.result(30) == COUNT
        output.finish(COUNT, About(job="j", model="hash", fingerprint={}, source={}))
        vectors = [v for part in output.parts for v in read(tmp_path / part.file)]
    assert vectors == vectors_of(after.texts).tolist()


def test_what_is_damaged_after_a_change(bench: Bench, tmp_path: Path) -> None:
    """A result that differs from the source is made anew, and once more if that one is damaged."""
    settings = Settings(part_bytes_max=1 << 20)
    job, worker = Job(bench.client(), "j"), HashWorker(bench.client(), "j", settings)
    job.create(JobSpec(model="hash"), 0)
    source, before, after = SourceCheck(), rows(changed=False), rows(changed=True)
    with Output(tmp_path, {}, sink="parquet", part_bytes_max=1 << 20) as output:
        source.begin(output.parts)
        source.feed(after)
        source.end()
        push(job, before, 0)
        worker.step()
        collector = Collector(Job(bench.client(), "j"), output, settings, bench.stop, source=source)
        done = bench.run(collector.collect)
        wait_until(lambda: job.status().state == "open")
        assert job.status().pushed_upto == 40
        job.client.hset(job.keys.results, "40", b"\x01")
        wait_until(lambda: not job.client.hexists(job.keys.results, "40"))
        push(job, after, 40)
        worker.step()
        assert done.result(30) == COUNT


@dataclass
class HalfRead:
    """A job of which all is embedded, and 30 rows of the source are read and collected."""

    job: Job
    source: SourceCheck
    output: Output
    done: Future[int | None]
    rest: Rows


@contextmanager
def half_read(bench: Bench, directory: Path, settings: Settings) -> Iterator[HalfRead]:
    """Collect a job until the rows that are read end."""
    job, worker = Job(bench.client(), "j"), HashWorker(bench.client(), "j", settings)
    job.create(JobSpec(model="hash"), 0)
    source, all_rows = SourceCheck(), rows(changed=False)
    assert all_rows.ids is not None
    with Output(directory, {}, sink="parquet", part_bytes_max=1 << 20) as output:
        source.begin(output.parts)
        source.feed(Rows(all_rows.texts[:30], all_rows.ids[:30]))
        push(job, all_rows, 0)
        worker.step()
        collector = Collector(Job(bench.client(), "j"), output, settings, bench.stop, source=source)
        done = bench.run(collector.collect)
        wait_until(lambda: output.buffered.stop == 30)
        yield HalfRead(job, source, output, done, Rows(all_rows.texts[30:], all_rows.ids[30:]))


def test_a_reading_that_is_abandoned(bench: Bench, tmp_path: Path) -> None:
    """A cancelled job is collected as far as its source was read in this run."""
    with half_read(bench, tmp_path, Settings()) as half:
        half.job.cancel()
        half.source.abandon()
        with pytest.raises(JobCancelled, match="up to chunk 30"):
            half.done.result(30)
        assert half.output.next_index == 30


def test_results_of_rows_that_are_not_read_yet(bench: Bench, tmp_path: Path) -> None:
    """Later results wait, and what was compared goes to the disk if the farm's window is full.

    The producer reads no further until there is room, which the collector alone can make.
    """
    settings = Settings(farm_window_bytes_max=1)
    with half_read(bench, tmp_path, settings) as half:
        window, status = FarmWindow(half.job.client, settings), half.job.status
        wait_until(lambda: not window.reserve((s := status()), 0, [1]) and s.drained_upto == 30)
        assert half.output.next_index == 30
        half.source.feed(half.rest)
        half.source.end()
        assert half.done.result(30) == COUNT


def read(path: Path) -> list[list[float]]:
    """Return the vectors of a part."""
    return [list(map(float, v)) for v in pq.read_table(path)["embedding"].to_pylist()]
