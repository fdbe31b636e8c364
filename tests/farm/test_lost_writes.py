"""Tests that a job ends complete on a server that comes back without its last writes."""

import contextlib
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import redis

from embedfarm.contract.broker import UNAVAILABLE, closing_client, connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, JobStatus
from tests.farm.harness import Embedding, check_output, role, texts_of, write_corpus
from tests.hash_worker import crash
from tests.support import SERVERS, LiveServer, free_port, wait_until

CHUNKS = 6_000
DIMENSIONS = 16
MODEL = f"null:{DIMENSIONS}:15000"  # about ten seconds of work for two
LOST_SECONDS = 2.0  # what `appendfsync everysec` may lose
# Shares of the work at which there is a job to hit: the last micro-batches come in one commit.
EARLIEST, LATEST = 0.05, 0.85
SMALL = {"EMBEDFARM_WINDOW_BYTES_MAX": str(1 << 20), "EMBEDFARM_PART_BYTES_MAX": str(1 << 15)}


class Scene:
    """A command and its job, under way on a server."""

    def __init__(self, server: LiveServer, folder: Path, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.client = connect(server.url)
        self.texts = list(texts_of(CHUNKS, seed))
        corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        self.out = folder / "out"
        words = [corpus, "--model", MODEL, "--redis", server.url, "--job-id", "j"]
        self.embedding = Embedding(words, self.out, SMALL)

    def look(self) -> JobStatus:
        """Return the job's status, an empty one while there is no job."""
        try:
            return FarmClient(self.client).job("j").status()
        except JobGone:
            return JobStatus()

    def status(self) -> JobStatus:
        """Return the job's status, an empty one without a job or while the server is away."""
        try:
            return self.look()
        except UNAVAILABLE:
            return JobStatus()

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.embedding.process.poll() is not None

    def wait_for(self, share: float) -> None:
        """Wait until about such a share of the chunks is embedded."""
        share += self.random.uniform(-0.1, 0.1)
        target = min(max(share, EARLIEST), LATEST) * CHUNKS
        wait_until(lambda: self.ended or self.status().chunks_done >= target, 90)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the command meanwhile, so that it cannot end."""
        process = self.embedding.process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def live(self) -> JobStatus:
        """Return the job's status, and assert that it is not over."""
        status = self.look()
        assert not self.ended, "the command was faster than the crash"
        assert status.state in {"open", "closed"}
        return status

    def check(self) -> None:
        """Assert that the command ends well, and that every vector is that of its text."""
        assert self.embedding.wait() == 0, self.embedding.log()
        check_output(self.out, self.texts, DIMENSIONS)

    def close(self) -> None:
        """End the command."""
        self.embedding.kill()
        self.client.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    """Start a server of the first kind only, since each run takes long."""
    server = LiveServer(tmp_path / "server", SERVERS[0], Settings())
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def farm(server: LiveServer, folder: Path, seed: int = 0) -> Iterator[Scene]:
    """Start a scheduler, two workers and the command."""
    with (
        role(server, folder, "schedule"),
        role(server, folder, "work", "--devices", "cpu", "--workers", "2"),
        contextlib.closing(Scene(server, folder, seed)) as scene,
    ):
        yield scene


class Log:
    """A thread that notes the length of a server's append-only file, and the chunks done in it."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._directory = scene.server.private.directory / "appendonlydir"
        self._looks = deque[tuple[float, int, int]](maxlen=1000)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            size = sum(path.stat().st_size for path in self._directory.glob("*.incr.aof"))
            with contextlib.suppress(*UNAVAILABLE):
                # Not sooner: what is in the log by now is done.
                self._looks.append((time.monotonic(), size, self._scene.look().chunks_done))

    def kept(self) -> tuple[int, int]:
        """Return what a crash that loses the last seconds leaves: bytes, and the most chunks done.

        If there was a crash in these seconds, it is what that one left.
        """
        since = time.monotonic() - LOST_SECONDS
        looks = list(self._looks)
        before = [look[1:] for look in looks if look[0] <= since][-1:]
        return min(before + [look[1:] for look in looks if look[0] > since]) if before else (0, 0)


def survive_crashes(scene: Scene, shares: tuple[float, ...]) -> None:
    """Crash the server at some shares of the work, without its last writes each time."""
    with Log(scene) as log:
        for share in shares:
            scene.wait_for(share)
            lose_writes(scene, log)
    scene.check()


def lose_writes(scene: Scene, log: Log) -> None:
    """Crash the server within a job, as soon as chunks that were done are lost by it.

    The log ends anywhere, as a rule within a command.
    """
    wait_until(lambda: scene.ended or log.kept()[1] < scene.status().chunks_done)
    size, chunks = log.kept()
    assert chunks < scene.live().chunks_done, "nothing is lost"
    crash(scene.server, size)


def test_end_of_the_log_is_lost(server: LiveServer, tmp_path: Path) -> None:
    """A job survives two crashes: early, and when all is embedded and not yet collected."""
    with farm(server, tmp_path) as scene, Log(scene) as log:
        scene.wait_for(0.3)
        lose_writes(scene, log)
        scene.wait_for(0.8)
        with scene.held():
            wait_until(lambda: scene.look().embedded)
            lose_writes(scene, log)
        scene.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_runs(server: LiveServer, tmp_path: Path, seed: int) -> None:
    """A job survives up to five crashes at random times."""
    pick = random.Random(seed)
    shares = tuple(sorted(pick.random() for _ in range(pick.randint(1, 5))))
    with farm(server, tmp_path, seed) as scene:
        survive_crashes(scene, shares)


@contextlib.contextmanager
def replica_of(server: LiveServer, directory: Path) -> Iterator[LiveServer]:
    """Start a second server that follows a first one."""
    replica = LiveServer(directory, SERVERS[0], Settings())
    replica.start()
    try:
        with closing_client(server.url) as primary, closing_client(replica.url) as second:
            port = free_port()
            primary.config_set("port", port)
            second.replicaof("127.0.0.1", str(port))
            wait_until(lambda: second.info("replication")["master_link_status"] == "up")
        yield replica
    finally:
        replica.stop()


def test_replica_without_the_last_writes_takes_over(server: LiveServer, tmp_path: Path) -> None:
    """A job survives a failover to a replica that lacks its last writes."""
    with (
        replica_of(server, tmp_path / "replica") as replica,
        farm(server, tmp_path) as scene,
        closing_client(replica.url) as second,
    ):
        scene.wait_for(0.4)
        second.replicaof("127.0.0.1", "1")
        cut = scene.status().chunks_done
        behind = time.monotonic() + LOST_SECONDS
        wait_until(lambda: time.monotonic() > behind and scene.status().chunks_done > cut)
        lost = scene.live().chunks_done
        server.kill()
        server.private.socket.unlink()
        server.private.socket.symlink_to(replica.private.socket)
        with pytest.raises(redis.ReadOnlyError):
            scene.client.set("more", "1")
        refused = second.info("errorstats")
        wait_until(lambda: second.info("errorstats") != refused)
        assert FarmClient(second).job("j").status().chunks_done <= cut < lost
        second.replicaof("NO", "ONE")
        scene.check()
