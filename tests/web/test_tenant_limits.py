"""Tests of a tenant's limits: jobs, priority, room on the disk, and requests."""

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from fastapi.testclient import TestClient
from pydantic import ValidationError

from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.contract.settings.door_limits import TenantLimits
from embedfarm.ingest.tenant_storage import stored_bytes
from embedfarm.web.auth.keys import make_key
from embedfarm.web.auth.rates import TenantTurns, TooMuchError
from tests.support import LiveServer
from tests.web.conftest import client_of
from tests.web.test_batches import line
from tests.web.test_gate import bearer

NULL: Final = "null:16"


@contextlib.contextmanager
def limited(
    server: LiveServer, directory: Path, **limits: int
) -> Iterator[tuple[TestClient, dict[str, str], dict[str, str]]]:
    """An application, with headers of a tenant that has limits and of one that has none."""
    (mine, key), (yours, other) = (
        make_key(name, ["submit", "read"], name) for name in ("alpha", "beta")
    )
    settings: dict[str, Any] = {
        "tenant_limits": {"alpha": TenantLimits.model_validate(limits)},
        "jobs_directory": directory,
        "models": (NULL,),
        "http_requests_per_second": 0,
    }
    with client_of(server, [key, other], **settings) as web:
        yield web, bearer(mine), bearer(yours)


def submit(web: TestClient, key: dict[str, str], **asked: Any) -> Any:  # noqa: ANN401 -- as JSON has it
    """Submit a small job, and return the answer."""
    return web.post("/v1/jobs", headers=key, json={"texts": ["a"], **asked})


