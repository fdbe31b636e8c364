"""Tests that tenants are apart: each route is asked by one for what is another's."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient
from httpx2 import Response

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import JobShare, Plan
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_directories import OUTPUT
from embedfarm.ingest.openai_files import complete_batch
from embedfarm.watch import overview
from embedfarm.web.auth.keys import make_key
from embedfarm.web.pages import page_events
from tests.contract.little_job import COMPLETION, DECISION, SAMPLE, STATS, heartbeat, snapshot
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_batches import line
from tests.web.test_gate import bearer

NULL: Final = "null:16"
CANARY: Final = "canary"  # in all that a person of the first tenant has named or written
NONE: Final = "0" * 32
ACCEPTS: Final = ("*/*", "text/html", "text/event-stream")
FORM: Final = {"files": {"file": ("b.jsonl", b'{"text": "b"}\n')}}
BATCH: Final = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
TEXTS: Final = {"json": {"start": 0, "texts": ["b"]}}

BY_ID: Final[dict[str, dict[str, Any]]] = {
    "GET /v1/jobs/{job}": {},
    "PATCH /v1/jobs/{job}": {"json": {"weight": 2}},
    "DELETE /v1/jobs/{job}": {},
    "POST /v1/jobs/{job}/pause": {},
    "POST /v1/jobs/{job}/resume": {},
    "POST /v1/jobs/{job}/cancel": {},
    "POST /v1/jobs/{job}/retry": {},
    "POST /v1/jobs/{job}/texts": TEXTS,
    "POST /v1/jobs/{job}/close": {"json": {"count": 2}},
    "GET /v1/jobs/{job}/search": {"params": {"query": "a"}},
    "GET /v1/jobs/{job}/results": {"params": {"start": 1}},
    "DELETE /v1/jobs/{job}/results": {"params": {"upto": 1}},
    "GET /v1/jobs/{job}/errors": {},
    "GET /v1/jobs/{job}/errors/{index}": {"index": "0"},
    "GET /v1/jobs/{job}/events": {},
    "GET /v1/jobs/{job}/timeline": {},
    "GET /v1/jobs/{job}/runs": {},
    "GET /v1/batches/{batch}": {},
    "POST /v1/batches/{batch}/cancel": {},
    "GET /v1/files/{file}": {},
    "GET /v1/files/{file}/content": {},
    "DELETE /v1/files/{file}": {},
    "GET /jobs/{job}": {},
    "GET /jobs/{job}/results.{kind}": {"kind": "jsonl"},
    "GET /jobs/{job}/search": {"params": {"query": "a"}},
    "GET /jobs/{job}/errors/{index}": {"index": "0"},
    "GET /jobs/{job}/{verb}": {"verb": "cancel"},
    "POST /jobs/{job}/{verb}": {"verb": "cancel"},
    "POST /jobs/{job}/limits": {"data": {"max_hours": "2"}},
    "GET /charts/jobs/{job}/speed.svg": {},
    "GET /charts/jobs/{job}/workers.svg": {},
    "GET /charts/jobs/{job}/lanes.svg": {},
}
"""Every route that names something, with all else that a good request to it has."""

WITHOUT_ID: Final[dict[str, dict[str, Any]]] = {
    "GET /v1/jobs": {"params": {"limit": 1}},
    "POST /v1/jobs": {"json": {"texts": ["b"]}},
    "POST /v1/estimates": {"json": {"texts": ["b"]}},
    "POST /v1/job-actions": {"json": {"verb": "cancel"}},
    "POST /v1/feeds": {"json": {}},
    "GET /v1/batches": {},
    "POST /v1/batches": {"json": {"input_file_id": f"file-{NONE}", **BATCH}},
    "GET /v1/files": {},
    "POST /v1/files": {**FORM, "data": {"purpose": "batch"}},
    "GET /v1/workers": {},
    "GET /v1/advice": {"params": {"model": NULL, "kind": "cpu"}},
    "GET /v1/timeline": {},
    "GET /v1/logs": {},
    "GET /v1/logs/{process}": {"process": "one"},
    "GET /logs": {"params": {"process": "one"}},
    "GET /v1/scheduler/stats": {},
    "GET /v1/scheduler/explain": {"params": {"last": 9}},
    "GET /v1/scheduler/passes": {},
    "PUT /v1/scheduler/passes": {"json": {"active": ["size"]}},
    "GET /metrics": {},
    "GET /livez": {},
    "GET /readyz": {},
    "GET /health": {},
    "POST /v1/embeddings": {"json": {"model": NULL, "input": "b"}},
    "GET /v1/models": {},
    "GET /v1/models/{model:path}": {"model": NULL},
    "GET /info": {},
    "POST /": {"json": {"inputs": "b"}},
    "POST /embed": {"json": {"inputs": "b"}},
    "POST /lsh": {"json": {"inputs": "b"}},
    "POST /rerank": {"json": {"query": "b", "texts": ["b"]}},
    "POST /tokenize": {"json": {"inputs": "b"}},
    "GET /": {},
    "GET /jobs": {},
    "GET /steer": {"params": {"verb": "cancel", "every": "yes"}},
    "POST /steer": {"data": {"verb": "cancel"}},
    "GET /jobs/new": {},
    "POST /jobs/new": FORM,
    "POST /jobs/new/estimate": FORM,
    "GET /workers": {},
    "GET /scheduler": {},
    "GET /scheduler/passes": {"params": {"passes": "size"}},
    "POST /scheduler/passes": {"data": {"passes": "size"}},
    "GET /charts/farm.svg": {},
    "GET /charts/predictions.svg": {},
    "GET /login": {},
    "POST /login": {"data": {"key": "ef_none"}},
    "POST /logout": {},
    "POST /theme": {"data": {"theme": "dark"}},
}
"""Every other route, with a good request to it."""

OF_THE_PROGRAM: Final = {"GET /openapi.json", "HEAD /openapi.json", "GET /docs", "GET /static"}
"""What is the same for everybody, since it is made before anything is asked for."""

FARM_ONLY: Final = {
    "GET /v1/advice", "GET /v1/timeline", "GET /v1/logs", "GET /v1/logs/{process}", "GET /logs",
    "GET /v1/scheduler/stats", "GET /v1/scheduler/explain", "GET /v1/scheduler/passes",
    "PUT /v1/scheduler/passes", "GET /workers", "GET /scheduler", "GET /scheduler/passes",
    "POST /scheduler/passes", "GET /charts/predictions.svg",
}  # fmt: skip
"""Of these, those that tell of the whole farm, and so are an operator's."""


