"""Tests of one window for the farm: however many jobs fill it, the server has room."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.collector.collect import WAIT_SECONDS, Collector
from embedfarm.collector.manifest import About
from embedfarm.collector.output import Output
from embedfarm.contract import wire
from embedfarm.contract.encoding import decode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Result, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from embedfarm.producer.submitter import Submitter
from tests.hash_worker import VECTOR_BYTES, Bench, HashWorker, corpus
from tests.support import LiveServer
from tests.web.conftest import client_of

MEBIBYTE: Final = 1 << 20
MODEL: Final = "null:384"
FEEDS: Final = 38
TEXTS: Final = ["x" * 200] * 100
ABOUT: Final = About(job="j", model="hash", fingerprint={}, source={"texts_sha256": ""})


def embed(entry: Entry) -> tuple[Entry, Result]:
    """Return an entry with a result of full size."""
    block = decode(Block, entry.data)
    vectors = np.ones((block.count, 384), "<f4").tobytes()
    checksums = text_checksums(block.texts)
    return entry, Result(
        start=block.start,
        count=block.count,
        dimensions=384,
        dtype="<f4",
        vectors=vectors,
        checksums=checksums,
    )


@dataclass
class Feed:
    """A feed that somebody fills, and its only worker."""

    web: TestClient
    job: Job
    sent: int = 0
    read: int = 0

    @property
    def path(self) -> str:
        """The path of the feed's URLs."""
        return f"/v1/jobs/{self.job.id}"

    def send(self, count: int) -> bool:
        """Send texts up to a number of them; return whether any was taken."""
        texts = TEXTS[: count - self.sent]
        answer = self.web.post(f"{self.path}/texts", json={"start": self.sent, "texts": texts})
        assert answer.status_code in {200, 429}, answer.text
        before, self.sent = self.sent, answer.json().get("next", self.sent)
        return self.sent > before

    def work(self) -> bool:
        """Embed all that waits; return whether there was anything."""
        entries = self.job.stream.read("one", 100)
        for entry in entries:
            self.job.stream.commit([embed(entry)])
        return bool(entries)

    def take(self) -> None:
        """Read and acknowledge all results."""
        query = {"start": self.read, "limit": 10_000}
        answer = self.web.get(f"{self.path}/results", params=query)
        self.read = int(answer.headers["x-next-start"])
        self.web.delete(f"{self.path}/results", params={"upto": self.read})


@dataclass
class Crowd:
    """One client with many feeds, on a server with little memory."""

    client: redis.Redis
    web: TestClient
    bytes_max: int
    feeds: list[Feed] = field(default_factory=list)

    def begin(self, count: int) -> None:
        """Begin more feeds."""
        for _ in range(count):
            name = self.web.post("/v1/feeds", json={"model": MODEL}).json()["job"]
            self.feeds.append(Feed(self.web, FarmClient(self.client).job(name)))

    def look(self) -> None:
        """Assert that the server uses no more memory than it may."""
        assert self.client.info("memory")["used_memory"] <= self.bytes_max

    def step(self, feed: Feed, count: int) -> bool:
        """Send to a feed and embed for it; return whether something moved."""
        moved = [feed.send(count) if feed.sent < count else False, feed.work()]
        self.look()
        return any(moved)

    def settle(self, count: int) -> None:
        """Send and embed until no feed is let through, though all room is counted."""
        while sum(self.step(feed, count) for feed in self.feeds) or not self.is_counted():
            pass

    def is_counted(self) -> bool:
        """Let the window be counted; return whether nothing taken is left out of the count."""
        FarmWindow(self.client, Settings()).look()
        return self.client.hmget(wire.WINDOW, ["before", "taken"]) == [b"0", b"0"]


@pytest.fixture
def crowd(server: LiveServer, client: redis.Redis) -> Iterator[Crowd]:
    """Give the server 12 MiB, so that the window is half of that, and yield a client."""
    client.config_set("maxmemory", 12 * MEBIBYTE)
    with client_of(server, models=(MODEL,), http_requests_per_second=0) as web:
        yield Crowd(client, web, 12 * MEBIBYTE)


