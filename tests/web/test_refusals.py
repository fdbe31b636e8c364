"""Tests of what a real `embedfarm serve` refuses, asked byte by byte."""

import contextlib
import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from tests.contract.little_job import embed, make_job, push
from tests.support import LiveServer
from tests.web.test_gate import SECONDS, say, served

Address = tuple[str, int]
DATA_TYPES: Final = {
    "application/json",
    "application/jsonl",
    "application/problem+json",
    "text/event-stream",
}
XSS: Final = "<img src=x onerror=alert(1)>"
ELSEWHERE: Final = (
    "../../../../etc/passwd",
    "..%2f..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "..%252f..%252fetc%252fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "%00",
    "a%00/../../etc/passwd",
    "..%c0%af..%c0%afetc%c0%afpasswd",
    "%ff%fe",
    "file:%2f%2f%2fetc%2fpasswd",
    "{job}",
)


@dataclass(frozen=True)
class Answer:
    """An answer of the server, with header names in lower case."""

    status: int
    headers: dict[str, str]
    body: str


def read(answer: bytes) -> Answer:
    """Parse the bytes of an answer."""
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    named = (line.partition(": ") for line in lines)
    headers = {name.lower(): value for name, _, value in named}
    return Answer(int(first.split()[1]), headers, body.decode())


def ask(address: Address, line: str, *headers: str, body: bytes = b"") -> Answer:
    """Send one request, in exactly these words."""
    lines = [f"{line} HTTP/1.1", "host: localhost", "connection: close", *headers, "", ""]
    return read(say(address, "\r\n".join(lines).encode("latin-1") + body))


def post(address: Address, path: str, body: bytes, *headers: str) -> Answer:
    """Send a request with a JSON body."""
    json = ("content-type: application/json", f"content-length: {len(body)}")
    return ask(address, f"POST {path}", *json, *headers, body=body)


@pytest.fixture
def address(server: LiveServer, client: redis.Redis) -> Iterator[Address]:
    """A server that serves a null model to this machine."""
    del client
    with served(server, models='["null:2"]', http_requests_per_second=0) as (address, _):
        yield address


def drop(connection: socket.socket) -> bytes | None:
    """Send one more byte; return what came if the connection is closed, else None."""
    connection.settimeout(0.001)
    try:
        connection.sendall(b"x")
        return connection.recv(999)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


