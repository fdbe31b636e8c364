"""A worker that embeds by hashing: real leases and commits, no model; and helpers to check it."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.encoding import decode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Heartbeat, Result, Rows, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import has_room
from embedfarm.contract.status import JobGone
from tests.support import LiveServer, force_log

T = TypeVar("T")

DIMENSIONS = 8
VECTOR_BYTES = 4 * DIMENSIONS


def text_of(index: int) -> str:
    """The text of a chunk in these tests."""
    return f"chunk number {index}"


def corpus(first: int, end: int, batch: int = 100) -> Iterator[Rows]:
    """Yield chunks `first` to `end - 1`, with ids."""
    for start in range(first, end, batch):
        indices = range(start, min(start + batch, end))
        yield Rows([text_of(index) for index in indices], [str(index) for index in indices])


def vectors_of(texts: Sequence[str]) -> NDArray[Any]:
    """The vectors that this worker makes of texts, as rows."""
    digests = [hashlib.sha256(text.encode()).digest()[:DIMENSIONS] for text in texts]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIMENSIONS).astype("<f4")


def result_of(block: Block) -> Result:
    """The result of a block."""
    return Result(
        start=block.start,
        count=len(block.texts),
        dimensions=DIMENSIONS,
        dtype="<f4",
        vectors=vectors_of(block.texts).tobytes(),
        checksums=text_checksums(block.texts),
        ids=block.ids,
        token_count=block.token_count,
        worker="hash",
    )


class Bench:
    """Threads and connections of one test; `stop` ends everything that waits, and so does leaving.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients = contextlib.ExitStack()
        self._pool = ThreadPoolExecutor()
        self.stop = threading.Event()

    def client(self) -> redis.Redis:
        """Open a connection that the test has for itself."""
        return self._clients.enter_context(closing_client(self._url))

    def run(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Run a function in a thread."""
        return self._pool.submit(work, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._pool.shutdown()
        self._clients.close()


class HashWorker:
    """A worker that embeds at once what it leases, and reports the speed that it is told to.

    Args:
        client: A connection that nobody else uses.
        job: Id of the job.
        settings: Limits, such as that of results on the server, at which it stops.
        tokens_per_second: Speed that its heartbeat reports.
    """

    def __init__(
        self, client: redis.Redis, job: str, settings: Settings, tokens_per_second: float = 0.0
    ) -> None:
        self.farm = FarmClient(client)
        self.job = Job(client, job)
        self._settings = settings
        self._speed = tokens_per_second

    def beat(self, name: str = "hash") -> None:
        """Say that it lives, for a minute, under its own or another name."""
        beat = Heartbeat(
            worker=name,
            incarnation="1",
            host="here",
            pid=1,
            device="cpu-0",
            state="busy",
            tokens_per_second=self._speed,
        )
        self.farm.beat(beat, 60)

    def lease(self, count: int = 16) -> list[Entry]:
        """Lease blocks: first its own that were stranded, then new ones."""
        stranded = [
            entry
            for stream in (self.job.keys.retry, self.job.keys.blocks)
            for entry in self.job.stream.claim(
                stream,
                "hash",
                [row.id for row in self.job.stream.pending(stream, "hash", count)],
                0,
            )
        ]
        return stranded + self.job.stream.read("hash", count)

    def step(self, count: int = 16) -> int:
        """Embed up to `count` blocks; return the number of them."""
        if not has_room(self.job.status(), self._settings):
            return 0
        entries = self.lease(count)
        self.job.stream.commit([(entry, result_of(decode(Block, entry.data))) for entry in entries])
        return len(entries)

    def run(self, stop: threading.Event) -> None:
        """Embed until `stop`, over outages of the server."""
        while not stop.is_set():
            try:
                self.beat()
                if not self.step():
                    stop.wait(0.005)
            except (*UNAVAILABLE, JobGone, redis.ResponseError):
                stop.wait(0.02)  # away, or come back without the job


def log_bytes(server: LiveServer) -> int:
    """Size of the server's append-only file with all that was acknowledged until now."""
    with closing_client(server.url) as client:
        force_log(client)
    return sum(path.stat().st_size for path in _log(server))


def crash(server: LiveServer, keep_bytes: int | None = None) -> None:
    """Kill the server and start it again, on the first `keep_bytes` of its append-only file."""
    server.kill()
    for path in _log(server):
        if keep_bytes is not None:
            os.truncate(path, min(keep_bytes, path.stat().st_size))
    server.start()


def _log(server: LiveServer) -> list[Path]:
    return list(server.private.directory.glob("appendonlydir/*.incr.aof"))
