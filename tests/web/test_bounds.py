"""Tests of what one request may cost: each route's worst bodies, sent to a real `serve`."""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.farm_timeline import TIMELINE_MAX, FarmEvent, Timeline
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.process_log import LINE_CHARACTERS_MAX, LINES_MAX
from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.web.http.bodies import COSTS, EXPANSION_MAX
from tests.support import LiveServer
from tests.web.test_gate import served
from tests.workers.running import worker_on, working

BODY_BYTES: Final = 4 << 20
MEMORY_BYTES_MAX: Final = 50_000_000
LIVE_SECONDS_MAX: Final = 0.1
TRIES: Final = 3  # of a request beside which /livez was slow, as happens on a busy machine
ANSWER_SECONDS: Final = 60
JOBS: Final = 1000
LONG: Final = "a" * 15_000  # nearly all that a head may have
NULL: Final = "null:1024"
JSON: Final = "application/json"
FORM: Final = "multipart/form-data; boundary=b"
ITEMS: Final = (b"1", b'"ab"', b"[]", b"{}", '"éé"'.encode(), b"1.5", b"[1]", b'{"a":1}')
LISTS: Final = {"texts", "ids", "inputs", "input", "active", "metadata"}
TEXTS: Final = ["a"] * 2048


@dataclass(frozen=True)
class Request:
    """A request to send.

    Attributes:
        more: A query, or the value of a parameter in the path.
        common: Whether the body is bad for any route.
    """

    body: bytes = b""
    more: str = ""
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    common: bool = False


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body with as many of an item as are still read."""
    cost = sum(COSTS.get(bytes([each]), 0) for each in item + b",")
    count = min(BODY_BYTES // (len(item) + 1), EXPANSION_MAX * BODY_BYTES // cost) - 9
    return before + b",".join([item] * count) + after


def members(count: int) -> bytes:
    """An object with members of different names."""
    return b"{" + b",".join(b'"%x":1' % number for number in range(count)) + b"}"


def hostile(*names: str) -> Iterator[Request]:
    """Yield bodies that are bad for any route: deep, wide or long, in these fields too."""
    yield from (replace(each, common=True) for each in _hostile(*names))


def _hostile(*names: str) -> Iterator[Request]:
    yield Request(b"[" * BODY_BYTES)
    yield Request(b"[" + b"1," * (BODY_BYTES // 2 - 2) + b"1]")
    yield Request(members(300_000))
    yield Request(members(90_000))
    yield Request(b'{"' + b"x" * (BODY_BYTES - 99) + b'":1}')
    yield Request(b'"' * BODY_BYTES)
    yield Request(b"\\" * BODY_BYTES)
    yield Request(b"a&" * (BODY_BYTES // 2), media_type="application/x-www-form-urlencoded")
    for name in names:
        start = b'{"%s":' % name.encode()
        items = ITEMS if name in LISTS else ITEMS[:1]
        yield from (Request(filled(start + b"[", item, b"]}")) for item in items)
        yield Request(start + members(90_000) + b"}")
        yield Request(start + b"9" * (BODY_BYTES - 99) + b"}")
        yield Request(start + b'"\xf0\x9f\x98\x80' + b"x" * (BODY_BYTES - 99) + b'"}')


def heavy(**body: object) -> Request:
    """A valid request that makes much work."""
    return Request(json.dumps(body).encode())


def field_of(name: bytes, value: bytes) -> bytes:
    """A field of a form."""
    return b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name, value)


def form(file: bytes, *fields: bytes) -> bytes:
    """A form with a file after its fields."""
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.txt"\r\n\r\n'
    return b"".join(fields) + head + file + b"\r\n--b--\r\n"


def forms() -> Iterator[Request]:
    """Yield uploads that are large, of many or long fields, of endless heads, or of nothing."""
    head = b'--b\r\ncontent-disposition: form-data; name="'
    for body in (
        form(b"a\n" * 4 * BODY_BYTES),
        form(b"", *(field_of(b"%x" % number, b"") for number in range(BODY_BYTES // 60))),
        form(b"", *([field_of(b"a", b"")] * (BODY_BYTES // 60))),
        head + b"x" * BODY_BYTES,
        head + b'x"\r\n' + b"x: y\r\n" * BODY_BYTES,
        field_of(b"x", b"x" * BODY_BYTES),
        b"-" * BODY_BYTES,
    ):
        yield Request(body, media_type=FORM)


def batch_lines() -> bytes:
    """A file of lines that are no requests, one of them long."""
    return b"x\n" * BODY_BYTES + b'{"custom_id": "' + b"a" * 8 * BODY_BYTES + b'"}\n'


def worst_requests() -> dict[str, Sequence[Request]]:
    """Return by route all bodies with which a request costs most."""
    return {
        "GET /v1/jobs": [Request(more="?limit=1000"), Request(more=f"?limit=1000&tenant={LONG}")],
        "POST /v1/jobs": [
            *hostile("texts", "source", "prompt", "priority"),
            *forms(),
            Request(more="?" + "&".join(f"{number:x}=" for number in range(3000))),
            Request(filled(b'{"texts":[', b'"%s"' % (b"a" * 10), b"]}")),
            Request(filled(b'{"texts":[', b'{"text":"%s","id":""}' % (b"a" * 80), b"]}")),
            Request(b"a\n" * 8 * BODY_BYTES, media_type="text/plain"),
            Request(b"{}", headers={"idempotency-key": LONG}),
        ],
        "POST /v1/estimates": [
            *hostile("texts", "source"),
            *forms(),
            Request(filled(b'{"texts":[', b'"%s"' % (b"a" * 10), b"]}")),
            Request(b"\n" * 8 * BODY_BYTES, media_type="text/plain"),
            Request(
                b"a" * 8 * BODY_BYTES, media_type="text/plain", more="?chunks=1125899906842624"
            ),
            Request(b"\n" * 8 * BODY_BYTES, media_type="application/x-ndjson"),
        ],
        "POST /v1/job-actions": [
            *hostile("verb", "jobs", "words"),
            heavy(verb="cancel", jobs=["a" * 256] * 1000),
            heavy(verb="pause"),
        ],
        "GET /v1/jobs/{job}": [Request()],
        "PATCH /v1/jobs/{job}": [*hostile("tenant", "deadline_ms")],
        "DELETE /v1/jobs/{job}": [Request()],
        "DELETE /v1/jobs/{job}/results": [Request(more="?upto=9007199254740992")],
        "POST /v1/jobs/{job}/pause": [Request()],
        "POST /v1/jobs/{job}/resume": [Request()],
        "POST /v1/jobs/{job}/cancel": [Request(more="none")],
        "POST /v1/jobs/{job}/retry": [Request()],
        "GET /v1/jobs/{job}/results": [Request(more="?limit=100000")],
        "GET /v1/jobs/{job}/search": [Request(more="?query=a&count=100")],
        "GET /v1/jobs/{job}/errors": [Request(more="?limit=1000")],
        "GET /v1/jobs/{job}/errors/{index}": [Request()],
        "GET /v1/jobs/{job}/events": [Request(more="none", headers={"last-event-id": LONG})],
        "GET /v1/jobs/{job}/timeline": [Request(more="?limit=2000")],
        "GET /v1/jobs/{job}/runs": [Request()],
        "GET /v1/advice": [Request(more=f"?model={LONG}&kind={LONG}")],
        "GET /v1/timeline": [Request(more="?limit=2000")],
        "GET /v1/logs": [Request()],
        "GET /v1/logs/{process}": [Request(more="?limit=400"), Request(more=LONG)],
        "POST /v1/feeds": [*hostile("name", "dimensions", "dtype")],
        "POST /v1/jobs/{job}/texts": [
            *hostile("texts", "ids", "start"),
            heavy(start=0, texts=["a" * 400] * 8192, ids=["a" * 40] * 8192),
        ],
        "POST /v1/jobs/{job}/close": [*hostile("count")],
        "GET /livez": [Request()],
        "GET /readyz": [Request()],
        "GET /health": [Request()],
        "GET /v1/workers": [Request()],
        "GET /v1/scheduler/stats": [Request()],
        "GET /v1/scheduler/explain": [Request(more=f"?last=100&worker={LONG}")],
        "GET /v1/scheduler/passes": [Request()],
        "PUT /v1/scheduler/passes": [*hostile("active")],
        "GET /metrics": [Request()],
        "POST /v1/embeddings": [
            *hostile("input", "model", "dimensions", "user"),
            heavy(model=NULL, input=TEXTS),
            heavy(model=NULL, input=["a" * 500] * 2048, encoding_format="base64"),
            heavy(model=NULL, input=["a"] * 300_000),
        ],
        "GET /v1/models": [Request()],
        "GET /v1/models/{model}": [Request(more=LONG)],
        "POST /v1/files": [*forms()],
        "GET /v1/files": [Request(more="?limit=10000")],
        "GET /v1/files/{file}": [Request(more=LONG)],
        "DELETE /v1/files/{file}": [Request(more=LONG)],
        "GET /v1/files/{file}/content": [Request()],
        "POST /v1/batches": [
            *hostile("metadata", "input_file_id"),
            heavy(input_file_id="FILE", endpoint="/v1/embeddings", completion_window="24h"),
            Request(b"{}", headers={"idempotency-key": LONG}),
        ],
        "GET /v1/batches": [Request(more="?limit=100")],
        "GET /v1/batches/{batch}": [Request(more=LONG)],
        "POST /v1/batches/{batch}/cancel": [Request()],
        "GET /info": [Request()],
        "POST /embed": [*hostile("inputs", "prompt_name"), heavy(inputs=TEXTS)],
        "POST /lsh": [
            *hostile("inputs", "bitn"),
            *(heavy(inputs=TEXTS, bitn=8192, seed=seed) for seed in range(3)),
        ],
        "POST /rerank": [
            *hostile("texts", "query"),
            heavy(query="a", texts=["a" * 500] * 2047, return_text=True),
        ],
        "POST /tokenize": [*hostile("inputs")],
    }


def token_requests() -> dict[str, Sequence[Request]]:
    """Return by route what a tokenizer makes most of."""
    return {
        "POST /v1/embeddings": [
            heavy(model=DEFAULT_MODEL, input=rows)
            for rows in ([999] * 300_000, [999] * 32_768, [[999] * 140] * 2048, [[999]] * 140_000)
        ],
        "POST /tokenize": [
            heavy(inputs=texts)
            for texts in (
                "!" * BODY_BYTES,
                ["!" * 32_768] * 32,
                ["!" * 512] * 2048,
                ["!"] * 300_000,
            )
        ],
    }


class Pulse:
    """A client that asks /livez again and again, and knows its slowest answer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds_max = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(http.client.HTTPConnection(*self._address, timeout=ANSWER_SECONDS)) as to:
            while not self._stop.wait(0.01):
                began = time.monotonic()
                to.request("GET", "/livez")
                assert to.getresponse().read() == b'{"alive":true}'
                self.seconds_max = max(self.seconds_max, time.monotonic() - began)


