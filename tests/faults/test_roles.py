"""Tests of every role behind the proxy, with faults at commands that a retry could repeat.

A job ends complete whatever is lost: each index once, with the vector of its own text.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block
from tests.farm.harness import (
    Embedding,
    check_output,
    null_vectors,
    role,
    run,
    texts_of,
    write_corpus,
)
from tests.faults.proxy import Fault, Proxy, Rain
from tests.ingest.rq_farm import Door, wait_for
from tests.support import LiveServer, wait_until
from tests.web.test_gate import served
from tests.workers.support import embedded

DIMENSIONS: Final = 16
MODEL: Final = f"null:{DIMENSIONS}:20000"
COUNT: Final = 1000
BLOCK: Final = 8
LEASE_SECONDS: Final = 3.5
# A lost reply, a request lost by a reset, an answer that dribbles in.
LOST, CUT, SLOW = Fault("drop"), Fault("reset", "request"), Fault("trickle")
HALF_OPEN: Final = Fault("stall")
Aims = Mapping[str, Sequence[Fault]]

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def proxy(server: LiveServer) -> Iterator[Proxy]:
    """A proxy in front of the server of this test."""
    with Proxy(server.private.socket) as proxy:
        yield proxy


def aim(proxy: Proxy, aims: Aims) -> None:
    """Aim at several commands."""
    for command, faults in aims.items():
        proxy.aim(command, *faults)


@contextlib.contextmanager
def work(server: LiveServer | Proxy, home: Path) -> Iterator[None]:
    """Run two workers with short leases."""
    words = ("work", "--devices", "cpu", "--workers", "2")
    with role(server, home, *words, lease_seconds=str(LEASE_SECONDS)):
        yield


def test_work_begins_in_spite_of_faults(client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """`work` whose first looks at the server meet faults waits for it, and does not end."""
    for command in ("PING", "INFO", "ZRANGE"):
        proxy.aim(command, Fault("reset"), LOST, CUT)
    with work(proxy, tmp_path):
        wait_until(lambda: len(FarmClient(client).workers()) == 2, 60)
    for command in ("PING", "INFO", "ZRANGE"):
        proxy.wait_hit(command)


def push_until(job: Job, texts: Iterator[str], hit: Callable[[], bool]) -> list[str]:
    """Push blocks to a job, a few ahead, until `hit()`, and close it; return its texts."""
    sent: list[str] = []
    job.create(JobSpec(model=MODEL), 0)
    deadline = time.monotonic() + 180
    while not hit():
        assert time.monotonic() < deadline, "the faults do not happen"
        wait_until(lambda: job.stream.backlog()[0] < 16)
        block = Block(start=len(sent), texts=[next(texts) for _ in range(BLOCK)], token_count=400)
        job.push([(block, encode(block))])
        sent += block.texts
    job.close(len(sent))
    return sent


def check_server(job: Job, count: int) -> None:
    """Assert that all chunks are counted once, and that no entry and no lease is left."""
    status = job.status()
    assert (status.chunks_done, status.chunks_failed) == (count, 0)
    assert status.blocks_done == status.blocks_in
    for stream in (job.keys.blocks, job.keys.retry):
        assert job.client.xlen(stream) == 0
        assert not job.stream.pending(stream, None, 10)


def test_workers(client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """Leases whose reply was lost are found, and commits whose reply was lost count once."""
    aims = {
        "XREADGROUP": [LOST, CUT, LOST, Fault("reset"), SLOW, HALF_OPEN],
        "commit": [LOST, CUT, Fault("reset"), SLOW, HALF_OPEN],
        "claim": [LOST, CUT],
        "XPENDING": [LOST],
        "note": [LOST, CUT],
        "renew": [LOST, CUT],
        "beat": [LOST, CUT],
        "XADD": [LOST],
    }
    aim(proxy, aims)
    job = FarmClient(client).job("j")
    with work(proxy, tmp_path):
        texts = push_until(
            job, texts_of(100_000), lambda: len(proxy.hits) == sum(map(len, aims.values()))
        )
        began = time.monotonic()
        wait_until(lambda: job.status().embedded, 60)
        assert time.monotonic() - began < 20
    check_server(job, len(texts))
    np.testing.assert_array_equal(embedded(job), null_vectors(texts, DIMENSIONS))


def embed(server: LiveServer | Proxy, home: Path, **settings: object) -> None:
    """Run `embedfarm embed`; its output is what a quiet run makes, and nothing else is left."""
    texts = list(texts_of(COUNT))
    corpus, out = write_corpus(home / "corpus.jsonl", texts), home / "out"
    environment = {f"EMBEDFARM_{name.upper()}": str(value) for name, value in settings.items()}
    words = ("embed", corpus, "--out", out, "--model", MODEL, "--redis", server.url)
    done = run(*words, environment=environment)
    assert done.returncode == 0, done.stderr
    check_output(out, texts, DIMENSIONS)
    assert not (out / ".embedfarm").exists()


def check_ended(client: redis.Redis) -> None:
    """Assert that one job was there, of which a record is left, and each block counted once."""
    farm = FarmClient(client)
    assert not farm.job_ids()
    [name] = farm.ended_ids(10)
    status = farm.job(name).status()
    assert status.state == "finished"
    assert status.blocks_done == status.blocks_in
    kept = {wire.JobKeys(name).meta.encode(), wire.JobKeys(name).failed.encode()}
    assert set(client.keys(f"ef:{{{name}}}:*")) <= kept


def test_embed(server: LiveServer, client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """Producer and collector finish a job with faults at each of their commands."""
    aims = {
        "admit": [LOST],
        "create": [LOST, CUT],
        "push": [LOST, CUT, SLOW],
        "close": [LOST],
        "HGET": [LOST, CUT, SLOW, LOST],
        "HMGET": [LOST, CUT, LOST],
        "HKEYS": [LOST],
        "drain": [LOST, CUT, HALF_OPEN],
        "BLPOP": [LOST, CUT],
        "HGETALL": [LOST],
        "end": [LOST],
        "ZADD": [LOST],
        "ZREM": [LOST],
    }
    aim(proxy, aims)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(embed, proxy, tmp_path, part_bytes_max=32_000)
        proxy.wait_hit("BLPOP")  # there is no worker whose results it could have
        with work(server, tmp_path):
            done.result()
    for command in aims:
        proxy.wait_hit(command, 1)
    check_ended(client)


def test_a_command_that_dies_at_its_very_end(
    server: LiveServer, client: redis.Redis, tmp_path: Path, proxy: Proxy
) -> None:
    """A command killed with its output complete ends the job when it runs again."""
    texts = list(texts_of(100))
    corpus, out = write_corpus(tmp_path / "corpus.jsonl", texts), tmp_path / "out"
    words = [corpus, "--model", "null:16", "--redis"]
    proxy.aim("end", Fault("stall", "request"))
    with work(server, tmp_path):
        embedding = Embedding([*words, proxy.url], out, {})
        proxy.wait_hit("end", 60)
        embedding.kill()
    assert FarmClient(client).job_ids()
    assert run("embed", *words, server.url, "--out", out).returncode == 0
    check_output(out, texts, DIMENSIONS)
    assert not (out / ".embedfarm").exists()
    check_ended(client)


def test_a_scheduler(server: LiveServer, client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """A scheduler whose requests are lost goes on with its plans, and does not end."""
    aims = {
        "elect": [LOST],
        "publish": [LOST, CUT, SLOW],
        "XREAD": [Fault("reset")],
        "LPUSH": [LOST],
    }
    aim(proxy, aims)
    with role(proxy, tmp_path, "schedule"), work(server, tmp_path):
        embed(server, tmp_path)
        for command in aims:
            proxy.wait_hit(command)
        wait_until(FarmClient(client).plans.has_scheduler, 20)
        proxy.aim("abdicate", LOST)
    check_ended(client)


def test_all_of_them_in_the_rain(client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """A job is complete though every fiftieth request of any role meets a fault, by a seed."""
    faults = (LOST, CUT, SLOW, Fault("drop", "request"), Fault("reset"), Fault("delay"))
    proxy.rain = Rain(1, 0.02, faults)
    with role(proxy, tmp_path, "schedule"), work(proxy, tmp_path):
        embed(proxy, tmp_path, part_bytes_max=32_000)
        proxy.rain = None
    assert len(proxy.hits) >= 5
    check_ended(client)


def test_ingest(server: LiveServer, client: redis.Redis, tmp_path: Path, proxy: Proxy) -> None:
    """A job that programs enqueue with RQ is done despite faults, and finished for RQ as well."""
    aims = {
        "BLMOVE": [LOST],
        "HGETALL": [LOST],
        "EXEC": [LOST, CUT],
        "push": [LOST],
        "commit": [LOST],
        "end": [LOST],
    }
    texts = list(texts_of(COUNT))
    corpus, out = write_corpus(tmp_path / "corpus.jsonl", texts), tmp_path / "out"
    door = Door(server, tmp_path)
    try:
        with work(proxy, tmp_path), door.ingest(redis_url=proxy.url):
            wait_until(lambda: proxy.requests["BLMOVE"] > 0)
            aim(proxy, aims)
            asked = proxy.requests["BLMOVE"]  # and answered without a job, once a second
            wait_until(lambda: proxy.requests["BLMOVE"] > asked)
            job = door.enqueue("embed_corpus", str(corpus), str(out), model=MODEL)
            wait_for(job, "finished")
            check_output(out, texts, DIMENSIONS)
            for command in aims:
                proxy.wait_hit(command)
            assert job.get_status() == "finished"
    finally:
        door.connection.close()
    check_ended(client)


def ask(address: tuple[str, int], text: str) -> list[float]:
    """Ask for the vector of a text by HTTP until it comes, as clients do."""
    deadline = time.monotonic() + 60
    url = f"http://{address[0]}:{address[1]}/v1/embeddings"
    while True:
        answer = httpx.post(url, json={"model": "null:16", "input": text}, timeout=60)
        if answer.status_code == httpx.codes.OK:
            data: list[Any] = answer.json()["data"]
            return [float(number) for number in data[0]["embedding"]]
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
        assert time.monotonic() < deadline


def test_web(tmp_path: Path, proxy: Proxy) -> None:
    """A request that meets a fault gets the vector of its text, or 503 and the vector on retry."""
    aims = {
        "ask": [LOST, HALF_OPEN],
        "BLPOP": [CUT],
        "take": [LOST],
        "answer": [LOST],
    }
    limits = {"lane_lease_seconds": 2, "lane_seconds_max": 10, "models": '["null:16"]'}
    words = ("work", "--devices", "cpu", "--workers", "1")
    with (
        role(proxy, tmp_path, *words, **{name: str(value) for name, value in limits.items()}),
        served(proxy, **limits) as (address, process),
    ):
        for command, faults in aims.items():
            for fault in faults:
                proxy.aim(command, fault)
                text = f"{command} {fault}"
                expected = null_vectors([text], DIMENSIONS)[0]
                np.testing.assert_allclose(ask(address, text), expected, atol=1e-6)
            proxy.wait_hit(command)
        assert process.poll() is None
