"""Tests of feeds by HTTP: texts in, results out in order, and what is out of place."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient
from httpx2 import Response

from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block
from embedfarm.ingest.tasks import cleanup
from embedfarm.web.auth.keys import Key, Scope
from tests.contract.little_job import embed, make_job, snapshot
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
        """Send texts from an index on."""
        body = {"start": start, "texts": texts, **more}
        return self.web.post(f"{self.path}/texts", json=body)

    def close(self, count: int) -> Response:
        """Close the feed at a number of texts."""
        return self.web.post(f"{self.path}/close", json={"count": count})

    def get(self, start: int, limit: int = 1000, wait: float = 0) -> Response:
        """Read results from an index on."""
        query = {"start": start, "limit": limit, "wait": wait}
        return self.web.get(f"{self.path}/results", params=query)

    def acknowledge(self, upto: int) -> Response:
        """Acknowledge the results below an index."""
        return self.web.delete(f"{self.path}/results", params={"upto": upto})

    def work(self, *failed: int) -> list[Block]:
        """Embed all that waits, but for some chunks that fail; return the blocks."""
        entries = self.job.stream.read("one", 1000)
        blocks = [decode(Block, entry.data) for entry in entries]
        for entry, block in zip(entries, blocks, strict=True):
            chunks = range(block.start, block.end)
            self.job.stream.commit([embed(entry, *(each for each in failed if each in chunks))])
        return blocks


@pytest.fixture
def web(server: LiveServer, client: redis.Redis) -> Iterator[TestClient]:
    """An application whose window holds a few small blocks."""
    del client
    with client_of(server, models=(MODEL,), window_bytes_max=2000, jobs_max=2) as web:
        yield web


@pytest.fixture
def feed(web: TestClient, client: redis.Redis) -> Feed:
    """A feed that knows the size of its vectors already, and whose first text failed."""
    feed = Feed(web, client)
    assert feed.send(0, "first").json() == {"next": 1}
    feed.work(0)
    assert [*lines(feed.get(0))] == [{"index": 0, "error": "bad"}]
    assert feed.acknowledge(1).status_code == 200
    return feed


def lines(answer: Response) -> list[dict[str, Any]]:
    """The lines of an answer, as objects."""
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def indices(answer: Response) -> list[int]:
    """The indices of an answer's chunks."""
    return [line["index"] for line in lines(answer)]


def test_results_of_a_feed_stay_on_the_server(web: TestClient) -> None:
    """A feed whose vectors should be stored elsewhere is refused."""
    made = web.post("/v1/feeds", json={"model": "null:2", "stored": "/mnt/vectors"})
    assert (made.status_code, "read off the server" in made.text) == (422, True)


def test_options_are_those_of_a_job(web: TestClient, client: redis.Redis) -> None:
    """A feed's options are in its job; those that no worker or scheduler could use are refused."""
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
    """Texts that the feed has are accepted again unchanged; the rest of a longer repeat is new."""
    for _ in range(2):
        assert feed.send(1, "a", "b").json() == {"next": 3}
        assert feed.send(2, "b").json() == {"next": 3}
    assert feed.send(1, "a", "b", "c").json() == {"next": 4}
    assert [text for block in feed.work() for text in block.texts] == ["a", "b", "c"]


def test_a_gap_is_told(feed: Feed) -> None:
    """A request ahead of the feed gets 409, with the index at which the feed goes on."""
    for answer in (feed.send(2, "b"), feed.close(2), feed.get(2), feed.acknowledge(2)):
        assert (answer.status_code, answer.headers["x-next-start"]) == (409, "1"), answer.text
    assert feed.job.status().pushed_upto == 1
    late = feed.get(0)
    assert (late.status_code, late.headers["x-next-start"]) == (409, "1")


def test_texts_that_were_read_are_not_asked_for_again(feed: Feed) -> None:
    """A client that read results whose texts the server has lost goes on behind them."""
    far = 2**52
    assert feed.send(far, "h", read=far + 1).status_code == 422
    assert feed.send(7, "h", read=7).json() == {"next": 8}
    assert [block.start for block in feed.work()] == [7]
    assert indices(feed.get(7)) == [7]
    assert feed.send(far, "far", read=far).json() == {"next": far + 1}
    assert [block.start for block in feed.work()] == [far]


def test_a_full_window_is_told(feed: Feed) -> None:
    """Texts are accepted as far as they fit, then not until results are acknowledged."""
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
    feed.acknowledge(read)
    assert feed.send(upto, *texts).status_code == 200


