"""Test that a farm waits for room in memory, on disk or under an output, and goes on."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embedfarm.contract.broker import DiskRefused, connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone, JobStatus
from tests.farm.harness import Embedding, check_output, role, run, texts_of, write_corpus
from tests.full_disk import Disk, small_disk
from tests.support import SERVERS, LiveServer, wait_until

pytestmark = pytest.mark.system

CHUNKS = 6_000
MODEL = "null:16:20000"  # a few seconds of work
DISK_BYTES = 64 << 20
SMALL = {"EMBEDFARM_WINDOW_BYTES_MAX": str(1 << 17), "EMBEDFARM_PART_BYTES_MAX": str(1 << 14)}


class Scene:
    """A server and an output on small disks, a scheduler, a worker, and a job that is under way."""

    def __init__(self, server: LiveServer, disk: Disk, outputs: Disk, folder: Path) -> None:
        self.disk, self.outputs = disk, outputs
        self.url = server.url
        self.client = connect(server.url)
        self.texts = list(texts_of(CHUNKS))
        self.out = outputs.path / "out"
        corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        words = [corpus, "--model", MODEL, "--redis", server.url, "--job-id", "j"]
        self.embedding = Embedding(words, self.out, SMALL)
        self.job = FarmClient(self.client).job("j")

    def status(self) -> JobStatus:
        """Return the job's status, an empty one while there is no job."""
        try:
            return self.job.status()
        except JobGone:
            return JobStatus()

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.embedding.process.poll() is not None

    def check(self) -> None:
        """Assert that the command ends well, and that every vector is that of its text."""
        assert self.embedding.wait() == 0, self.embedding.log()
        check_output(self.out, self.texts, 16)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Yield a scene with some chunks done, whose command was begun on a full disk."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk", DISK_BYTES))
        outputs = stack.enter_context(small_disk(tmp_path / "outputs", DISK_BYTES))
        server = LiveServer(disk.path / "server", SERVERS[0], Settings())
        server.start()
        stack.callback(server.stop)
        stack.enter_context(role(server, tmp_path, "schedule"))
        stack.enter_context(role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"))
        (outputs.path / "embed.log").write_text("there is room for a few lines\n")
        outputs.fill()
        scene = Scene(server, disk, outputs, tmp_path)
        stack.callback(scene.embedding.kill)
        stack.callback(scene.client.close)
        wait_until(lambda: f"waits for room below {scene.out}" in scene.embedding.log())
        outputs.clear()
        wait_until(lambda: scene.status().chunks_done > CHUNKS / 10)
        yield scene


def refuses_writes(client: redis.Redis) -> bool:
    """Tell whether the server has noticed that its disk is full."""
    return str(client.info("persistence")["aof_last_write_status"]) == "err"


def test_no_room(scene: Scene) -> None:
    """A job waits while memory, disk or output are full, and goes on when there is room."""
    fill_the_memory(scene)
    wait_until(lambda: scene.status().chunks_done > CHUNKS / 4)
    fill_the_disk(scene)
    wait_until(lambda: scene.status().chunks_done > CHUNKS / 2)
    fill_the_outputs(scene)
    scene.check()


def fill_the_memory(scene: Scene) -> None:
    """Fill the memory: what was sent is embedded and collected, and the producer waits."""
    scene.client.config_set("maxmemory", 1 << 20)
    with pytest.raises(redis.OutOfMemoryError):
        scene.client.set("more", "1")
    wait_until(lambda: scene.status().blocks_done == scene.status().blocks_in)
    with pytest.raises(TimeoutError):
        wait_until(lambda: scene.ended, 3)
    assert scene.status().chunks_in < CHUNKS
    assert FarmClient(scene.client).workers()
    scene.client.config_set("maxmemory", 0)


def fill_the_disk(scene: Scene) -> None:
    """Fill the disk of the server's log: nothing is embedded meanwhile."""
    scene.disk.fill()
    wait_until(lambda: refuses_writes(scene.client))
    with pytest.raises(DiskRefused):
        scene.client.set("more", "1")
    done = scene.status().chunks_done
    assert done < CHUNKS
    with pytest.raises(TimeoutError):
        wait_until(lambda: scene.ended or scene.status().chunks_done > done, 3)
    scene.disk.clear()


def fill_the_outputs(scene: Scene) -> None:
    """Fill the disk of the output: status, command and log say what the job waits for."""
    scene.outputs.fill()
    wait_until(lambda: scene.status().reason)
    shown = json.loads(run("jobs", "show", "j", "--redis", scene.url, "--json").stdout)
    assert shown["reason"] == f"waits for room below {scene.out}: No space left on device"
    wait_until(lambda: shown["reason"] in scene.embedding.log())
    assert not scene.ended
    scene.outputs.clear()
    wait_until(lambda: not scene.status().reason)
