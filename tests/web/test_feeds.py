"""Feeds by HTTP: texts in, results out in order, and what is said of what is out of place."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient
from httpx2 import Response

from embedfarm.farm import Farm
from embedfarm.jobs import Job
from embedfarm.records import Block, decode
from tests.contract.little_job import embed, make_job
from tests.farm.harness import null_vectors
from tests.support import LiveServer
from tests.web.conftest import client_of

MODEL = "null:2"


class Feed:
    """A feed, its client, and its only worker, in one thread."""

    def __init__(self, web: TestClient, client: redis.Redis, **options: object) -> None:
        made = web.post("/v1/feeds", json=options)
        assert made.status_code == 201, made.text
        self.web, self.path = web, made.headers["location"]
        self.job = Job(client, made.json()["job"])

    def send(self, start: int, *texts: str, **more: object) -> Response:
        """Texts."""
        body = {"start": start, "texts": texts, **more}
        return self.web.post(f"{self.path}/texts", json=body)

    def close(self, count: int) -> Response:
        """The end of texts."""
        return self.web.post(f"{self.path}/close", json={"count": count})

    def get(self, start: int, limit: int = 1000, wait: float = 0) -> Response:
        """Results."""
        query = {"start": start, "limit": limit, "wait": wait}
        return self.web.get(f"{self.path}/results", params=query)

    def work(self, *failed: int) -> list[Block]:
        """Embed all that waits; some chunks fail."""
        entries = self.job.read("one", 1000)
        blocks = [decode(Block, entry.data) for entry in entries]
        for entry, block in zip(entries, blocks, strict=True):
            chunks = range(block.start, block.end)
            self.job.commit([embed(entry, *(each for each in failed if each in chunks))])
        return blocks


@pytest.fixture
def web(server: LiveServer, client: redis.Redis) -> Iterator[TestClient]:
    """An application with a window for some small blocks."""
    del client
    with client_of(server, models=(MODEL,), window_bytes_max=2000, jobs_max=2) as web:
        yield web


@pytest.fixture
def feed(web: TestClient, client: redis.Redis) -> Feed:
    """A feed that knows the size of its vectors already, and has given up its first text."""
    feed = Feed(web, client)
    assert feed.send(0, "first").json() == {"next": 1}
    feed.work(0)
    assert [*lines(feed.get(0))] == [{"index": 0, "error": "bad"}]
    assert feed.get(1).status_code == 204
    return feed


def lines(answer: Response) -> list[dict[str, Any]]:
    """The lines of an answer."""
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def indices(answer: Response) -> list[int]:
    """The chunks of an answer."""
    return [line["index"] for line in lines(answer)]


def test_options_are_those_of_a_job(web: TestClient, client: redis.Redis) -> None:
    """What is asked for is in the job; what no worker or scheduler could use is refused."""
    options = {"name": "n", "prompt": "p", "dimensions": 1, "priority": 2, "tenant": "t"}
    feed = Feed(web, client, **options)
    spec, status = feed.job.spec(), feed.job.status()
    assert (spec.model, spec.name, spec.prompt, spec.dimensions) == (MODEL, "n", "p", 1)
    assert (status.priority, status.tenant, status.state) == (2, "t", "open")
    for wrong in ({"tenant": "\n"}, {"dimensions": -1}, {"color": 1}):
        assert web.post("/v1/feeds", json=wrong).status_code == 422, wrong
    assert web.post("/v1/feeds", json={"model": "other"}).status_code == 404
    assert web.post("/v1/feeds", json={}).status_code == 201
    full = web.post("/v1/feeds", json={})
    assert (full.status_code, int(full.headers["retry-after"]) > 0) == (429, True)


def test_a_repeat_changes_nothing(feed: Feed) -> None:
    """Texts that the feed has are taken as sent; of a longer repeat the rest is new."""
    for _ in range(2):
        assert feed.send(1, "a", "b").json() == {"next": 3}
        assert feed.send(2, "b").json() == {"next": 3}
    assert feed.send(1, "a", "b", "c").json() == {"next": 4}
    assert [text for block in feed.work() for text in block.texts] == ["a", "b", "c"]


def test_a_gap_is_told(feed: Feed) -> None:
    """Texts, an end, or a reader that is ahead of the feed: 409, and where it goes on."""
    for answer in (feed.send(2, "b"), feed.close(2), feed.get(2)):
        assert (answer.status_code, answer.headers["x-next-start"]) == (409, "1"), answer.text
    assert feed.job.status().pushed_upto == 1
    late = feed.get(0)
    assert (late.status_code, late.headers["x-next-start"]) == (409, "1")


def test_texts_that_were_read_are_not_asked_for_again(feed: Feed) -> None:
    """A client that has results of texts that the server lost goes on behind them."""
    far = 2**52
    assert feed.send(far, "h", read=far + 1).status_code == 422
    assert feed.send(7, "h", read=7).json() == {"next": 8}
    assert [block.start for block in feed.work()] == [7]
    assert indices(feed.get(7)) == [7]
    assert feed.send(far, "far", read=far).json() == {"next": far + 1}
    assert [block.start for block in feed.work()] == [far]


def test_a_full_window_is_told(feed: Feed) -> None:
    """Of what is sent as much is taken as fits, then nothing until results were taken."""
    texts = ["x" * 100] * 12
    upto = 1
    while (answer := feed.send(upto, *texts)).status_code == 200:
        assert upto < answer.json()["next"] <= upto + len(texts)
        upto = answer.json()["next"]
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert upto < 100
    feed.work()
    read = 1
    while read < upto:
        read = int(feed.get(read).headers["x-next-start"])
    feed.get(read)
    assert feed.send(upto, *texts).status_code == 200


def test_results_by_pages(feed: Feed) -> None:
    """Pages may cut results anywhere; each chunk comes once, and what was read is forgotten."""
    feed.send(1, *map(str, range(1, 8)))
    feed.work()
    feed.send(8, *map(str, range(8, 12)))
    feed.work(9)
    found: list[int] = []
    for _ in range(4):
        page = feed.get(1 + len(found), limit=3)
        assert indices(feed.get(1 + len(found), limit=3)) == indices(page)  # the answer was lost
        found += indices(page)
        assert page.headers["x-complete"] == "false"
    assert found == list(range(1, 12))
    assert feed.get(12).status_code == 204
    assert feed.job.result_starts() == []
    assert feed.job.status().drained_upto == 12


def test_blocks_cut_anew_after_a_loss(feed: Feed) -> None:
    """A reader within a result of blocks that were cut in another way gets the rest of it."""
    feed.send(1, *map(str, range(1, 8)))
    feed.work()
    assert indices(feed.get(4)) == [4, 5, 6, 7]
    assert feed.job.result_starts() == [1]


def test_ids_come_back(feed: Feed) -> None:
    """Those that have ids keep them, also beside others that have none."""
    assert feed.send(1, "a", "b", ids=["x", "y"]).status_code == 200
    assert feed.send(3, "c").status_code == 200
    assert feed.send(4, "d", ids=[]).status_code == 422
    blocks = feed.work()
    assert [block.ids for block in blocks] == [["x", "y"], None]


def test_a_feed_ends_when_it_is_read(feed: Feed, client: redis.Redis) -> None:
    """Closed and read to its end it is finished, and only a record of it is left."""
    feed.send(1, "a")
    for _ in range(2):
        assert feed.close(2).json()["state"] == "closed"
    assert feed.close(1).status_code == 409
    assert feed.send(2, "b").status_code == 409
    feed.work()
    last = feed.get(1)
    assert (indices(last), last.headers["x-complete"]) == ([1], "true")
    assert feed.job.status().state == "closed"  # its reader may not have got them
    for _ in range(2):
        done = feed.get(2)
        assert (done.status_code, done.headers["x-complete"]) == (204, "true")
        assert done.headers["x-state"] == "finished"
    assert Farm(client).ended_ids(9) == [feed.job.id]
    assert feed.get(1).status_code == 409
    assert feed.close(2).status_code == 200
    assert feed.send(1, "a").status_code == 409


def test_what_is_no_feed(web: TestClient, client: redis.Redis, feed: Feed) -> None:
    """Other jobs take no texts; a cancelled feed neither; text that is no Unicode never."""
    make_job(client, 1)
    for path, body in (("texts", {"start": 2, "texts": ["x"]}), ("close", {"count": 2})):
        assert web.post(f"/v1/jobs/little/{path}", json=body).status_code == 409
        assert web.post(f"/v1/jobs/none/{path}", json=body).status_code == 404
    headers = {"content-type": "application/json"}
    for field in (b'"texts": ["\\ud800"]', b'"texts": ["a"], "ids": ["\\ud800"]'):
        raw = b'{"start": 1, ' + field + b"}"
        answer = web.post(f"{feed.path}/texts", content=raw, headers=headers)
        assert answer.status_code == 422
    feed.job.cancel()
    assert feed.send(1, "a").status_code == 409
    assert feed.close(1).status_code == 409
    over = feed.get(1, wait=60)
    assert (over.status_code, over.headers["x-state"]) == (204, "cancelled")


def test_vectors_are_those_of_the_worker(feed: Feed) -> None:
    """The vector of a chunk is that of its result."""
    feed.send(1, "a")
    feed.work()
    assert lines(feed.get(1))[0]["vector"] == [1.0] * null_vectors(["a"], 2).shape[1]
