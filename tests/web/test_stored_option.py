"""Tests of jobs by HTTP whose vectors are stored past the server."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import null_vectors, role
from tests.farm.listed_output import listed_files
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of

TEXTS = [f"text {number}" for number in range(40)]


@pytest.fixture
def web(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[TestClient]:
    """An application that lets jobs store vectors below one directory."""
    del client
    roots, jobs = (str(tmp_path / "vectors"),), tmp_path / "jobs"
    (tmp_path / "vectors").mkdir()
    with client_of(server, stored_roots=roots, jobs_directory=jobs, models=("null:16",)) as web:
        yield web


def test_a_job_stores_its_vectors(server: LiveServer, web: TestClient, tmp_path: Path) -> None:
    """What HTTP was asked for is done with receipts, and nothing is left in the place."""
    place = tmp_path / "vectors"
    kept = {"stored_roots": json.dumps([str(place)]), "jobs_directory": str(tmp_path / "jobs")}
    made = web.post("/v1/jobs", json={"texts": TEXTS, "stored": str(place)})
    assert made.status_code == 201, made.text
    job = made.json()["job"]
    with (
        role(server, tmp_path, "ingest", **kept),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1", **kept),
    ):
        wait_until(lambda: web.get(f"/v1/jobs/{job}").json()["state"] in {"finished", "failed"}, 90)
    facts = web.get(f"/v1/jobs/{job}").json()
    assert facts["state"] == "finished", facts
    with FarmClient(redis.Redis.from_url(server.url)).client as client:
        assert FarmClient(client).job(job).noted("receipt_bytes")
    rows = map(json.loads, web.get(f"/v1/jobs/{job}/results").text.splitlines())
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert np.array_equal(vectors, null_vectors(TEXTS, 16))
    assert list(place.iterdir()) == []


def test_a_deleted_job_leaves_no_vectors(
    server: LiveServer, web: TestClient, tmp_path: Path
) -> None:
    """Results are read from where they are stored, and go with the job that lists them."""
    place = tmp_path / "vectors"
    kept = {"stored_roots": json.dumps([str(place)]), "jobs_directory": str(tmp_path / "jobs")}
    asked = {"texts": TEXTS, "stored": str(place), "format": "stored"}
    job = web.post("/v1/jobs", json=asked).json()["job"]
    with (
        role(server, tmp_path, "ingest", **kept),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1", **kept),
    ):
        wait_until(lambda: web.get(f"/v1/jobs/{job}").json()["state"] in {"finished", "failed"}, 90)
    out = tmp_path / "jobs" / job / "output"
    assert listed_files(out) == {str(path) for path in place.glob("*/*")}
    rows = map(json.loads, web.get(f"/v1/jobs/{job}/results").text.splitlines())
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert np.array_equal(vectors, null_vectors(TEXTS, 16))
    assert web.delete(f"/v1/jobs/{job}").status_code == 204
    assert list(place.iterdir()) == []
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["uploads"]


def test_a_list_of_nothing_is_refused(web: TestClient) -> None:
    """A job that would list what is stored nowhere is refused, and the form does not offer it."""
    made = web.post("/v1/jobs", json={"texts": ["a"], "format": "stored"})
    assert (made.status_code, "--stored" in made.text) == (422, True)
    assert 'value="stored"' in web.get("/jobs/new").text


@pytest.mark.parametrize("place", ["/elsewhere", "s3://bucket", "{}/../jobs"])
def test_places_of_others_are_refused(web: TestClient, tmp_path: Path, place: str) -> None:
    """A place that the operator did not allow is refused before anything is made."""
    place = place.format(tmp_path / "vectors")
    made = web.post("/v1/jobs", json={"texts": ["a"], "stored": place})
    assert (made.status_code, made.json()["detail"][:7]) == (422, "stored:")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["uploads"]