@dataclass
class Serving:
    """A real `embedfarm serve`, with ids of what is there by the name of the path's parameter."""

    address: tuple[str, int]
    pid: int
    names: dict[str, str]

    def ask(self, operation: str, request: Request) -> int:
        """Send a request and read all of the answer; return its status, 0 if the link broke.

        A server that refuses a body before all of it is there may close the connection meanwhile.
        """
        method, path = operation.split()
        query = request.more.startswith("?")
        names = self.names if query or not request.more else dict.fromkeys(self.names, request.more)
        path = re.sub(r"{(\w+)}", lambda found: names[found[1]], path)
        body = request.body.replace(b"FILE", self.names["file"].encode())
        connection = http.client.HTTPConnection(*self.address, timeout=ANSWER_SECONDS)
        with closing(connection) as to, suppress(BrokenPipeError, ConnectionResetError):
            to.request(
                method,
                path + request.more if query else path,
                body or None,
                {"content-type": request.media_type, **request.headers},
            )
            answer = to.getresponse()
            while answer.read(1 << 16):
                pass
            return answer.status
        return 0

    def make(self, path: str, body: bytes, media_type: str = JSON) -> dict[str, Any]:
        """Make something with POST, and return the answer."""
        with closing(http.client.HTTPConnection(*self.address, timeout=ANSWER_SECONDS)) as to:
            to.request("POST", path, body, {"content-type": media_type})
            made: dict[str, Any] = json.loads(to.getresponse().read())
        return made

    def operations(self) -> set[str]:
        """Return the operations that the application's document has."""
        with closing(http.client.HTTPConnection(*self.address, timeout=ANSWER_SECONDS)) as to:
            to.request("GET", "/openapi.json")
            paths = json.loads(to.getresponse().read())["paths"]
        return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}

    def memory(self, figure: str) -> int:
        """Return bytes of memory: `VmRSS` now, or `VmHWM`, the most since `forget`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{figure}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found
        return 1024 * int(found[1])

    def forget(self) -> None:
        """Reset the most memory that was used to what is used now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def faults(self, operation: str, request: Request, before: int) -> Iterator[str]:
        """Yield what is wrong with a request's cost, where so much memory was in use before."""
        for _ in range(TRIES):
            self.forget()
            with Pulse(self.address) as pulse:
                status = self.ask(operation, request)
            grown = self.memory("VmHWM") - before
            if pulse.seconds_max <= LIVE_SECONDS_MAX:
                break
        said = f"{operation}{request.more[:20]} {request.body[:20]!r}…{request.body[40:60]!r}"
        if pulse.seconds_max > LIVE_SECONDS_MAX:
            yield f"{said}: /livez took {pulse.seconds_max:.3f} s"
        if grown > MEMORY_BYTES_MAX:
            yield f"{said}: {grown / 1e6:.0f} MB more"
        if status >= 500 and status != 503:
            yield f"{said}: {status}"