def test_results_by_pages(feed: Feed) -> None:
    """Pages may cut results anywhere, and may be read again until they are acknowledged."""
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
    assert sorted(feed.job.results.starts()) == [1, 8]
    assert indices(feed.get(5, limit=2)) == [5, 6]
    for _ in range(2):
        assert feed.acknowledge(9).json()["drained_upto"] == 9
    assert feed.get(8).headers["x-next-start"] == "9"
    assert indices(feed.get(9)) == [9, 10, 11]  # of a result that is acknowledged in part
    assert feed.acknowledge(4).json()["drained_upto"] == 9
    feed.acknowledge(12)
    assert feed.job.results.starts() == []
    assert feed.job.status().drained_upto == 12


def test_blocks_cut_anew_after_a_loss(feed: Feed) -> None:
    """A reader within a result of blocks that were cut in another way gets the rest of it."""
    feed.send(1, *map(str, range(1, 8)))
    feed.work()
    assert indices(feed.get(4)) == [4, 5, 6, 7]
    feed.acknowledge(4)
    assert feed.job.results.starts() == [1]


def test_ids_come_back(feed: Feed) -> None:
    """Texts with ids keep them, also beside texts that have none."""
    assert feed.send(1, "a", "b", ids=["x", "y"]).status_code == 200
    assert feed.send(3, "c").status_code == 200
    assert feed.send(4, "d", ids=[]).status_code == 422
    blocks = feed.work()
    assert [block.ids for block in blocks] == [["x", "y"], None]


def test_a_feed_ends_when_it_is_acknowledged(feed: Feed, client: redis.Redis) -> None:
    """A closed feed is finished once all is acknowledged, and only a record of it is left."""
    feed.send(1, "a")
    for _ in range(2):
        assert feed.close(2).json()["state"] == "running"
    assert feed.close(1).status_code == 409
    assert feed.send(2, "b").status_code == 409
    feed.work()
    last = feed.get(1)
    assert (indices(last), last.headers["x-complete"]) == ([1], "true")
    assert feed.job.status().state == "closed"  # its reader may not have got them
    for state in ("running", "finished"):
        done = feed.get(2)
        assert (done.status_code, done.headers["x-complete"]) == (204, "true")
        assert done.headers["x-state"] == state
        for _ in range(2):
            assert feed.acknowledge(2).json()["state"] == "finished"
    assert FarmClient(client).ended_ids(9) == [feed.job.id]
    assert feed.get(1).status_code == 409
    assert feed.close(2).status_code == 200
    assert feed.send(1, "a").status_code == 409


def test_what_was_read_ends_a_feed_whose_server_has_lost_it(feed: Feed) -> None:
    """The client's word counts for results that the server has not: nothing is embedded again."""
    feed.send(1, "a", "b")
    feed.close(3)
    ended = feed.acknowledge(3).json()
    assert (ended["state"], ended["drained_upto"], ended["chunks_done"]) == ("finished", 3, 3)
    assert not feed.job.client.exists(feed.job.keys.blocks)


def test_what_is_no_feed(web: TestClient, client: redis.Redis, feed: Feed) -> None:
    """Texts are refused by a job that is no feed, by a cancelled feed, or as no Unicode."""
    make_job(client, 1)
    for job, status in (("little", 409), ("none", 404)):
        assert web.delete(f"/v1/jobs/{job}/results?upto=0").status_code == status
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
    """A chunk's vector is the one in the worker's result."""
    feed.send(1, "a")
    feed.work()
    assert lines(feed.get(1))[0]["embedding"] == [1.0] * null_vectors(["a"], 2).shape[1]


def test_who_may_only_read_destroys_nothing(
    server: LiveServer, client: redis.Redis, keys: dict[str, tuple[str, Key]]
) -> None:
    """A key that may only read can read again and again, and acknowledge nothing."""
    headers = {scope: {"authorization": f"Bearer {secret}"} for scope, (secret, _) in keys.items()}
    with client_of(server, [key for _, key in keys.values()], models=(MODEL,)) as web:
        web.headers.update(headers[Scope.SUBMIT])
        feed = Feed(web, client)
        feed.send(0, "a", "b", "c")
        feed.work()
        assert feed.close(3).status_code == 200
        before = snapshot(client)
        web.headers.update(headers[Scope.READ])
        for start in (3, 0, 1, 3, 2, 0):
            assert feed.get(start).status_code == (204 if start == 3 else 200)
        assert feed.acknowledge(3).status_code == 403
        assert snapshot(client) == before
        web.headers.update(headers[Scope.SUBMIT])
        assert feed.get(0).status_code == 403
        assert feed.acknowledge(3).json()["state"] == "finished"


def test_cleanup_leaves_results_that_nobody_has_read(
    feed: Feed, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cleanup` leaves a feed whose results wait for their reader, and deletes a cancelled one."""
    feed.send(1, "second")
    feed.work()
    assert feed.close(2).status_code == 200
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
    assert cleanup(0)["jobs"] == []
    assert indices(feed.get(1)) == [1]
    feed.job.cancel()
    assert cleanup(0)["jobs"] == [feed.job.id]
