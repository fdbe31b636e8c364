"""Tests of jobs by HTTP, under the names of the command line."""

import json
import time
from dataclasses import asdict

import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.watch.overview import read_job
from embedfarm.watch.view import FarmReader
from embedfarm.web.http.rendering import percent
from tests.contract.little_job import CHUNKS, embed, make_job
from tests.farm.harness import run
from tests.support import LiveServer
from tests.watch.test_view import beat, embed_two, report

SPEC = encode(JobSpec(model="null:2", name="many"))


def make_many(client: redis.Redis, count: int) -> None:
    """Make jobs: every third one is cancelled, and every second one is of tenant "a"."""
    pipe = client.pipeline(transaction=False)
    for number in range(count):
        name = f"j{number:05}"
        state = "open" if number % 3 else "cancelled"
        fields = {"spec": SPEC, "state": state, "tenant": "" if number % 2 else "a"}
        pipe.hset(wire.JobKeys(name).meta, mapping=fields)  # type: ignore[arg-type] # bytes too
        pipe.zadd(wire.JOBS, {name: 1000 + number // 7})  # some were made at the same time
    pipe.execute()


def all_pages(web: TestClient, **query: str | int) -> list[str]:
    """The ids of the jobs on all pages."""
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = web.get("/v1/jobs", params={**query, "after": after}).json()
        found += [job["job"] for job in page["jobs"]]
        after = page["next"]
    return found


def test_names_are_those_of_the_command_line(
    web: TestClient, server: LiveServer, client: redis.Redis
) -> None:
    """A job by HTTP has every field that `jobs show --json` has, and their values."""
    FarmClient(client).reports.refuse(make_job(client, 2).id, "one", "no memory")
    shown = json.loads(run("jobs", "show", "little", "--redis", server.url, "--json").stdout)
    assert shown.pop("age")
    assert web.get("/v1/jobs/little/timeline").json() == shown.pop("timeline")
    assert web.get("/v1/jobs/little").json() == shown
    assert shown["done_ratio"] is None
    (listed,) = web.get("/v1/jobs").json()["jobs"]
    assert listed == {name: shown[name] for name in listed}
    assert shown["refused"] == {"one": "no memory"}


def test_how_far_and_how_fast_a_job_is(web: TestClient, client: redis.Redis) -> None:
    """A job by HTTP says its share, its rates and the time left, as the view of the farm does."""
    farm = FarmClient(client)
    embed_two(farm)
    beat(farm, "one", state="busy")
    report(farm)
    found = web.get("/v1/jobs/little").json()
    assert (found["done_ratio"], found["chunks_per_second"]) == pytest.approx((0.4, 4))
    assert found["seconds_left"] == pytest.approx([1.5, 1.5])
    (job,) = FarmReader(farm).read().jobs
    assert {name: found[name] for name in ("done_ratio", "tokens_per_second")} == pytest.approx(
        {"done_ratio": job.done_ratio, "tokens_per_second": job.tokens_per_second}
    )
    assert f"{percent(job.done_ratio or 0)} ·" in web.get("/jobs/little").text


def test_pages_have_every_job_once(web: TestClient, client: redis.Redis) -> None:
    """Pages of any size have each job once, oldest first; filters hold over pages."""
    make_many(client, 100)
    everything = [f"j{number:05}" for number in range(100)]
    for limit in (1, 7, 99, 100, 101):
        assert all_pages(web, limit=limit) == everything
    cancelled = everything[::3]
    assert all_pages(web, limit=5, state="cancelled") == cancelled
    assert all_pages(web, limit=5, state="cancelled", tenant="a") == cancelled[::2]
    assert all_pages(web, state="paused") == []
    client.zadd(wire.JOBS, {"place": 1001})  # of a job that is about to be made
    client.delete(wire.JobKeys("j00050").meta)
    assert all_pages(web, limit=9) == [job for job in everything if job != "j00050"]


def test_ended_jobs_follow(web: TestClient, client: redis.Redis) -> None:
    """The ended jobs follow the unfinished ones, newest first, each once."""
    farm = FarmClient(client)
    for number in range(20):
        make_job(client, 1, f"e{number:02}")
        farm.end(f"e{number:02}", "failed" if number % 2 else "finished", "", Settings())
    client.zadd(wire.ENDED, {f"e{number:02}": 1e9 + number // 3 for number in range(20)})
    make_many(client, 10)
    unfinished = [f"j{number:05}" for number in range(10)]
    ended = [f"e{number:02}" for number in reversed(range(20))]
    for limit in (1, 3, 10, 29, 30, 31):
        assert all_pages(web, limit=limit) == [*unfinished, *ended]
    assert all_pages(web, limit=3, state="failed") == ended[::2]
    assert all_pages(web, limit=3, state="running", tenant="a") == ["j00002", "j00004", "j00008"]


@pytest.mark.alone
def test_a_list_of_ten_thousand_is_quick(web: TestClient, client: redis.Redis) -> None:
    """A page, and one of the few that match, take a fraction of a second among 10,000 jobs."""
    make_many(client, 10_000)
    rare = "j09998"
    client.hset(wire.JobKeys(rare).meta, "tenant", "rare")
    for query, expected in (({"limit": 100}, 100), ({"tenant": "rare"}, 1)):
        began = time.monotonic()
        found = web.get("/v1/jobs", params=query).json()
        assert len(found["jobs"]) == expected
        assert time.monotonic() - began < 2.0


def test_failed_chunks_by_pages(web: TestClient, client: redis.Redis) -> None:
    """Every failed chunk comes once, in the order of failing, with its reason."""
    job = make_job(client, 3)
    for entry in job.stream.read("one", 3):
        job.stream.commit([embed(entry, int(entry.id.split("-")[0]) - 1)])
    first = web.get("/v1/jobs/little/errors", params={"limit": 2}).json()
    assert [each["index"] for each in first["errors"]] == [0, CHUNKS]
    assert first["errors"][0] == {"index": 0, "id": None, "reason": "bad", "attempts": 2}
    second = web.get("/v1/jobs/little/errors", params={"limit": 2, "after": first["next"]}).json()
    assert [each["index"] for each in second["errors"]] == [2 * CHUNKS]
    assert second["next"] is None


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/little/errors"])
@pytest.mark.parametrize("after", ["\u0663:x", "\u0663-\u0663@\u0663"])
def test_digits_are_those_of_ascii(
    web: TestClient, client: redis.Redis, path: str, after: str
) -> None:
    """Where a page begins is said in digits that the server reads as well."""
    make_job(client, 1)
    assert web.get(path, params={"after": after}).status_code == 422


def test_a_job_is_steered(web: TestClient, client: redis.Redis) -> None:
    """Pause, resume and cancel do what they say; what has ended cannot be resumed."""
    job = make_job(client, 1)
    for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        answer = web.post(f"/v1/jobs/little/{verb}")
        assert (answer.status_code, answer.json()["state"]) == (200, state)
        assert job.status().shown_state == state
    refused = web.post("/v1/jobs/little/resume")
    assert refused.status_code == 409
    assert "cancelled" in refused.json()["detail"]


def test_terms_are_changed(web: TestClient, client: redis.Redis) -> None:
    """The terms that are given change, the others stay; wrong ones change nothing."""
    job = make_job(client, 1)
    job.set_terms(weight=7)
    changed = web.patch("/v1/jobs/little", json={"priority": 2, "tenant": "a"}).json()
    assert (changed["priority"], changed["tenant"], changed["weight"]) == (2, "a", 7)
    for wrong in ({}, {"priority": 3}, {"weight": 0}, {"tenant": "a\nb"}, {"state": "open"}):
        answer = web.patch("/v1/jobs/little", json=wrong)
        assert answer.status_code == 422, wrong
    status = read_job(FarmClient(client), "little")
    assert Terms(status.priority, status.tenant, status.weight, status.deadline_ms) == Terms(
        2, "a", 7
    )


def test_only_what_has_ended_is_deleted(web: TestClient, client: redis.Redis) -> None:
    """A job goes when it was cancelled or is on disk as a whole, and nothing is left of it."""
    job = make_job(client, 1)
    job.close(CHUNKS)
    assert web.delete("/v1/jobs/little").status_code == 409
    job.stream.commit([embed(entry) for entry in job.stream.read("one", 1)])
    assert web.delete("/v1/jobs/little").status_code == 409  # its results are nowhere else
    job.results.drain(CHUNKS, [0])
    assert web.delete("/v1/jobs/little").status_code == 204
    assert web.delete("/v1/jobs/little").status_code == 404
    make_job(client, 1).cancel()
    assert web.delete("/v1/jobs/little").status_code == 204
    assert not FarmClient(client).job_ids()
    assert not client.exists(*Job(client, "little").keys.all())


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/v1/jobs/none"),
        ("GET", "/v1/jobs/none/errors"),
        ("POST", "/v1/jobs/none/pause"),
        ("POST", "/v1/jobs/none/cancel"),
        ("DELETE", "/v1/jobs/none"),
    ],
)
def test_a_job_that_is_not_there(web: TestClient, verb: str, path: str) -> None:
    """A request for a job that is not there gets 404 as a problem in JSON."""
    answer = web.request(verb, path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == 404


def test_a_job_that_paused_itself(web: TestClient, server: LiveServer, client: redis.Redis) -> None:
    """A job at its limit says why, is not resumed, and goes on when the limit is raised."""
    job = make_job(client, 4)
    said = web.patch("/v1/jobs/little", json={"max_hours": 1, "max_cost": 0.5})
    assert (said.json()["max_hours"], said.json()["max_cost"]) == (1, 0.5)
    entry, result = embed(job.stream.read("one", 1)[0])
    result.seconds = 3600.0
    job.stream.commit([(entry, result)])
    shown = web.get("/v1/jobs/little").json()
    why = "has taken as much as it may: max_hours 1"
    assert (shown["state"], shown["reason"]) == ("paused", why)
    page = web.get("/jobs/little", headers={"accept": "text/html"}).text
    assert f"it {why}" in page
    assert "/jobs/little/resume" not in page
    refused = web.post("/v1/jobs/little/resume")
    assert refused.status_code == 409
    assert "raise its max_hours" in refused.json()["detail"]
    assert web.patch("/v1/jobs/little", json={"max_hours": -1}).status_code == 422
    told = run("jobs", "set", "little", "--max-hours", "2", "--redis", server.url)
    assert told.stdout.strip() == "little is running, max_hours 2, max_cost 0.5"
    assert web.get("/v1/jobs/little").json()["reason"] == ""


def test_facts_are_the_status(client: redis.Redis) -> None:
    """What people see of a job is its status, unchanged but for the word of its state."""
    job = make_job(client, 2)
    facts = asdict(read_job(FarmClient(client), job.id))
    status = asdict(job.status()) | {"state": "running"}
    assert status.items() <= facts.items()
    assert set(facts) - set(status) == {
        "job", "name", "model", "late_seconds", "device_hours", "cost", "refused",
    }  # fmt: skip