@contextmanager
def serving(server: LiveServer, home: Path, *models: str) -> Iterator[Serving]:
    """Run `embedfarm serve` with a feed, and a file for a batch."""
    settings = {
        "models": json.dumps(models),
        "jobs_directory": home,
        "jobs_max": 10 * JOBS,
        "http_requests_per_second": 0,
        "http_disk_bytes_min": 0,
        "lane_seconds_max": 1,
    }
    with served(server, **settings) as (address, process):
        made = Serving((address[0], int(address[1])), process.pid, {})
        purpose = field_of(b"purpose", b"batch")
        made.names = {
            "job": made.make("/v1/feeds", b"{}")["job"],
            "process": "one",
            "index": "0",
            "file": made.make("/v1/files", form(batch_lines(), purpose), FORM)["id"],
            "batch": "none",
            "model": models[0],
        }
        yield made


def cost(serving: Serving, worst: Mapping[str, Sequence[Request]]) -> list[str]:
    """List what is wrong with the cost of the requests, after one of each operation to warm up."""
    for operation in worst:
        serving.ask(operation, Request(b"{}"))
    before = serving.memory("VmRSS")
    return [
        fault
        for operation, requests in worst.items()
        for request in requests
        for fault in serving.faults(operation, request, before)
    ]


def thinned(requests: Sequence[Request], place: int, stride: int) -> list[Request]:
    """Keep all that are a route's own, and of those for any route one of `stride`, from a place."""
    own = [each for each in requests if not each.common]
    return own + [each for each in requests if each.common][place % stride :: stride]


