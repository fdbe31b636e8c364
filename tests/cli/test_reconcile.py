"""Tests of `embedfarm reconcile`, and of a run whose server has lost chunks."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.coverage import reconcile
from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import Embedding, check_output, role, run, texts_of, write_corpus
from tests.support import LiveServer, wait_until

CHUNKS = 3_000
DIMENSIONS = 16
MODEL = f"null:{DIMENSIONS}"


class Scene:
    """A job of which blocks are pushed, and nothing is embedded: there is no worker yet."""

    def __init__(self, server: LiveServer, client: redis.Redis, folder: Path) -> None:
        self.texts = list(texts_of(CHUNKS))
        self.out = folder / "out"
        corpus = write_corpus(folder / "corpus.jsonl", self.texts)
        words = [corpus, "--model", MODEL, "--redis", server.url, "--job-id", "j"]
        self.environment = {"EMBEDFARM_RECONCILE_SECONDS": "1"}
        self.words = words
        self.job = FarmClient(client).job("j")
        self.embedding = self.start()
        wait_until(lambda: client.exists(self.job.keys.meta))
        wait_until(lambda: self.job.status().blocks_in >= 10)

    def start(self) -> Embedding:
        """Start the command that fills the output."""
        return Embedding(self.words, self.out, self.environment)

    @property
    def log(self) -> str:
        """The text that the command has printed so far."""
        return self.embedding.log()

    def lose(self, count: int) -> int:
        """Delete the first entries of the stream, and return how many chunks they had."""
        entries = cast("list[Any]", self.job.client.xrange(self.job.keys.blocks))
        names: list[bytes] = [name for name, _ in entries]
        gone = names[:count]
        assert self.job.client.xdel(self.job.keys.blocks, *gone) == count
        return sum(int(name.split(b"-")[1]) for name in gone)


@pytest.fixture
def scene(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[Scene]:
    """Start a job that waits for a worker."""
    scene = Scene(server, client, tmp_path)
    yield scene
    scene.embedding.kill()


@contextlib.contextmanager
def worker(server: LiveServer, folder: Path) -> Iterator[None]:
    """Start a worker, which embeds all there is."""
    with role(server, folder, "work", "--devices", "cpu", "--workers", "1"):
        yield


def test_lost_chunks_are_sent_again(server: LiveServer, scene: Scene, tmp_path: Path) -> None:
    """Lost chunks are sent again by a run that goes on, and by the verb when none does."""
    lost = scene.lose(2)
    wait_until(lambda: scene.job.client.xlen(scene.job.keys.retry) > 0)
    wait_until(lambda: scene.log.count(f"{lost} chunks were sent again"))
    scene.embedding.kill()
    scene.job.client.delete(scene.job.keys.retry)
    done = run("reconcile", "j", "--redis", server.url, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (report["sent_again"], report["missing"], report["on_disk"]) == (lost, [], 0)
    assert report["waiting"] == report["pushed_upto"]
    again = run("reconcile", "j", "--redis", server.url)
    assert again.returncode == 0
    assert not re.search(r"sent again +[1-9]", again.stdout)
    scene.embedding = scene.start()
    with worker(server, tmp_path):
        assert scene.embedding.wait() == 0, scene.log
    check_output(scene.out, scene.texts, DIMENSIONS)


def test_a_job_that_is_off_the_list_comes_back(
    server: LiveServer, scene: Scene, client: redis.Redis, tmp_path: Path
) -> None:
    """A run whose job somebody has taken for one that ended puts it back, and is done."""
    client.zrem(wire.JOBS, scene.job.id)
    client.zadd(wire.ENDED, {scene.job.id: 1.0})
    with worker(server, tmp_path):
        assert scene.embedding.wait() == 0, scene.log
    check_output(scene.out, scene.texts, DIMENSIONS)


def test_what_cannot_be_sent_again_is_named(server: LiveServer, scene: Scene) -> None:
    """`reconcile` names the missing chunks on a host where the output is not."""
    scene.embedding.kill()
    scene.lose(1)
    scene.job.note("out", "/not/here")
    done = run("reconcile", "j", "--redis", server.url)
    assert done.returncode == 1
    (gap,) = reconcile(scene.job).missing()
    assert f"{gap.start} to {gap.stop - 1}" in done.stdout
    assert scene.job.client.xlen(scene.job.keys.retry) == 0
