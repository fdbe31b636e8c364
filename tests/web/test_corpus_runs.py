"""Tests of the last jobs of one corpus: on the page, by HTTP and at the command line."""

import json

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.watch.corpus_runs import RUNS_MAX, last_runs
from embedfarm.watch.overview import read_job
from embedfarm.web.auth.keys import make_key
from tests.farm.harness import run
from tests.support import LiveServer
from tests.web.conftest import client_of

BROWSER = {"accept": "text/html"}
SPEC = JobSpec(model="null:2")
HALF_HOUR = {"device_us": 1_800_000_000, "cost_micros": 1_250_000, "chunks_failed": 3}
TIMES = {"first_read_ms": 1_000, "last_commit_ms": 11_000, "real_tokens_done": 5_000}


def make(client: redis.Redis, name: str, corpus: str, tenant: str = "") -> Job:
    """Make a job of a corpus that has ended: 200 chunks in 10 s, half an hour of devices."""
    job = Job(client, name)
    spec = msgspec.structs.replace(SPEC, name=f"run {name}")
    job.create(spec, 0, Terms(tenant=tenant), {"corpus": corpus})
    counters = {"chunk_count": 200, "chunks_in": 200, **HALF_HOUR, **TIMES}
    FarmClient(client).end(name, "finished", "", Settings(), **counters)  # type: ignore[arg-type] # counters
    return job


@pytest.fixture
def runs(client: redis.Redis) -> redis.Redis:
    """Make three jobs of one corpus, one of them a tenant's, and one of another corpus."""
    make(client, "monday", "/data/wiki")
    make(client, "tuesday", "/data/wiki")
    make(client, "theirs", "/data/wiki", "red")
    make(client, "other", "/data/mails")
    return client


def test_they_stand_side_by_side_on_the_page(web: TestClient, runs: redis.Redis) -> None:
    """A job's page has the jobs of its corpus with rate, cost and failures, and no others."""
    del runs
    page = web.get("/jobs/monday", headers=BROWSER).text
    table = page.partition("Last runs of this corpus")[2].partition("</section>")[0]
    for words in ("run tuesday", "run theirs", "this one", "1.25", "30 min 00 s", ">20<", ">500<"):
        assert words in table, words
    assert "run other" not in table
    assert "Last runs" not in web.get("/jobs/other", headers=BROWSER).text


def test_http_has_the_same(web: TestClient, runs: redis.Redis, server: LiveServer) -> None:
    """A job has the runs of its corpus by HTTP as at the command line; an upload has none."""
    said = web.get("/v1/jobs/monday/runs").json()
    assert {each["job"] for each in said} == {"monday", "tuesday", "theirs"}
    told = run("jobs", "runs", "monday", "--redis", server.url, "--json").stdout
    assert said == json.loads(told)
    make(runs, "upload", "")
    assert web.get("/v1/jobs/upload/runs").json() == []
    assert web.get("/v1/jobs/none/runs").status_code == 404


def test_a_tenant_sees_its_own(server: LiveServer, runs: redis.Redis) -> None:
    """The jobs of others with the same corpus are not there for a tenant."""
    make(runs, "again", "/data/wiki", "red")
    secret, key = make_key("ann", ["read"], "red")
    with client_of(server, [key]) as web:
        headers = BROWSER | {"authorization": f"Bearer {secret}"}
        page = web.get("/jobs/theirs", headers=headers).text
        said = web.get("/v1/jobs/theirs/runs", headers=headers).json()
    assert {each["job"] for each in said} == {"theirs", "again"}
    assert "run again" in page
    assert "run monday" not in page


def test_they_stand_side_by_side_at_the_command_line(server: LiveServer, runs: redis.Redis) -> None:
    """The command line has the same figures; of an upload nobody knows the other jobs."""
    url = ("--redis", server.url)
    said = run("jobs", "runs", "monday", *url).stdout
    assert len(said.splitlines()) == 4
    assert "other" not in said
    assert "30 min 00 s  1.25" in said
    found = json.loads(run("jobs", "runs", "monday", *url, "--json").stdout)
    assert {each["job"] for each in found} == {"monday", "tuesday", "theirs"}
    figures = {(each["chunks_per_second"], each["cost"], each["failed"]) for each in found}
    assert figures == {(20.0, 1.25, 3)}
    make(runs, "upload", "")
    assert "uploaded" in run("jobs", "runs", "upload", *url).stdout


def test_only_the_last_are_shown(client: redis.Redis) -> None:
    """The newest few jobs are enough, however often a corpus was embedded."""
    for number in range(RUNS_MAX + 3):
        make(client, f"run-{number}", "/data/wiki")
    farm = FarmClient(client)
    assert len(last_runs(farm, read_job(farm, "run-0"))) == RUNS_MAX