@dataclass
class World:
    """A farm that works for tenant "alpha" alone, and has two more keys.

    Attributes:
        web: Client of the application.
        client: Client of the server.
        alpha: Headers of the tenant.
        beta: Headers of another tenant.
        operator: Headers of the farm's operator.
        ids: Ids of what belongs to "alpha", by the name of the path's parameter.
    """

    web: TestClient
    client: redis.Redis
    alpha: dict[str, str]
    beta: dict[str, str]
    operator: dict[str, str]
    ids: dict[str, list[str]]

    @property
    def canaries(self) -> list[str]:
        """Words that another tenant must never read."""
        return [CANARY, "alpha", *(each for names in self.ids.values() for each in names)]

    def ask(self, route: str, key: dict[str, str], accept: str = "*/*", **request: Any) -> Response:  # noqa: ANN401 -- as httpx has them
        """Send a request to a route; parameters of its path are taken out of `request`."""
        verb, _, path = route.partition(" ")
        path = path.replace(":path", "")
        names = [name for name in request if f"{{{name}}}" in path]
        path = path.format(**{name: request.pop(name) for name in names})
        headers = key | {"accept": accept}
        return self.web.request(verb, path, headers=headers, follow_redirects=False, **request)


def routes(web: TestClient) -> set[str]:
    """All routes of an application, as verb and path."""
    found: set[str] = set()
    for each in web.app.routes:  # type: ignore[attr-defined] # of FastAPI
        router = getattr(each, "original_router", None)
        for route in [each] if router is None else router.routes:
            found |= {f"{verb} {route.path}" for verb in getattr(route, "methods", {"GET"})}
    return found


