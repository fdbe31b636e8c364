"""Tests of a server that takes no writes for some time: full, or unable to save them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import Embedding, check_output, role, texts_of, write_corpus
from tests.support import LiveServer, wait_until

COUNT: Final = 18_000
SPEED: Final = 20_000  # tokens per second of each of two workers: about twenty seconds


@contextlib.contextmanager
def full_memory(client: redis.Redis, _: Path) -> Iterator[None]:
    """Let the server reach `maxmemory`, so that writes fail with OOM."""
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", 0)


@contextlib.contextmanager
def few_replicas(client: redis.Redis, _: Path) -> Iterator[None]:
    """Let the server require a replica, so that writes fail with NOREPLICAS."""
    client.config_set("min-replicas-to-write", 1)
    yield
    client.config_set("min-replicas-to-write", 0)


@contextlib.contextmanager
def unsaved(client: redis.Redis, directory: Path) -> Iterator[None]:
    """Let a snapshot fail, as on a full disk, so that writes fail with MISCONF."""
    (directory / "dump.rdb").mkdir()  # which the snapshot would be renamed to
    client.config_set("save", "3600 1")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield
    client.config_set("save", "")


def test_a_job_waits_and_goes_on(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Every role waits while writes are refused, none ends, and then the job is finished."""
    texts = list(texts_of(COUNT))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    farm = FarmClient(client)

    def done() -> int:
        return sum(status.chunks_done for status in farm.statuses().values())

    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "2"),
    ):
        words = [corpus, "--model", f"null:16:{SPEED}", "--redis", server.url]
        embedding = Embedding(words, tmp_path / "out", {"EMBEDFARM_PART_BYTES_MAX": "32000"})
        wait_until(lambda: done() > 0 and len(farm.workers()) == 2)
        pids = {beat.pid for beat in farm.workers()}
        for refusing in (full_memory, few_replicas, unsaved):
            wait_until(more(done, done()))
            with refusing(client, server.private.directory):
                with pytest.raises(redis.ResponseError):
                    client.set("k", 1)
                # Producer, workers or scheduler, which would end of it otherwise.
                wait_until(more(lambda: errors(client), errors(client) + 10))
        assert embedding.wait() == 0, embedding.log()
        assert {beat.pid for beat in farm.workers()} == pids
    check_output(tmp_path / "out", texts, 16)


def more(count: Callable[[], int], than: int) -> Callable[[], bool]:
    """A function that says whether a number has grown."""
    return lambda: count() > than


def errors(client: redis.Redis) -> int:
    """The number of errors that the server has replied with."""
    return int(client.info("stats")["total_error_replies"])
