"""Tests of the timeline by HTTP, on the pages, in events and at the command line."""

import json
import logging
import re
from html import unescape

import httpx
import msgspec
import redis
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.process_log import LogSender
from embedfarm.contract.usage import Account
from embedfarm.web.auth.keys import Key, Scope
from tests.contract.little_job import SPEC, heartbeat, make_job
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_events import follow
from tests.web.test_gate import SECONDS, bearer, served


def test_every_door_tells_the_same(server: LiveServer, client: redis.Redis) -> None:
    """HTTP, a job's page, the overview and `jobs show` have the same events in the same words."""
    make_job(client, 1)
    with client_of(server) as web:
        assert web.post("/v1/jobs/little/pause").status_code == 200
        FarmClient(client).timeline.add(FarmEvent(kind="lost", worker="one"))
        told = web.get("/v1/jobs/little/timeline").json()
        assert [each["kind"] for each in told] == ["paused", "submitted"]
        assert told[0]["sentence"] == "job little was paused by HTTP"
        page = unescape(web.get("/jobs/little").text)
        assert all(each["sentence"] in page for each in told)
        assert "worker one is lost" not in page
        overview = unescape(web.get("/").text)
        everything = web.get("/v1/timeline").json()
        assert [each["kind"] for each in everything] == ["lost", "paused", "submitted"]
        assert all(each["sentence"] in overview for each in everything)
        assert web.get("/v1/timeline", params={"limit": 1}).json() == everything[:1]
    words = ["jobs", "show", "little", "--redis", server.url]
    shown = CliRunner().invoke(app, words).output
    assert all(each["sentence"] in shown for each in told)
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["timeline"] == told


def test_a_key_is_named(
    server: LiveServer, client: redis.Redis, keys: dict[str, tuple[str, Key]]
) -> None:
    """What is done with a key is told with its name, and nobody reads its secret."""
    make_job(client, 1)
    secret, key = keys[Scope.ADMIN]
    with client_of(server, [key]) as web:
        headers = bearer(secret)
        asked = web.patch("/v1/jobs/little", json={"priority": 1}, headers=headers)
        assert asked.status_code == 200, asked.text
        [change, _] = web.get("/v1/jobs/little/timeline", headers=headers).json()
    assert change["sentence"] == f"job little has other terms by key {key.name}: priority high"
    assert secret not in str(change)


def test_a_job_says_who_made_it_and_what_it_took(web: TestClient, client: redis.Redis) -> None:
    """The page of a job says who submitted it, and how long devices worked for it."""
    job = FarmClient(client, actor="key ann").job("little")
    job.create(SPEC, 0)
    FarmClient(client, actor="key bob").job("little").create(SPEC, 0)
    for worker, seconds in (("one", 3600.0), ("two", 1800.0)):
        account = Account(chunks=1, seconds={"forward": seconds, "queue": 9.0})
        FarmClient(client).reports.account(worker, "1", {(job.id, ""): account})
    job.note("device_us", 5_400_000_000)
    assert web.get("/v1/jobs/little").json()["submitted_by"] == "key ann"
    page = unescape(web.get("/jobs/little").text)
    assert re.search(r"<dt>created</dt><dd>[^<]* by key ann</dd>", page)
    assert re.search(r"<dt>Devices' time</dt>\s*<dd><div class=\"figure\">1 h 30 min</div>", page)
    assert re.search(r'data-label="device time">1 h', page)


def test_what_happens_is_streamed(server: LiveServer, client: redis.Redis) -> None:
    """The stream of a job tells what happens to it, once, and then how it is."""
    job = make_job(client, 1)
    with (
        served(server) as ((host, port), _),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=SECONDS) as web,
    ):
        following = follow(web)
        assert next(following)["event"] == "job"
        job.pause()
        happened, later = next(following), next(following)
    assert (happened["event"], happened["data"]["kind"]) == ("timeline", "paused")
    assert (later["event"], later["data"]["state"]) == ("job", "paused")


def test_restarts_are_shown(web: TestClient, client: redis.Redis) -> None:
    """How many times a worker was started again is on its page, in the API and in metrics."""
    beat = msgspec.structs.replace(heartbeat("one"), restarts=3)
    assert FarmClient(client).beat(beat, 60)
    assert web.get("/v1/workers").json()[0]["restarts"] == 3
    assert 'data-label="restarts">3</td>' in web.get("/workers").text
    assert 'embedfarm_worker_restarts{worker="one"} 3.0' in web.get("/metrics").text


def test_logs_are_shown(web: TestClient, server: LiveServer, client: redis.Redis) -> None:
    """The log of a process is read by HTTP and on its page; the newest is shown first."""
    assert "No process has logged anything" in web.get("/logs").text
    assert web.get("/v1/logs/one").status_code == 404
    for name in ("one", "two"):
        sender = LogSender(server.url, name)
        words = f"{name} <b>is</b> odd"
        sender.emit(logging.LogRecord("test", logging.WARNING, "", 1, words, None, None))
        sender.close()
    assert [each["process"] for each in web.get("/v1/logs").json()] == ["one", "two"]
    [line] = web.get("/v1/logs/one").json()
    assert (line["level"], line["text"]) == ("WARNING", "one <b>is</b> odd")
    page = web.get("/logs").text
    assert "two &lt;b&gt;is&lt;/b&gt; odd" in page
    assert "one &lt;b&gt;is&lt;/b&gt; odd" in web.get("/logs", params={"process": "one"}).text
    FarmClient(client).beat(heartbeat("one"), 60)
    assert 'href="/logs?process=one"' in web.get("/workers").text