@pytest.mark.alone
@pytest.mark.timeout(900)  # some 300 requests, on a machine that others use too
@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_no_request_costs_much(
    stride: int, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """The worst bodies of each route take bounded memory, and others are served meanwhile.

    All routes read their bodies by the same code, so that each gets other ones of those that are
    bad for any; the slow test sends all to all.
    """
    everything = worst_requests()
    worst = {
        operation: thinned(requests, place, stride)
        for place, (operation, requests) in enumerate(everything.items())
    }
    for number in range(JOBS):
        Job(client, f"job-{number}").create(JobSpec(model=NULL), 0)
    longest = FarmEvent(kind="failed", job="job-0", note="x" * 1000)
    Timeline(client).add(*[longest] * TIMELINE_MAX)
    for _ in range(2 * LINES_MAX):
        client.xadd(wire.log_key("one"), {"level": "INFO", "text": "x" * LINE_CHARACTERS_MAX})
    with working(worker_on(server)), serving(server, tmp_path, NULL) as one:
        assert one.operations() == set(everything), "a route has no worst body, or is none"
        assert not (faults := cost(one, worst)), "\n".join(faults)


@pytest.mark.alone
def test_no_tokens_cost_much(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """The worst texts and token ids for a real tokenizer take bounded memory and time."""
    del client
    with serving(server, tmp_path, DEFAULT_MODEL) as one:
        assert one.ask("POST /tokenize", heavy(inputs="a")) == 200  # which reads the tokenizer
        assert not (faults := cost(one, token_requests())), "\n".join(faults)
