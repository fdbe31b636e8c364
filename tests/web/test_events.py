"""Tests of a job's server-sent events, through a real server."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.watch.overview import JobFacts, read_jobs
from embedfarm.web.jobs.job_watch import JobWatch
from tests.contract.little_job import CHUNKS, embed, make_job
from tests.support import LiveServer, wait_until
from tests.web.test_gate import SECONDS, served

PATH = "/v1/jobs/little/events"


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come: name, id, and data."""
    event: dict[str, Any] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name:
            event[name] = json.loads(value) if name == "data" else value
        elif event:
            yield event
            event = {}


def follow(web: httpx.Client, last: str = "") -> Iterator[dict[str, Any]]:
    """All events of the job."""
    with web.stream("GET", PATH, headers={"last-event-id": last}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield from events(response)


@pytest.fixture
def address(server: LiveServer, client: redis.Redis) -> Iterator[str]:
    """The URL at which the farm is served."""
    del client
    with served(server, http_streams_max=2) as ((host, port), _):
        yield f"http://{host}:{port}"


def test_a_job_is_followed_to_its_end(address: str, client: redis.Redis) -> None:
    """A stream tells how a job is, each change and its end; a new one, what is new since its id."""
    job = make_job(client, 2)
    with httpx.Client(base_url=address, timeout=SECONDS) as web:
        following = follow(web)
        first = next(following)
        assert (first["event"], first["data"]) == ("job", web.get("/v1/jobs").json()["jobs"][0])
        job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
        second = next(following)
        assert (second["data"]["chunks_done"], second["id"] != first["id"]) == (CHUNKS, True)
        again = follow(web, second["id"])
        job.cancel()
        assert [(each["event"], each["data"]["state"]) for each in again] == [("end", "cancelled")]
        happened, last = following
        assert (happened["event"], happened["data"]["kind"]) == ("timeline", "cancelled")
        assert last["event"] == "end"
        (told,) = follow(web, last["id"])
        assert told == last


def test_a_deleted_job_ends_its_streams(address: str, client: redis.Redis) -> None:
    """The streams of a job end when it is deleted, and a later request gets 404."""
    job = make_job(client, 1)
    with httpx.Client(base_url=address, timeout=SECONDS) as web:
        following = follow(web)
        next(following)
        job.delete()
        assert list(following) == []
        assert web.get(PATH).status_code == 404


def test_streams_are_bounded(address: str, client: redis.Redis) -> None:
    """One more than there are places is refused; a place is free when its client has gone."""
    make_job(client, 1)
    with httpx.Client(base_url=address, timeout=SECONDS) as web:
        with web.stream("GET", PATH) as one, web.stream("GET", PATH) as other:
            following = [events(one), events(other)]  # closed with its generator
            for each in following:
                next(each)
            with web.stream("GET", PATH) as refused:
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wait_until(lambda: web.get("/v1/jobs/little/results").status_code == 409)


def test_an_outage_does_not_end_a_stream(
    server: LiveServer, address: str, client: redis.Redis
) -> None:
    """A stream goes on after the server was killed and has come back."""
    make_job(client, 1)
    with httpx.Client(base_url=address, timeout=SECONDS) as web:
        following = follow(web)
        next(following)
        server.kill()
        server.start()
        wait_until(client.ping)
        client.hset("ef:{little}:meta", "state", "cancelled")
        assert [each["event"] for each in following][-1] == "end"


def test_a_look_for_who_has_left_is_nobodys(client: redis.Redis) -> None:
    """A watcher that comes again is told nothing that was read before it came."""
    job = make_job(client, 1)
    begun, go = threading.Event(), threading.Event()

    def read(jobs: Sequence[str]) -> list[JobFacts]:
        found = read_jobs(FarmClient(client), jobs)
        begun.set()
        assert go.wait(SECONDS)
        return found

    async def come_again() -> JobFacts | None:
        watch = JobWatch(read, 1)
        with watch.watching(job.id):
            assert await asyncio.to_thread(begun.wait, SECONDS)
        job.cancel()
        with watch.watching(job.id):
            go.set()
            found = await watch.change(job.id, None)
        await watch.close()
        return found

    found = asyncio.run(come_again())
    assert found is not None
    assert found.state == "cancelled"


def test_serving_ends_with_its_streams(server: LiveServer, client: redis.Redis) -> None:
    """SIGTERM ends streams and long polls at once, and the program with status 0."""
    make_job(client, 1)
    with served(server, drain_seconds=60, http_streams_max=2) as ((host, port), process):
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=SECONDS) as web:
            made = web.post("/v1/feeds", json={})
            path = f"{made.headers['location']}/results?wait=30"
            found: list[int] = []

            def ask() -> bool:
                found[:] = [web.get(path).status_code]
                return found != [429]  # a look below may have the second place for a moment

            poll = threading.Thread(target=wait_until, args=[ask])
            poll.start()
            following = follow(web)
            next(following)
            wait_until(lambda: web.get("/v1/jobs/little/results").status_code == 429)
            process.send_signal(signal.SIGTERM)
            assert list(following) == []
            assert process.wait(10) == 0
            poll.join()
        assert found == [204]
