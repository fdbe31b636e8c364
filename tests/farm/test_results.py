"""Tests that a reader of results gets each index once and in order while a job runs.

The server is killed meanwhile, and comes back without the last of its log.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobGone
from tests.farm.harness import Embedding, null_vectors, role, texts_of, write_corpus
from tests.support import LiveServer, force_log, wait_until
from tests.web.test_gate import served

MODEL = "null:16:40000"
SECONDS = 60.0


@pytest.fixture
def farm(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[httpx.Client]:
    """Start a scheduler, a worker and HTTP, which outlive the server; yield an HTTP client."""
    with ExitStack() as stack:
        stack.enter_context(role(server, tmp_path, "schedule"))
        stack.enter_context(role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"))
        settings = {"ingest_roots": json.dumps([str(tmp_path)]), "models": json.dumps([MODEL])}
        (host, port), _ = stack.enter_context(served(server, **settings))
        wait_until(lambda: FarmClient(client).workers())
        yield stack.enter_context(httpx.Client(base_url=f"http://{host}:{port}", timeout=SECONDS))


def crash(server: LiveServer, kept_bytes: int) -> None:
    """Kill the server, and start it again on its log, cut to at most so many bytes."""
    server.kill()
    log = newest_log(server)
    with log.open("r+b") as file:
        file.truncate(min(kept_bytes, log.stat().st_size))
    server.start()


def crash_after(server: LiveServer, lost_bytes: int) -> None:
    """Crash the server once so many more bytes were written, which are lost."""
    kept = newest_log(server).stat().st_size
    wait_until(lambda: newest_log(server).stat().st_size > kept + lost_bytes)
    crash(server, kept)


def newest_log(server: LiveServer) -> Path:
    """Return the file that the server appends to."""
    return max(server.private.directory.glob("**/*.incr.aof"))


def check(lines: list[dict[str, Any]], texts: list[str]) -> None:
    """Assert that each index is there once, in order, with the vector of its own text."""
    assert [line["index"] for line in lines] == list(range(len(texts)))
    found = np.array([line["embedding"] for line in lines], "<f4")
    np.testing.assert_array_equal(found, null_vectors(texts, 16))


def test_a_corpus_is_read_while_it_runs(
    server: LiveServer, client: redis.Redis, farm: httpx.Client, tmp_path: Path
) -> None:
    """A reader of a job's results gets each once over a crash of the server."""
    texts = list(texts_of(6000))
    corpus, out = write_corpus(tmp_path / "corpus.jsonl", texts), tmp_path / "out"
    words = [corpus, "--model", MODEL, "--redis", server.url, "--job-id", "corpus"]
    embedding = Embedding(words, out, {"EMBEDFARM_PART_BYTES_MAX": "20000"})
    wait_until(lambda: out_is_known(client))
    lines: list[dict[str, Any]] = []
    state, crashed = "", False
    while not (state == "finished" and len(lines) == len(texts)):
        query: dict[str, float] = {"start": len(lines), "limit": 300, "wait": 5}
        answer = farm.get("/v1/jobs/corpus/results", params=query)
        if answer.status_code in {404, 503}:  # until the server is there again, with the job
            continue
        assert answer.status_code in {200, 204}, answer.text
        lines += [json.loads(line) for line in answer.text.splitlines()]
        state = answer.headers["x-state"]
        if not crashed and lines:
            force_log(client)
            crash_after(server, 10_000)
            crashed = True
    assert crashed
    check(lines, texts)
    assert embedding.wait() == 0


def out_is_known(client: redis.Redis) -> bool:
    """Tell whether the job is there, and has a note of its output."""
    try:
        return bool(FarmClient(client).job("corpus").status().out)
    except JobGone:
        return False


class Sender:
    """A client of a feed that keeps unread texts, and sends them as the farm wants them."""

    def __init__(self, web: httpx.Client, texts: list[str]) -> None:
        self.web, self.texts = web, texts
        self.path = web.post("/v1/feeds", json={"model": MODEL}).headers["location"]
        self.next = self.read = self.repeats = 0
        self.closed = False

    def send(self) -> bool:
        """Send the next texts, or the end; return False once nothing is left to send."""
        if self.closed:
            return False
        if self.next == len(self.texts):
            answer = self.web.post(f"{self.path}/close", json={"count": self.next})
            self.closed = answer.status_code == 200
        else:
            texts = self.texts[self.next : self.next + 100]
            body = {"start": self.next, "texts": texts, "read": self.read}
            answer = self.web.post(f"{self.path}/texts", json=body)
            if answer.status_code == 200:
                self.next = answer.json()["next"]
        self.heed(answer)
        return True

    def acknowledge(self) -> None:
        """Acknowledge the results that were read."""
        self.heed(self.web.delete(f"{self.path}/results", params={"upto": self.read}))

    def heed(self, answer: httpx.Response) -> None:
        """Go back to where the farm says, but never behind what was read."""
        if answer.status_code == 409:
            self.next = max(self.read, int(answer.headers["x-next-start"]))
            self.repeats += 1
            self.closed = False
        else:
            assert answer.status_code in {200, 204, 404, 429, 503}, answer.text


def test_a_feed_is_read_while_it_is_filled(
    server: LiveServer, client: redis.Redis, farm: httpx.Client
) -> None:
    """A server that lost texts asks for them again, and its reader gets each result once."""
    texts = list(texts_of(2000))
    sender = Sender(farm, texts)
    lines: list[dict[str, Any]] = []
    kept, complete = 0, False
    while not complete:
        sender.send()
        query: dict[str, float] = {"start": len(lines), "wait": 0.2}
        answer = farm.get(f"{sender.path}/results", params=query)
        sender.heed(answer)
        if answer.status_code == 200:
            lines += [json.loads(line) for line in answer.text.splitlines()]
            sender.read = len(lines)
            sender.acknowledge()
        elif answer.status_code == 204:
            sender.closed = False  # the server may have lost that
        complete = answer.headers.get("x-complete") == "true" and answer.status_code == 204
        if not kept and lines:
            force_log(client)
            kept = newest_log(server).stat().st_size
        elif kept > 0 and len(lines) > 1000:
            crash(server, kept)
            kept = -1
    assert kept == -1
    assert sender.repeats
    check(lines, texts)
    sender.acknowledge()
    assert farm.get(sender.path.removesuffix("/results")).json()["state"] == "finished"


def test_a_feed_waits_for_its_client(farm: httpx.Client) -> None:
    """A reader that asks before there is a text gets its result when it comes."""
    path = farm.post("/v1/feeds", json={}).headers["location"]
    found: list[httpx.Response] = []
    query: dict[str, float] = {"start": 0, "wait": 25}
    reading = threading.Thread(
        target=lambda: found.append(farm.get(f"{path}/results", params=query))
    )
    reading.start()
    assert farm.post(f"{path}/texts", json={"start": 0, "texts": ["a"]}).json() == {"next": 1}
    reading.join(30)
    check([json.loads(found[0].text)], ["a"])