def test_many_feeds_stay_within_the_server(crowd: Crowd) -> None:
    """38 feeds that nobody reads get no more than the window, and readiness and pages say why.

    Then a new feed gets through beside them, and all go on as they are read.
    """
    crowd.begin(FEEDS)
    count = 200  # 38 times as many vectors take 11 MiB
    crowd.settle(count)
    assert all(feed.sent for feed in crowd.feeds)
    assert any(feed.sent < count for feed in crowd.feeds)
    reasons = crowd.web.get("/readyz").json()["reasons"]
    assert any("window is used up" in reason for reason in reasons)
    assert "fill the farm&#39;s window" in crowd.web.get("/", headers={"accept": "text/html"}).text
    crowd.begin(1)
    newcomer = crowd.feeds.pop()
    while newcomer.sent < count:  # while all others are stopped
        crowd.step(newcomer, count)
        newcomer.take()
    while any(feed.sent < count for feed in crowd.feeds):
        for feed in crowd.feeds:
            crowd.step(feed, count)
            feed.take()
    assert crowd.client.info("memory")["used_memory"] < 6 * MEBIBYTE


SMALL: Final = Settings(
    farm_window_bytes_max=15_000,
    part_bytes_max=20_000,  # a part alone is more than all jobs together may have
    window_bytes_max=1 << 17,
    block_chunks_min=1,
    block_seconds=0.001,
)


@dataclass
class Line:
    """A job with its producer and its collector, each in a thread, and its only worker."""

    bench: Bench
    threads: ThreadPoolExecutor
    name: str
    directory: Path

    def __post_init__(self) -> None:
        self.worker = HashWorker(self.bench.client(), self.name, SMALL, 70_000)
        self.worker.beat()

    def begin(self, count: int) -> None:
        """Start the job's producer and its collector."""
        farm = FarmClient(self.bench.client())
        submitter = Submitter(farm, self.name, JobSpec(model="hash"), 0, SMALL, self.bench.stop)
        size = SMALL.part_bytes_max
        self.output = Output(self.directory, {}, sink="jsonl", part_bytes_max=size)
        collector = Collector(
            Job(self.bench.client(), self.name), self.output, SMALL, self.bench.stop
        )
        self.pushed = self.threads.submit(submitter.submit, corpus(0, count))
        self.collected = self.threads.submit(collector.collect)

    def finish(self, count: int) -> int:
        """Wait for all chunks, finish the output, and return the number of its parts."""
        assert self.collected.result(60) == count
        manifest = self.output.finish(count, ABOUT)
        self.output.close()
        lines = [
            json.loads(line)["index"]
            for path in sorted(self.directory.glob("part-*"))
            for line in path.read_text().splitlines()
        ]
        assert lines == list(range(count))
        return len(manifest.parts)


def test_jobs_that_cannot_all_fill_a_part_go_on(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Parts are closed early where room is short, so that no job waits long for the others."""
    count, jobs = 700, 3
    assert count * VECTOR_BYTES > SMALL.part_bytes_max
    with ThreadPoolExecutor(2 * jobs) as threads, Bench(server.url) as bench:
        lines = [
            Line(bench, threads, f"job-{place}", tmp_path / str(place)) for place in range(jobs)
        ]
        for line in lines:
            line.begin(count)
        most, window = 0, FarmWindow(client, SMALL)
        began = time.monotonic()
        while not all(line.collected.done() for line in lines):
            for line in lines:
                line.worker.step()
            most = max(most, window.look().used_bytes)
        seconds = time.monotonic() - began
        parts = [line.finish(count) for line in lines]
    assert all(each > 2 for each in parts)
    assert seconds < max(parts) * WAIT_SECONDS
    guessed = 10 * 4096  # of a first block, as long as nobody knows the size of a vector
    assert most <= SMALL.farm_window_bytes_max + jobs * guessed
