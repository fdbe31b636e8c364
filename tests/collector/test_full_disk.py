"""Tests of a disk that is full under an output: the job waits for room, and loses nothing."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from embedfarm.collector import collect
from embedfarm.collector.collect import Collector
from embedfarm.collector.manifest import About
from embedfarm.collector.output import Output
from embedfarm.collector.sinks import holding_sinks
from embedfarm.collector.verify import verify
from embedfarm.contract.encoding import encode
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, ChunkError, Result, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from tests.full_disk import Disk, small_disk
from tests.hash_worker import Bench
from tests.support import LiveServer, wait_until

pytestmark = pytest.mark.system

COUNT, BLOCK, DIMENSIONS = 24, 3, 2048
PART_ROWS = 6
ROW_BYTES = 4 * DIMENSIONS
FAILED = {4, 5, 20}
DISK_BYTES = 2 << 20
ABOUT = About(job="j", model="m", fingerprint={}, source={"texts_sha256": ""})
SETTINGS = Settings(part_bytes_max=PART_ROWS * ROW_BYTES, full_disk_seconds=0.02)

T = TypeVar("T")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Make a disk with room for a whole output."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


@pytest.fixture(params=holding_sinks())
def sink(request: pytest.FixtureRequest) -> str:
    """Give each format."""
    return str(request.param)


def results() -> list[Result]:
    """Return the results of a job of 24 chunks, of which some have failed."""
    matrix = np.random.default_rng(7).normal(size=(COUNT, DIMENSIONS)).astype("<f4")
    made = []
    for start in range(0, COUNT, BLOCK):
        chunks = range(start, start + BLOCK)
        made.append(
            Result(
                start=start,
                count=BLOCK,
                dimensions=DIMENSIONS,
                dtype="<f4",
                vectors=matrix[chunks].tobytes(),
                checksums=text_checksums([f"text {index}" for index in chunks]),
                ids=[f"name {index}" for index in chunks],
                errors=[ChunkError(index=i, reason="too odd") for i in chunks if i in FAILED],
            )
        )
    return made


def open_output(directory: Path, sink: str) -> Output:
    """Open an output in parts of six chunks."""
    return Output(directory, {}, sink=sink, part_bytes_max=SETTINGS.part_bytes_max)


def files(directory: Path) -> dict[str, bytes]:
    """Return the files of an output without the manifest, which has a time in it."""
    found = {path.name: path for path in directory.iterdir() if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "_manifest.json"}


def write_quietly(directory: Path, sink: str) -> dict[str, bytes]:
    """Write an output that always has room, and return its files."""
    with open_output(directory, sink) as output:
        for result in results():
            output.add(result)
        output.finish(COUNT, ABOUT)
    return files(directory)


def insist(disk: Disk, output: Output, write: Callable[[], T], again: Callable[[], T]) -> T:
    """Write until it succeeds, with room for one page more each time that the disk is full."""
    recover = False
    while True:
        try:
            if recover:
                output.recover()
            return write()
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 -- the other end of a loop
            disk.free(1)
            recover, write = True, again


def test_full_at_every_page(disk: Disk, sink: str, tmp_path: Path) -> None:
    """An output whose disk fills up at every page has the same bytes in the end."""
    out = disk.path / "out"
    with open_output(out, sink) as output:
        disk.fill()
        for result in results():

            def add(result: Result = result) -> object:
                return output.add(result)

            insist(disk, output, add, output.write)

        def finish() -> object:
            return output.finish(COUNT, ABOUT)

        insist(disk, output, finish, finish)
    disk.clear()
    assert files(out) == write_quietly(tmp_path / "quiet", sink)
    assert not verify(out)


class Desk:
    """A job whose results are all on the server, and a collector that puts them on a disk."""

    def __init__(self, bench: Bench, output: Output) -> None:
        self.job = Job(bench.client(), "j")
        self.job.create(JobSpec(model="m"), 0)
        blocks = [
            Block(start=r.start, texts=["t"] * r.count, ids=r.ids, token_count=1) for r in results()
        ]
        self.job.push([(block, encode(block)) for block in blocks])
        self.job.close(COUNT)
        entries = self.job.stream.read("w", COUNT)
        self.job.stream.commit(list(zip(entries, results(), strict=True)))
        self.bench = bench
        self.collector = Collector(Job(bench.client(), "j"), output, SETTINGS, bench.stop)

    def status(self) -> JobStatus:
        """Return the status of the job."""
        return self.job.status()


@pytest.fixture
def bench(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Yield threads and connections, with short waits."""
    monkeypatch.setattr(collect, "WAIT_SECONDS", 0.1)
    with Bench(server.url) as bench:
        yield bench


def test_job_waits_for_room(disk: Disk, sink: str, bench: Bench, tmp_path: Path) -> None:
    """A job says that it waits for room, keeps its results on the server, and then goes on."""
    out = disk.path / "out"
    with open_output(out, sink) as output:
        desk = Desk(bench, output)
        disk.fill()
        disk.free(2)
        done = bench.run(desk.collector.collect)
        wait_until(lambda: "No space left" in desk.status().reason)
        assert desk.status().state == "closed"
        assert not done.done()
        assert len(desk.job.results.starts()) == COUNT // BLOCK
        disk.clear()
        assert done.result(10) == COUNT
        assert not desk.status().reason
        disk.fill()
        finished = bench.run(desk.collector.finish, COUNT, ABOUT)
        wait_until(lambda: "No space left" in desk.status().reason or finished.done())
        disk.clear()
        assert finished.result(10) is not None
    assert files(out) == write_quietly(tmp_path / "quiet", sink)
    assert not verify(out)


def test_stop_ends_the_waiting(disk: Disk, sink: str, bench: Bench) -> None:
    """A job that is stopped while it waits for room leaves an output that can be resumed."""
    with open_output(disk.path / "out", sink) as output:
        desk = Desk(bench, output)
        disk.fill()
        done = bench.run(desk.collector.collect)
        wait_until(lambda: desk.status().reason)
        bench.stop.set()
        assert done.result(10) is None
    disk.clear()
    bench.stop.clear()
    with open_output(disk.path / "out", sink) as output:
        again = Collector(desk.job, output, SETTINGS, bench.stop)
        assert again.collect() == COUNT
        assert again.finish(COUNT, ABOUT) is not None
    assert not desk.status().reason
    assert not verify(disk.path / "out")
