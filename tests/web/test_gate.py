"""Tests of the gate: who gets in, how often, and with how much."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract import wire
from embedfarm.contract.lane import Lane
from embedfarm.web.auth.keys import Key, KeysError, Scope, find_key, make_key, read_keys
from embedfarm.web.auth.rates import Buckets
from tests.farm.command_server import Copy
from tests.farm.harness import run
from tests.full_disk import PAGE_BYTES, small_disk
from tests.ingest.rq_farm import START_SECONDS
from tests.support import LiveServer, Reachable, free_port, wait_until
from tests.web.conftest import client_of

if TYPE_CHECKING:
    from fastapi import FastAPI

SECONDS = 30.0


@contextlib.contextmanager
def served(server: Reachable, **settings: object) -> Iterator[tuple[tuple[str, int], Copy]]:
    """Run `embedfarm serve` with some settings; yield its address and the process."""
    environment = {f"EMBEDFARM_{name.upper()}": str(value) for name, value in settings.items()}
    words = ["serve", "--port", "0", "--redis", server.url]
    with (
        tempfile.NamedTemporaryFile() as said,
        Copy(words, os.environ | environment, said) as process,
    ):
        path = Path(said.name)
        try:
            wait_until(lambda: path.read_bytes() or process.poll() is not None)
            found = re.search(r"http://(.*):(\d+) ", path.read_text(encoding="utf-8"))
            assert found
            yield (found[1], int(found[2])), process
        finally:
            end(process)


def end(process: Copy) -> None:
    """End a role as its supervisor does: one that is killed leaves no record of what it ran."""
    process.terminate()
    try:
        process.wait(SECONDS)
    finally:
        process.kill()


def say(address: tuple[str, int], *parts: bytes) -> bytes:
    """Send bytes, and return what the server answers until it closes the connection."""
    with socket.create_connection(address, timeout=SECONDS) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65_536):
                answer += data
        return answer


def head(*lines: str) -> bytes:
    """The head of a request to a route that takes a body."""
    return "\r\n".join(["POST /embed HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


def bearer(secret: str) -> dict[str, str]:
    """Headers with a key."""
    return {"Authorization": f"Bearer {secret}"}


def test_scopes(server: LiveServer, keys: dict[str, tuple[str, Key]]) -> None:
    """A request without a right key gets 401, and a key allows what its scopes say, admin all."""
    routes = {
        "read": ("GET", "/v1/workers", 200),
        "submit": ("POST", "/v1/jobs/none/pause", 404),
        "admin": ("PUT", "/v1/scheduler/passes", 422),
    }
    with client_of(server, [key for _, key in keys.values()]) as web:
        for scope, (verb, path, allowed) in routes.items():
            for wrong in ({}, bearer("ef_wrong"), {"Authorization": "Basic abc"}):
                answer = web.request(verb, path, headers=wrong)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
            for name, (secret, _) in keys.items():
                status = web.request(verb, path, headers=bearer(secret)).status_code
                assert status == (allowed if name in {scope, "admin"} else 403), (scope, name)
        assert web.get("/livez").status_code == 200
        assert web.get("/readyz").status_code == 503
        assert "error" in web.get("/v1/models").json()


def test_only_digests_are_kept(tmp_path: Path) -> None:
    """`keys new` shows a secret once; its line finds it again, and does not have it."""
    done = run("keys", "new", "ann", "--scopes", "submit,read")
    secret, line = re.findall(r"^(?:key|line):\s+(.*)$", done.stdout, re.MULTILINE)
    assert secret not in line
    file = tmp_path / "keys"
    file.write_text(f"# who\n\n{line}\n")
    (key,) = read_keys(file)
    assert find_key([key], secret) == key
    assert find_key([key], secret + "x") is None
    assert (key.name, {*key.scopes}) == ("ann", {Scope.SUBMIT, Scope.READ})
    assert run("keys", "new", "ann", "--scopes", "root").returncode == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ann read", "not of the form"),
        ("ann all " + "0" * 64, "scopes are submit, read, admin"),
        ("ann read 0", "64 digits"),
        ("a/b read " + "0" * 64, "a name has"),
        ("one read " + "1" * 64, "there is a key 'one' already"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    """A wrong line in a file of keys is an error with file and line."""
    file = tmp_path / "keys"
    file.write_text(f"one read {'0' * 64}\n{line}\n")
    with pytest.raises(KeysError, match=f"{file}:2: .*{message}"):
        read_keys(file)


def test_rates_are_bounded(server: LiveServer) -> None:
    """A request beyond the burst gets 429 with a time; each key has a bucket of its own."""
    secret, key = make_key("ann", ["read"])
    limits = {"http_requests_per_second": 0.01, "http_requests_burst": 2}
    with client_of(server, [key], **limits) as web:
        assert [web.get("/livez").status_code for _ in range(3)] == [200, 200, 429]
        assert int(web.get("/livez").headers["retry-after"]) > 50
        assert web.get("/v1/workers", headers=bearer(secret)).status_code == 200


def test_buckets() -> None:
    """Buckets fill up to the burst, and the one that was unused for longest is forgotten."""
    buckets = Buckets(per_second=2, burst=2, clients_max=2)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [0, 0, 0.5]
    assert [buckets.take("a", at) for at in (0.5, 0.5, 100, 100, 100)] == [0, 0.5, 0, 0, 0.5]
    buckets.take("b", 100)
    assert buckets.take("a", 100) == 0.5
    buckets.take("c", 100)
    assert buckets.take("a", 100) == 0.5
    assert [buckets.take("b", 100) for _ in range(2)] == [0, 0]
    assert Buckets(0, 1, 1).take("a", 0.0) == 0


def test_pages_of_other_sites(web: TestClient, server: LiveServer) -> None:
    """A browser that is led here by another site is refused, under whatever name it comes."""
    assert web.get("/v1/workers", headers={"Host": "evil.example"}).status_code == 403
    assert web.get("/v1/workers", headers={"Host": "[::1]:8080"}).status_code == 200
    foreign = {"Origin": "http://evil.example"}
    assert web.post("/v1/jobs/none/cancel", headers=foreign).status_code == 403
    own = {"Origin": "http://localhost"}
    assert web.post("/v1/jobs/none/cancel", headers=own).status_code == 404
    secret, key = make_key("ann", ["read"])
    with client_of(server, [key]) as keyed:
        headers = {"Host": "farm.example", **bearer(secret)}
        assert keyed.get("/v1/workers", headers=headers).status_code == 200


def test_every_answer_has_security_headers(web: TestClient, client: redis.Redis) -> None:
    """Every answer has security headers, and that to a defect no traceback and no data."""
    client.set(wire.JobKeys("bad").meta, "secret")

    def fail() -> None:
        raise RuntimeError("secret")

    cast("FastAPI", web.app).add_api_route("/defect", fail)
    for path, status in (
        ("/livez", 200), ("/nowhere", 404), ("/v1/jobs/bad", 404), ("/defect", 500),
    ):  # fmt: skip
        answer = web.get(path)
        assert answer.status_code == status
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        assert "Traceback" not in answer.text
        assert "secret" not in answer.text


def test_what_was_sent_is_not_repeated(web: TestClient) -> None:
    """Text that is no Unicode, or wrong, is refused in JSON that does not repeat it."""
    headers = {"content-type": "application/json"}
    for body, named in (
        (b'{"tenant": "\\ud800<script>"}', "body: "),
        (b'{"tenant": ["<script>"]}', "body.tenant: "),
        (b"[" * 100_000, "body: "),
    ):
        answer = web.patch("/v1/jobs/none", content=body, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(named)
        assert "script" not in answer.text


def test_a_refusal_arrives(server: LiveServer, tmp_path: Path) -> None:
    """A client that sends an unwanted body to its end can read why it was refused."""
    keys = tmp_path / "keys"
    keys.write_text(make_key("ann", ["submit"])[1].line())
    head = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 400000\r\n\r\n"
    with served(server, keys_file=keys) as (address, _):
        assert say(address, head).startswith(b"HTTP/1.1 401")  # before there is a body
        with socket.create_connection(address, timeout=SECONDS) as connection:
            connection.sendall(head + bytes(400_000))  # at once: what comes late is not taken
            answer = b""
            while data := connection.recv(65_536):
                answer += data
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"no key: send one" in answer


def test_bodies_are_bounded_in_size_and_time(server: LiveServer) -> None:
    """A claim of 10 GB is refused unread, a chunked body at the limit; slow ones in time."""
    json = "content-type: application/json"
    with served(server, http_body_bytes_max=1000) as (address, _):
        claim = say(address, head(json, "content-length: 10000000000"))
        assert claim.startswith(b"HTTP/1.1 413 ")
        assert b"at most 1000 bytes" in claim
        chunk = b"1f4\r\n" + b"x" * 500 + b"\r\n"
        chunked = head(json, "transfer-encoding: chunked")
        assert say(address, chunked, chunk, chunk, chunk).startswith(b"HTTP/1.1 413 ")
        again = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
        # What came with requests that were answered is given uvicorn's time between requests.
        assert say(address, again + again + b"GET").count(b" 200 ") == 2
    with served(server, http_head_seconds=0.5, http_body_seconds=0.5) as (address, _):
        assert say(address, head(json, "content-length: 9"), b"[").startswith(b"HTTP/1.1 408 ")
        for sent in ([b"GET /livez HT"], []):
            slow = say(address, *sent)
            assert slow.startswith(b"HTTP/1.1 408 ")
            assert b"application/problem+json" in slow
            assert b"the head came too slowly" in slow


def test_answers_do_not_wait_for_the_network(server: LiveServer) -> None:
    """Head and body of an answer are sent at once, also when many have gone over a connection.

    A system holds the second of two small pieces back until the first is acknowledged, which the
    other end puts off by 40 ms or more.
    """
    with served(server) as ((host, port), _):
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        took = []
        with contextlib.closing(connection):
            for _ in range(60):
                began = time.monotonic()
                connection.request("GET", "/livez")
                connection.getresponse().read()
                took.append(time.monotonic() - began)
    assert min(took[30:]) < 0.03, took


def test_serving_ends_in_good_order(server: LiveServer, client: redis.Redis) -> None:
    """SIGTERM ends `serve` with status 0, also while a client waits for vectors."""
    with served(server, drain_seconds=4, models='["null:2"]') as (address, process):
        body = b'{"inputs": "a"}'
        words = head("content-type: application/json", f"content-length: {len(body)}") + body
        with socket.create_connection(address, timeout=SECONDS) as connection:
            connection.sendall(words)
            wait_until(lambda: Lane(client).asked())
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0


def test_who_may_not_serve(server: LiveServer, tmp_path: Path) -> None:
    """`serve` beyond loopback without keys, or at a taken port, ends with status 2 and a reason."""
    words = ("serve", "--redis", server.url, "--port")
    open_to_all = run(*words, 0, "--host", "0.0.0.0")  # noqa: S104 -- it is refused
    assert (open_to_all.returncode, "API keys are needed" in open_to_all.stderr) == (2, True)
    empty = tmp_path / "keys"
    empty.write_text("# none yet\n")
    environment = {"EMBEDFARM_KEYS_FILE": str(empty)}
    assert run(*words, 0, environment=environment).returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = run(*words, taken.getsockname()[1])
    assert (busy.returncode, "cannot listen" in busy.stderr) == (2, True)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that is bound but not listened at, so that only a bind by its number gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_up_serves_as_well(tmp_path: Path) -> None:
    """`up` says what runs, where it serves and what is loaded, and other verbs find it.

    It says what it waits for when it is stopped, and leaves nothing but its state behind.
    """
    with held_port() as port, up(tmp_path, port, "--warm", "null:16") as process:
        assert process.stdout
        try:
            said = [process.stdout.readline() for _ in range(5)]
            assert said[0].startswith("up: ingest, scheduler, web, 1 worker (cpu-0); logs in ")
            assert said[1].startswith("embed: embedfarm embed CORPUS --out DIRECTORY --redis unix:")
            assert "stop: Ctrl-C" in said[2]
            assert said[3:] == [f"serving http://127.0.0.1:{port}\n", "null:16 is loaded\n"]
            assert ready(port, "/readyz?model=null:16")
            place = {"EMBEDFARM_STATE_DIRECTORY": str(tmp_path / "state"), "HOME": str(tmp_path)}
            found = run("workers", "--json", environment=place)
            assert '"model": "null:16' in found.stdout, found.stderr
        finally:
            process.terminate()
        assert process.wait(SECONDS + 10) == 0
        assert process.stdout.read().startswith("stopping: workers finish the micro-batch in hand")
    assert not list((tmp_path / "tmp").iterdir())


def test_up_with_no_model(tmp_path: Path) -> None:
    """`up` with a model that no worker can load says so and ends, and nothing of it runs on."""
    with up(tmp_path, free_port(), "--warm", "no/such-model") as process:
        _, error = process.communicate(timeout=START_SECONDS)
    assert process.returncode != 0
    assert "no worker can load the model: model 'no/such-model' is no directory" in error
    assert "Traceback" not in error
    assert not list((tmp_path / "tmp").iterdir())


def test_up_on_a_busy_port(tmp_path: Path) -> None:
    """`up` on a port that somebody else has says so and ends, with nothing left behind."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with up(tmp_path, port) as process:
            said, error = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, f"cannot listen at 127.0.0.1, port {port}" in error) == (2, True)
    assert "serving" not in said
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.system
def test_no_room_for_a_farm(tmp_path: Path) -> None:
    """A farm whose disk is full says where there is no room, and leaves nothing behind."""
    with small_disk(tmp_path / "state", 16 * PAGE_BYTES) as disk:
        disk.fill()
        with up(tmp_path, free_port()) as process:
            said, error = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    assert f"No space left on device: '{tmp_path}/state/server/socket'" in error
    assert "Traceback" not in error
    assert not said
    assert not list((tmp_path / "tmp").iterdir())


def up(home: Path, port: int, *further: str) -> subprocess.Popen[str]:
    """Start a farm on this machine, with its own place for temporary files."""
    (home / "tmp").mkdir()
    places = {"EMBEDFARM_STATE_DIRECTORY": str(home / "state"), "HOME": str(home)}
    places |= {"HF_HUB_OFFLINE": "1", "EMBEDFARM_MODELS": '["null:16"]'}
    places |= {"EMBEDFARM_MODEL_IDLE_SECONDS": "0.1"}  # what is warm stays so
    words = ["up", "--devices", "cpu", "--workers", "1", "--port", str(port), *further]
    return subprocess.Popen(
        [sys.executable, "-m", "embedfarm", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | places | {"TMPDIR": str(home / "tmp")},
    )


def ready(port: int, path: str = "/readyz") -> bool:
    """Whether a farm says that it is ready."""
    with contextlib.suppress(ConnectionRefusedError):
        answer = say(
            ("127.0.0.1", port),
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode(),
        )
        return answer.startswith(b"HTTP/1.1 200 ")
    return False