def test_slow_clients_keep_nobody_waiting(server: LiveServer) -> None:
    """A hundred clients that send a byte at a time are cut off in time, and others are served."""
    limits = {"http_head_seconds": 6, "http_body_seconds": 6}  # in which a hundred can begin
    body = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n"
    with served(server, **limits) as (address, _), contextlib.ExitStack() as stack:
        drips = [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
        for place, drip in enumerate(drips):
            drip.sendall(body if place % 2 else b"GET /livez HTTP/1.1\r\nhost")
        deadline = time.monotonic() + SECONDS
        open_ = list(drips)
        served_meanwhile = 0
        while open_ and time.monotonic() < deadline:
            served_meanwhile += ask(address, "GET /livez").status == 200
            for drip in list(open_):
                if (end := drop(drip)) is not None:
                    open_.remove(drip)
                    assert not end or end.startswith(b"HTTP/1.1 408 ")
        assert not open_
        assert served_meanwhile > 1


def test_what_is_not_read(address: Address) -> None:
    """A body that is announced too large is refused unread, and gzip is never unpacked.

    A kilobyte that would unpack to megabytes is refused like any other coded body.
    """
    claim = ask(address, "POST /embed", "content-length: 10000000000", "expect: 100-continue")
    assert claim.status == 413
    bomb = gzip.compress(b'{"inputs": "' + b"0" * 3_000_000 + b'"}')
    for coding in ("gzip", "br", "identity, gzip", "x"):
        answer = post(address, "/embed", bomb, f"content-encoding: {coding}")
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    deep = b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(address, "/embed", deep).status in {400, 422}
    assert post(address, "/v1/embeddings", deep).status == 400
    wide = [f"x-{number}: {'y' * 90}" for number in range(1000)]
    assert ask(address, "GET /livez", *wide).status in {400, 431}
    assert ask(address, "GET /" + "a" * 100_000).status in {400, 431}


AMBIGUOUS: Final = (
    ["content-length: 5", "content-length: 6"],
    ["content-length: 5", "transfer-encoding: chunked"],
    ["transfer-encoding: chunked", "transfer-encoding: chunked"],
    ["transfer-encoding: gzip, chunked"],
    ["transfer-encoding: \x0bchunked"],
    ["transfer-encoding:"],
    ["content-length: +5"],
    ["content-length: 5, 5x"],
    ["content-length : 5"],
    ["content-length: 5\r\n folded: 6"],
    ["host: evil.example"],
    ["x: a\0b"],
)


def test_no_two_readings(address: Address) -> None:
    """A head that two programs could read as two requests is refused, and nothing after it read.

    A request that is hidden behind such a head gets no answer of its own.
    """
    smuggled = b"0\r\n\r\nGET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for lines in AMBIGUOUS:
        head = "\r\n".join(["POST /embed HTTP/1.1", "host: localhost", *lines, "", ""])
        said = say(address, head.encode("latin-1") + smuggled)
        answer = read(said)
        assert answer.status in {400, 501}, lines
        assert answer.headers["content-type"] == "application/problem+json", lines
        assert answer.headers["x-content-type-options"] == "nosniff", lines
        assert json.loads(answer.body)["status"] == answer.status, lines
        assert said.count(b"HTTP/1.1 ") == 1, lines


def paths(address: Address) -> Iterator[tuple[str, str]]:
    """Yield methods and paths of the document, and of where files would be served."""
    document = json.loads(ask(address, "GET /openapi.json").body)
    for path, operations in document["paths"].items():
        yield from ((method.upper(), path) for method in operations)
    yield "GET", "/static/{file}"
    yield "GET", "/{file}"


def test_no_path_leads_elsewhere(address: Address) -> None:
    """Dots, encoded ones, null bytes and absolute paths in any parameter lead to no file."""
    asked = 0
    for method, path in paths(address):
        for parameter in re.findall(r"\{\w+\}", path):
            for other in ELSEWHERE:
                answer = ask(address, f"{method} {path.replace(parameter, other)}")
                assert answer.status in {400, 404, 405, 422}, (method, path, other)
                assert "root:" not in answer.body
                asked += 1
    assert asked > 100


def test_markup_is_inert(address: Address, client: redis.Redis) -> None:
    """Markup in a job's fields or in parameters is repeated only in answers of data types.

    Such an answer has no type that a browser would run, and the browser may not guess another.
    """
    job = Job(client, XSS)
    job.create(JobSpec(model="null:2", name=XSS), 0)
    job.set_terms(tenant=XSS)
    FarmClient(client).reports.refuse(XSS, XSS, XSS)
    push(job, 0)
    [entry] = job.stream.read("one", 1)
    _, result = embed(entry, 0)
    result.errors[0].reason = XSS
    assert job.stream.commit([(entry, result)]) == ["committed"]
    repeated = 0
    encoded = quote(XSS)
    for method, path in paths(address):
        filled = re.sub(r"\{\w+\}", encoded, path)
        answer = ask(address, f"{method} {filled}?worker={encoded}&tenant={encoded}&q={encoded}")
        assert answer.headers["x-content-type-options"] == "nosniff"
        if XSS in answer.body:
            repeated += 1
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in DATA_TYPES, (method, path)
    assert repeated >= 3


def test_heads(address: Address, client: redis.Redis) -> None:
    """HEAD is answered as GET is, without the body; a stream of events ends with its head."""
    make_job(client, 2)
    own = {"date", "etag", "x-request-id"}
    for method, path in paths(address):
        if method == "GET" and "/events" not in path:
            filled = re.sub(r"\{\w+\}", "little", path)
            whole, head = ask(address, f"GET {filled}"), ask(address, f"HEAD {filled}")
            assert (head.status, head.body) == (whole.status, ""), path
            assert head.headers.keys() - own == whole.headers.keys() - own, path
    stream = ask(address, "HEAD /v1/jobs/little/events")
    assert (stream.status, stream.body) == (200, "")
    page = ask(address, "HEAD /jobs/little", "accept: text/event-stream")
    assert (page.status, page.headers["content-type"].partition(";")[0]) == (
        200,
        "text/event-stream",
    )
    assert ask(address, "HEAD /v1/embeddings").headers["allow"] == "POST"


def test_methods_that_are_none(address: Address) -> None:
    """A method that a path has not gets 405 with those that it has; TRACE repeats nothing.

    A preflight of a page of another site gets no header that would let it go on.
    """
    for method in ("OPTIONS", "TRACE", "PURGE", "PUT"):
        answer = ask(address, f"{method} /livez", "x-secret: 123456")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD"), method
        assert "123456" not in answer.body
    assert ask(address, "POST /v1/scheduler/passes").headers["allow"] == "GET, HEAD, PUT"
    for path in ("/embed", "/v1/jobs/any", "/nowhere"):
        preflight = ask(
            address,
            f"OPTIONS {path}",
            "origin: http://evil.example",
            "access-control-request-method: POST",
            "access-control-request-headers: content-type",
        )
        assert preflight.status in {404, 405}
        assert not [name for name in preflight.headers if name.startswith("access-control")]