def test_jobs_of_a_tenant_are_limited(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A job beyond a tenant's limit is refused by the limit's name; others have their own."""
    with limited(server, tmp_path, jobs=3) as (web, alpha, beta):
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda _: submit(web, alpha), range(8))]
        assert sorted(each.status_code for each in answers) == [201] * 3 + [429] * 5
        refused = next(each for each in answers if each.status_code == 429)
        assert "tenant alpha may have 3 unfinished jobs" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        assert web.post("/v1/feeds", headers=alpha, json={}).status_code == 429
        assert submit(web, beta).status_code == 201
        made = [each.json()["job"] for each in answers if each.is_success]
        web.post(f"/v1/jobs/{made[0]}/cancel", headers=alpha)
        FarmClient(client).end(made[1], "finished", "", Settings())
        FarmClient(client).job(made[2]).delete()
        client.zincrby(wire.tenant_key("alpha"), -100, made[2])  # a young place is being filled
        assert [submit(web, alpha).status_code for _ in range(4)] == [201, 201, 201, 429]


def test_a_failed_job_needs_a_place_again(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A retry of a failed job counts as one more unfinished job of the tenant."""
    with limited(server, tmp_path, jobs=1) as (web, alpha, _):
        job = submit(web, alpha).json()["job"]
        client.delete(f"rq:job:http-{job}")
        FarmClient(client).end(job, "failed", "no memory", Settings())
        other = submit(web, alpha).json()["job"]
        assert web.post(f"/v1/jobs/{job}/retry", headers=alpha).status_code == 429
        web.post(f"/v1/jobs/{other}/cancel", headers=alpha)
        assert web.post(f"/v1/jobs/{job}/retry", headers=alpha).status_code == 202


def test_a_full_farm_does_not_say_how_full(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A tenant is told that there is no room, and not how many jobs others have; these stay."""
    (mine, key), (yours, other) = (make_key(each, ["submit"], each) for each in ("a", "b"))
    limits = {"jobs_max": 1, "jobs_directory": tmp_path, "models": (NULL,)}
    with client_of(server, [key, other], **limits) as web:
        job = submit(web, bearer(mine)).json()["job"]
        client.zadd(wire.JOBS, {job: 1})  # a place that would be empty, if it had no job
        refused = submit(web, bearer(yours))
        assert refused.status_code == 429
        assert FarmClient(client).job_ids() == [job]
        assert refused.json()["detail"].startswith("the farm is full, try again in")


def test_urgency_is_limited(server: LiveServer, tmp_path: Path) -> None:
    """A higher priority is refused at the making of a job, of a feed, and later."""
    with limited(server, tmp_path, priority=1) as (web, alpha, beta):
        job = submit(web, alpha, priority=1).json()
        assert job["priority"] == 1
        for answer in (
            submit(web, alpha, priority=2),
            web.post("/v1/feeds", headers=alpha, json={"priority": 2}),
            web.patch(f"/v1/jobs/{job['job']}", headers=alpha, json={"priority": 2}),
        ):
            assert answer.status_code == 403
            assert "priority: tenant alpha may have high at most" in answer.json()["detail"]
        assert submit(web, beta, priority=2).status_code == 201
        page = web.get("/jobs/new", headers=alpha).text
        assert "high" in page
        assert "urgent" not in page


def test_bytes_on_the_disk_are_limited(server: LiveServer, tmp_path: Path) -> None:
    """Jobs, files and batches are refused once there is no room, and taken when there is again."""
    body = line("one", input="a" * 1000).encode()
    with limited(server, tmp_path, bytes=2500) as (web, alpha, beta):

        def upload(key: dict[str, str]) -> Any:  # noqa: ANN401 -- as JSON has it
            form = {"file": ("a.jsonl", body)}
            return web.post("/v1/files", headers=key, files=form, data={"purpose": "batch"})

        file = upload(alpha).json()["id"]
        assert upload(alpha).status_code == 403  # with what is known of the first one
        assert upload(beta).is_success
        settings = Settings().model_copy(update={"jobs_directory": tmp_path})
        assert len(body) < stored_bytes(settings, "alpha") < 2500
        chunked = web.post(
            "/v1/jobs",
            headers={**alpha, "content-type": "application/jsonl"},
            content=iter([b'{"text": "a"}\n'] * 100),
        )
        assert chunked.status_code == 403
        assert "bytes: tenant alpha may have 2,500 on the disk" in chunked.json()["detail"]
        assert not list((tmp_path / "uploads").iterdir())
        assert web.delete(f"/v1/files/{file}", headers=alpha).is_success
        assert stored_bytes(settings, "alpha") == 0
        job = submit(web, alpha).json()["job"]
        assert stored_bytes(settings, "alpha") > 0
        assert web.post(f"/v1/jobs/{job}/cancel", headers=alpha).is_success
        assert web.delete(f"/v1/jobs/{job}", headers=alpha).status_code == 204
        assert stored_bytes(settings, "alpha") == 0


def test_a_batch_needs_room(server: LiveServer, tmp_path: Path) -> None:
    """A batch is refused when its tenant has no room on the disk."""
    with limited(server, tmp_path, bytes=700) as (web, alpha, _):
        form = {"file": ("a.jsonl", line("one", input="a" * 10).encode())}
        made = web.post("/v1/files", headers=alpha, files=form, data={"purpose": "batch"})
        asked = {"input_file_id": made.json()["id"], "endpoint": "/v1/embeddings"}
        asked["completion_window"] = "24h"
        statuses = [
            web.post("/v1/batches", headers=alpha, json=asked).status_code for _ in range(4)
        ]
        assert statuses[0] == 200
        assert statuses[-1] == 403


def test_requests_of_a_tenant_are_limited(server: LiveServer, tmp_path: Path) -> None:
    """The keys of a tenant share its rate, and 429 names the limit; other tenants are served."""
    with limited(server, tmp_path, requests_per_second=2) as (web, alpha, beta):
        answers = [web.get("/v1/jobs", headers=alpha) for _ in range(20)]
        refused = [each for each in answers if each.status_code == 429]
        assert "requests_per_second: tenant alpha may have 2" in refused[0].json()["detail"]
        assert int(refused[0].headers["retry-after"]) == 1
        assert web.get("/v1/jobs", headers=beta).is_success


def test_requests_in_work_are_limited() -> None:
    """A request beyond those in work is refused until one ends; operators have no limit."""
    settings = Settings().model_copy(update={"tenant_limits": {"a": TenantLimits(requests=1)}})
    turns = TenantTurns(settings)
    now = time.monotonic()
    with turns.turn("a", now), turns.turn("b", now), turns.turn(None, now), turns.turn(None, now):
        with pytest.raises(TooMuchError, match="requests: tenant a may have 1 in work"):
            turns.turn("a", now).__enter__()
        assert turns.running["a"] == 1
    with turns.turn("a", now):
        pass
    assert turns.running["a"] == 0


def test_every_tenant_has_the_usual_limits() -> None:
    """`*` is for each tenant, and a tenant's own limits come before it, one by one."""
    limits = {
        "*": TenantLimits(jobs=5, priority=1),
        "search": TenantLimits(jobs=9, requests_per_second=math.pi),
    }
    settings = Settings().model_copy(update={"tenant_limits": limits})
    assert settings.limits_of("other") == TenantLimits(jobs=5, priority=1)
    own = TenantLimits(jobs=9, priority=1, requests_per_second=math.pi)
    assert settings.limits_of("search") == own
    with pytest.raises(ValidationError):
        TenantLimits.model_validate({"job": 1})
