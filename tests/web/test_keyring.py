"""Tests of keys that are given and taken away while the farm is served."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.farm_client import FarmClient
from embedfarm.web import gate
from embedfarm.web.auth.keys import Key, KeysError, make_key, read_keys
from embedfarm.web.operations.routes import OLD_KEYS
from tests.contract.little_job import make_job
from tests.farm.harness import run
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.test_gate import bearer, served

ROUTE = "/v1/workers"
HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
)
END = b"\r\n--b--\r\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file of keys be looked at with every request."""
    monkeypatch.setattr(gate, "LOOK_SECONDS", 0.0)


def write(path: Path, *keys: Key) -> None:
    """Write a file of keys, put into its place at once."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{key.line()}\n" for key in keys))
    partial.replace(path)


def status(web: TestClient, secret: str) -> int:
    """The status that a key gets."""
    return web.get(ROUTE, headers=bearer(secret)).status_code


def test_keys_follow_their_file(server: LiveServer, tmp_path: Path) -> None:
    """A key that leaves the file gets nothing more, and a new one gets in; so do sessions."""
    (old_secret, old), (new_secret, new) = make_key("old", ["read"]), make_key("new", ["read"])
    path = tmp_path / "keys"
    write(path, old)
    with client_of(server, [old], keys_file=path) as web:
        assert (status(web, old_secret), status(web, new_secret)) == (200, 401)
        signed_in = web.post("/login", data={"key": old_secret}, follow_redirects=False)
        assert signed_in.status_code == 303
        assert web.get(ROUTE).status_code == 200
        write(path, new)
        assert (status(web, old_secret), status(web, new_secret)) == (401, 200)
        assert web.get(ROUTE).status_code == 401  # by the cookie


def test_a_file_that_cannot_be_read_changes_nothing(server: LiveServer, tmp_path: Path) -> None:
    """Keys stay valid while their file cannot be read, and `/readyz` says so."""
    secret, key = make_key("ann", ["read"])
    path = tmp_path / "keys"
    write(path, key)
    with client_of(server, [key], keys_file=path) as web:
        assert status(web, secret) == 200
        for damage in (lambda: path.write_text("torn line"), path.unlink):
            damage()
            assert status(web, secret) == 200
            assert OLD_KEYS in web.get("/readyz").json()["reasons"]
        write(path, key)
        assert OLD_KEYS not in web.get("/readyz").json()["reasons"]


def test_a_file_without_keys_admits_nobody(server: LiveServer, tmp_path: Path) -> None:
    """The removal of the last key does not open the farm to everybody."""
    secret, key = make_key("ann", ["admin"])
    path = tmp_path / "keys"
    write(path, key)
    with client_of(server, [key], keys_file=path) as web:
        assert status(web, secret) == 200
        write(path)
        assert status(web, secret) == 401
        assert web.get(ROUTE).status_code == 401


def test_a_stream_ends_with_its_key(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Events that somebody follows break off when the key is taken away."""
    secret, key = make_key("ann", ["read"])
    path = tmp_path / "keys"
    write(path, key)
    job = make_job(client, 1)
    with (
        served(server, keys_file=path) as ((host, port), process),
        httpx.Client(base_url=f"http://{host}:{port}", headers=bearer(secret)) as asking,
        asking.stream("GET", f"/v1/jobs/{job.id}/events", timeout=30) as events,
    ):
        lines = events.iter_lines()
        assert next(lines).startswith("event: job")
        write(path)
        wait_until(lambda: asking.get(ROUTE).status_code == 401)
        job.pause()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        assert process.poll() is None
    assert FarmClient(client).job_ids() == [job.id]


@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/files"])
def test_an_upload_ends_with_its_key(
    server: LiveServer, client: redis.Redis, tmp_path: Path, route: str
) -> None:
    """Nothing is made of an upload whose key is taken away before all of it has come."""
    secret, key = make_key("ann", ["submit", "read"])
    path = tmp_path / "keys"
    write(path, key)
    head, end = (b"", b"") if route == "/v1/jobs" else (HEAD, END)
    kind = "application/jsonl" if route == "/v1/jobs" else "multipart/form-data; boundary=b"
    with (
        served(server, keys_file=path, jobs_directory=tmp_path / "jobs") as ((host, port), _),
        httpx.Client(base_url=f"http://{host}:{port}", headers=bearer(secret)) as asking,
    ):

        def received() -> list[Path]:
            return [each for each in (tmp_path / "jobs").rglob("*") if each.is_file()]

        def body() -> Iterator[bytes]:
            yield head + b'{"text": "a"}\n'
            wait_until(received)
            write(path)
            wait_until(lambda: asking.get(ROUTE).status_code == 401)
            yield b'{"text": "b"}\n' + end

        url, headers = f"{asking.base_url}{route}", bearer(secret) | {"content-type": kind}
        answer = httpx.post(url, content=body(), headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert FarmClient(client).job_ids() == []
    assert not received()


def test_a_key_of_a_tenant(tmp_path: Path) -> None:
    """`keys new --tenant` makes a line with the tenant; lines without one are still read."""
    lines = [
        run("keys", "new", "ann", "--tenant", "search").stdout.splitlines()[1],
        run("keys", "new", "op", "--scopes", "admin").stdout.splitlines()[1],
    ]
    path = tmp_path / "keys"
    path.write_text(os.linesep.join(line.partition(":")[2].strip() for line in lines))
    assert {key.name: key.tenant for key in read_keys(path)} == {"ann": "search", "op": None}
    for wrong in (["--tenant", "a b"], ["--tenant", "a", "--scopes", "admin"]):
        assert run("keys", "new", "ann", *wrong).returncode == 2
    with pytest.raises(KeysError, match="admin is for the whole farm"):
        make_key("ann", ["admin"], "search")