def work_for(client: redis.Redis, job: str) -> None:
    """Let a farm at work report all that it can about a job."""
    farm = FarmClient(client)
    beat = msgspec.structs.replace(
        heartbeat("one"), state="busy", job=job, model=f"{CANARY}|auto|0|", refused=[job]
    )
    assert farm.beat(beat, 600)
    fence = farm.plans.elect("scheduler", 600)
    share = JobShare(job=job, tokens=10, blocks=1)
    assert farm.plans.publish([Plan(worker="one", fence=fence, shares=[share])], fence, 600)
    notes = [("size", f"{job} first")]
    stats = msgspec.structs.replace(STATS, late={job: 9.0}, dropped={"size": job})
    farm.plans.tell(msgspec.structs.replace(DECISION, notes=notes), stats)
    farm.statistics.report(msgspec.structs.replace(COMPLETION, job=job, model=CANARY), 100)
    farm.statistics.sample(msgspec.structs.replace(SAMPLE, jobs={job: (43_210, 43_210)}))
    farm.reports.refuse(job, "one", CANARY)


@pytest.fixture
def world(
    server: LiveServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A farm on which a tenant has something of everything."""
    monkeypatch.setattr(page_events, "STREAM_SECONDS", 0.01)
    monkeypatch.setattr(page_events, "REFRESH_SECONDS", 0.01)
    made = [
        make_key("of-a", ["submit", "read"], "alpha"),
        make_key("of-b", ["submit", "read"], "beta"),
        make_key("op", ["admin"]),
    ]
    alpha, beta, operator = (bearer(secret) for secret, _ in made)
    settings = {"http_requests_per_second": 0, "lane_seconds_max": 0.05, "models": (NULL,)}
    keys = [key for _, key in made]
    with client_of(server, keys, jobs_directory=tmp_path / "jobs", **settings) as web:
        asked = web.post(
            "/v1/jobs", headers=alpha, json={"texts": [CANARY], "name": CANARY, "priority": 1}
        )
        feed = web.post("/v1/feeds", headers=alpha, json={"name": CANARY}).json()["job"]
        texts = {"start": 0, "texts": [CANARY, CANARY]}
        web.post(f"/v1/jobs/{feed}/texts", headers=alpha, json=texts)
        form = {"file": (f"{CANARY}.jsonl", line(CANARY, input=CANARY).encode())}
        file = web.post("/v1/files", headers=alpha, files=form, data={"purpose": "batch"})
        wanted = {"input_file_id": file.json()["id"], **BATCH, "metadata": {"note": CANARY}}
        batch = web.post("/v1/batches", headers=alpha, json=wanted).json()["id"]
        # One that came by another door, on behalf of the tenant, and has ended.
        ended = Job(client, "ended-by-command")
        ended.create(JobSpec(model=NULL, name=CANARY), 0, Terms(tenant="alpha"), {"out": CANARY})
        FarmClient(client).job(ended.id).end("failed", CANARY, 600)
        job = asked.json()["job"]
        work_for(client, job)
        ids = {
            "job": [job, feed, batch, ended.id],
            "batch": [batch],
            "file": [file.json()["id"]],
        }
        yield World(web, client, alpha, beta, operator, ids)


def test_the_walk_has_every_route(web: TestClient) -> None:
    """Every route of the application is in the lists above, with a good request to it."""
    assert routes(web) == {*BY_ID, *WITHOUT_ID, *OF_THE_PROGRAM}


def facts_of(answer: Response) -> dict[str, str]:
    """The headers of an answer but for its length, which depends on an id in it, and its own id."""
    own = {"content-length", "x-request-id"}
    return {name: value for name, value in answer.headers.items() if name not in own}


def none_like(name: str) -> str:
    """An id of the same form as another one, which nothing has."""
    kind = name.partition("-")[0] if name.startswith("file-") else name.partition("_")[0]
    return {"file": f"file-{NONE}", "batch": f"batch_{NONE}"}.get(kind, NONE)


def test_what_is_anothers_does_not_exist(world: World) -> None:
    """Each route answers for another tenant's id as for one that nothing has."""
    before = snapshot(world.client)
    for (route, rest), accept in product(BY_ID.items(), ACCEPTS):
        kind = next(name for name in world.ids if f"{{{name}}}" in route)
        for name in world.ids[kind]:
            none = none_like(name)
            hidden, absent = (
                world.ask(route, world.beta, accept, **rest, **{kind: each})
                for each in (name, none)
            )
            assert hidden.status_code == 404, (route, accept, hidden.text)
            assert hidden.text.replace(name, "ID") == absent.text.replace(none, "ID")
            assert facts_of(hidden) == facts_of(absent)
    assert snapshot(world.client) == before


def test_nothing_tells_of_another(world: World) -> None:
    """Lists, pages, events, charts, figures and refusals have no word of another tenant."""
    for (route, request), accept in product(WITHOUT_ID.items(), ACCEPTS):
        answer = world.ask(route, world.beta, accept, **request)
        told = answer.text + str(answer.headers)
        assert [each for each in world.canaries if each in told] == [], (route, accept)
        assert (answer.status_code == 403) is (route in FARM_ONLY), (route, answer.text)
        assert answer.status_code not in {405, 500}, (route, answer.text)


def test_the_owner_and_the_operator_see_it(world: World) -> None:
    """The owner and the operator see what is hidden from other tenants."""
    for route, words in (
        ("GET /v1/jobs", CANARY),
        ("GET /metrics", "farm_jobs{"),
        ("GET /", CANARY),
        ("GET /v1/files", CANARY),
        ("GET /v1/batches", CANARY),
    ):
        for key in (world.alpha, world.operator):
            assert words in world.ask(route, key).text, route


def test_a_tenant_uses_what_is_its_own(world: World) -> None:
    """A tenant's key steers, reads and deletes all that it has made."""
    ask, key = world.ask, world.alpha
    job, feed, batch, _ = world.ids["job"]
    (file,) = world.ids["file"]
    for verb in ("pause", "resume"):
        assert ask(f"POST /v1/jobs/{{job}}/{verb}", key, job=job).json()["tenant"] == "alpha"
    assert ask("GET /v1/jobs/{job}/results", key, job=feed).status_code == 204
    for route in ("GET /jobs/{job}", "GET /charts/jobs/{job}/lanes.svg", "GET /jobs/{job}/{verb}"):
        assert ask(route, key, job=job, **({"verb": "pause"} if "verb" in route else {})).is_success
    assert ask("GET /v1/files/{file}/content", key, file=file).text == line(CANARY, input=CANARY)
    assert ask("POST /v1/batches/{batch}/cancel", key, batch=batch).json()["status"] == "cancelled"
    assert ask("DELETE /v1/files/{file}", key, file=file).is_success
    listed = {each["job"] for each in ask("GET /v1/jobs", key).json()["jobs"]}
    assert listed == {*world.ids["job"]}
    assert ask("GET /v1/batches", key).json()["data"][0]["id"] == batch
    assert ask("POST /v1/jobs/{job}/cancel", key, job=job).is_success
    assert ask("DELETE /v1/jobs/{job}", key, job=job).status_code == 204


def test_a_tenant_makes_jobs_of_its_own_only(world: World) -> None:
    """Jobs, feeds and changes of terms for another tenant are refused, and nothing is made."""
    (mine,) = (world.ask("POST /v1/feeds", world.beta, json={}).json()["job"],)
    before = snapshot(world.client)
    for route, request in (
        ("POST /v1/jobs", {"json": {"texts": ["b"], "tenant": "alpha"}}),
        ("POST /v1/jobs", {**FORM, "data": {"tenant": "alpha"}}),
        ("POST /jobs/new", {**FORM, "data": {"tenant": "alpha"}}),
        ("POST /v1/feeds", {"json": {"tenant": "alpha"}}),
        ("PATCH /v1/jobs/{job}", {"json": {"tenant": "alpha"}, "job": mine}),
    ):
        refused = world.ask(route, world.beta, **request)
        assert refused.status_code == 403, route
        assert "jobs of tenant beta only" in refused.text
    assert snapshot(world.client) == before
    changed = world.ask("PATCH /v1/jobs/{job}", world.beta, job=mine, json={"tenant": ""})
    assert changed.json()["tenant"] == "beta"
    given = world.ask("PATCH /v1/jobs/{job}", world.operator, job=mine, json={"tenant": "alpha"})
    assert given.json()["tenant"] == "alpha"
    assert world.ask("GET /v1/jobs/{job}", world.beta, job=mine).status_code == 404


def test_a_batch_reads_no_file_of_another(world: World) -> None:
    """A batch of another tenant's file gets the same 404 as one of a file that is not there."""
    (file,) = world.ids["file"]
    answers = [
        world.ask("POST /v1/batches", world.beta, json={"input_file_id": each, **BATCH})
        for each in (file, f"file-{NONE}")
    ]
    assert [each.status_code for each in answers] == [404, 404]
    assert answers[0].text.replace(file, "ID") == answers[1].text.replace(f"file-{NONE}", "ID")


def test_what_came_of_a_batch_is_its_owners(world: World, tmp_path: Path) -> None:
    """The files that answer a batch are there for its tenant, and for nobody else."""
    (batch,) = world.ids["batch"]
    settings = Settings().model_copy(update={"jobs_directory": tmp_path / "jobs"})
    out = tmp_path / "jobs" / batch / OUTPUT
    out.mkdir()
    (out / "output.jsonl").write_text(CANARY)
    complete_batch(settings, batch, {"total": 1, "completed": 1, "failed": 0, "tokens": 1})
    file = world.ask("GET /v1/batches/{batch}", world.alpha, batch=batch).json()["output_file_id"]
    route = "GET /v1/files/{file}/content"
    assert world.ask(route, world.alpha, file=file).text == CANARY
    assert world.ask(route, world.beta, file=file).status_code == 404


def test_pages_of_a_list_name_no_job_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `next` of a page never holds the id of another tenant's job."""
    monkeypatch.setattr(overview, "STEP", 1)
    monkeypatch.setattr(overview, "LOOKED_MAX", 1)
    own = [world.ask("POST /v1/feeds", world.beta, json={}).json()["job"] for _ in range(3)]
    for number in range(3):
        world.client.zadd(wire.JOBS, {own[number]: number})
    world.client.zadd(wire.JOBS, {world.ids["job"][0]: 0.5, world.ids["job"][1]: 1.5})
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = world.ask("GET /v1/jobs", world.beta, params={"limit": 1, "after": after}).json()
        found += [each["job"] for each in page["jobs"]]
        after = page["next"]
        assert not [each for each in world.canaries if each in str(after)]
    assert found == own
    last = {"limit": 1, "after": f"{1.0}:{own[1]}"}
    page = world.ask("GET /v1/jobs", world.beta, params=last).json()
    assert ([each["job"] for each in page["jobs"]], page["next"]) == ([own[2]], None)
    world.ask("POST /v1/feeds", world.alpha, json={})
    assert world.ask("GET /v1/jobs", world.beta, params=last).json() == page
    for tenant in ("alpha", "nobody"):
        answer = world.ask("GET /v1/jobs", world.beta, params={"tenant": tenant}).json()
        assert answer == {"jobs": [], "next": None}


def test_a_name_that_was_anothers(world: World) -> None:
    """What happened to a job of the same name of another tenant is not told."""
    for tenant in ("alpha", "beta"):
        Job(world.client, "nightly", actor=tenant).create(
            JobSpec(model=NULL), 0, Terms(tenant=tenant), {"out": f"/{tenant}"}
        )
        if tenant == "alpha":
            FarmClient(world.client).end("nightly", "failed", CANARY, Settings())
    told = world.ask("GET /v1/jobs/{job}/timeline", world.beta, job="nightly").json()
    assert [(each["kind"], each["by"]) for each in told] == [("submitted", "beta")]
    assert len(world.ask("GET /v1/jobs/{job}/timeline", world.operator, job="nightly").json()) == 3


def test_answers_of_another_are_not_repeated(world: World) -> None:
    """An `Idempotency-Key` is its API key's, though another tenant's may have the same name."""
    once = {"idempotency-key": "one"}
    jobs = [
        world.web.post("/v1/jobs", headers=key | once, json={"texts": ["b"]}).json()["job"]
        for key in (world.alpha, world.beta, world.alpha)
    ]
    assert jobs[0] == jobs[2] != jobs[1]
    first, second = (make_key("same", ["read"], tenant)[1] for tenant in ("a", "b"))
    assert first.owner != second.owner


def test_counts_are_of_own_jobs(world: World) -> None:
    """A tenant's overview and figures count its own jobs only."""
    text = world.ask("GET /", world.beta).text
    assert "Nothing to do" in text
    rate = '<td class="n">4,321</td>'  # of the sample, in which the other tenant alone has a job
    assert rate not in text
    assert rate in world.ask("GET /", world.alpha).text
    assert rate in world.ask("GET /", world.operator).text
    metrics = world.ask("GET /metrics", world.beta).text
    assert "embedfarm_jobs{" not in metrics
    assert "embedfarm_backlog_chunks 0.0" in metrics
    (beat,) = world.ask("GET /v1/workers", world.beta).json()
    assert (beat["worker"], beat["job"], beat["model"], beat["refused"]) == ("one", "", "", [])
    (seen,) = world.ask("GET /v1/workers", world.alpha).json()
    assert seen["job"] == world.ids["job"][0]


def test_no_upload_is_the_source_of_another(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """An upload is no source for others, though it lies below a root of sources."""
    del client
    (mine, key), (yours, other) = (make_key(each, ["submit"], each) for each in ("a", "b"))
    settings = {"jobs_directory": tmp_path / "jobs", "ingest_roots": [tmp_path], "models": (NULL,)}
    with client_of(server, [key, other], **settings) as web:
        job = web.post("/v1/jobs", headers=bearer(mine), json={"texts": ["a"]}).json()["job"]
        directory = tmp_path / "jobs" / job
        assert (directory / "input.jsonl").exists()
        for source in (directory / "input.jsonl", directory, tmp_path, tmp_path / "jobs" / "none"):
            asked = {"source": str(source)}
            refused = web.post("/v1/jobs", headers=bearer(yours), json=asked)
            assert refused.status_code == 403, source
            expected = f"{str(source)!r} has, or is, the inputs and outputs of jobs by HTTP"
            assert refused.json()["detail"] == expected


def test_no_output_is_reused_by_another(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Vectors of another tenant's job are refused as those of no job are."""
    del client
    (mine, key), (yours, other) = (make_key(each, ["submit"], each) for each in ("a", "b"))
    settings = {"jobs_directory": tmp_path / "jobs", "models": (NULL,)}
    with client_of(server, [key, other], **settings) as web:
        job = web.post("/v1/jobs", headers=bearer(mine), json={"texts": ["a"]}).json()["job"]
        asked = {"texts": ["a"], "reuse": job}
        own = web.post("/v1/jobs", headers=bearer(mine), json=asked)
        assert own.status_code == 409, "it is not finished"
        refused = web.post("/v1/jobs", headers=bearer(yours), json=asked)
        missing = web.post("/v1/jobs", headers=bearer(yours), json=asked | {"reuse": "0" * 32})
        assert (refused.status_code, missing.status_code) == (404, 404)
        assert refused.json()["detail"] == missing.json()["detail"].replace("0" * 32, job)
        forms = [
            web.get(f"/jobs/new?reuse={name}", headers=bearer(yours)) for name in (job, "0" * 32)
        ]
        assert [each.status_code for each in forms] == [200, 200]
        pages = [each.text.replace(job, "").replace("0" * 32, "") for each in forms]
        assert pages[0] == pages[1], "the form does not tell of its model"


def test_the_farms_window_is_no_sight_of_others(world: World) -> None:
    """A tenant reads that producers wait, and of its own jobs, but not what others hold."""
    mib = 1 << 20
    world.client.delete(wire.WINDOW)
    for name, size in (("max", 512), ("used", 901), ("results", 900), ("share:alpha", 512)):
        world.client.hset(wire.WINDOW, name, size * mib)
    world.client.hset(wire.JobKeys(world.ids["job"][0]).meta, "result_bytes", 3 * mib)
    words = "producers wait: jobs fill the farm's window"
    told, own, all_of_it = (
        unescape(world.ask("GET /", key).text) for key in (world.beta, world.alpha, world.operator)
    )
    assert words in told
    assert [each for each in (*world.canaries, "901", "results") if each in told] == []
    results = f"results that nobody has collected are of job {CANARY}, 3.0 MiB"
    assert f"{words}; most of the tenant's {results}" in own
    assert f"{words}, 901 of 512 MiB; most {results}" in all_of_it
    assert world.ask("GET /readyz", world.beta).text == world.ask("GET /readyz", {}).text
