"""Tests of traces, as a collector for OpenTelemetry receives them."""

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from embedfarm.contract.tracing import is_installed
from tests.farm.harness import COMMAND, check_output, role, run, texts_of, write_corpus
from tests.ingest.loopback_server import Neighbour
from tests.support import LiveServer, free_port, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[Neighbour]:
    """Start a receiver that accepts every request."""
    with Neighbour().running() as neighbour:
        yield neighbour


def spans(collector: Neighbour) -> list[Span]:
    """Return all spans that came, of all processes."""
    return [
        span
        for request in collector.requests
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def facts(span: Span) -> dict[str, str | int | float]:
    """Return a span's attributes by name."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in span.attributes
    }


def is_open(port: int) -> bool:
    """Tell whether somebody answers at a port of loopback."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_is_one_trace(collector: Neighbour, tmp_path: Path) -> None:
    """A job's spans in all processes are one trace, with its times and counts."""
    texts = list(texts_of(3_000))
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    environment = {
        "EMBEDFARM_TRACES": f"{collector.url}/v1/traces",
        "EMBEDFARM_PART_BYTES_MAX": "64000",
    }
    words = ("embed", corpus, "--out", out, "--model", "null:16:20000", "--workers", 1)
    done = run(*words, environment=environment)
    assert done.returncode == 0, done.stderr
    check_output(out, texts, 16)
    found = spans(collector)
    [embed] = [span for span in found if span.name == "embed"]
    batches = [span for span in found if span.name == "micro-batch"]
    assert {span.trace_id for span in found} == {embed.trace_id}
    assert {span.name for span in found} == {
        "embed", "submit", "micro-batch", "fetch", "forward", "commit", "collect part",
    }  # fmt: skip
    for name in ("submit", "micro-batch", "collect part"):
        assert {span.parent_span_id for span in found if span.name == name} == {embed.span_id}
    for name in ("fetch", "forward", "commit"):
        parents = {span.parent_span_id for span in found if span.name == name}
        assert parents == {batch.span_id for batch in batches}
    assert sum(int(facts(batch)["chunks"]) for batch in batches) == 3_000
    assert all(float(facts(batch)["forward_seconds"]) > 0 for batch in batches)
    assert len([span for span in found if span.name == "collect part"]) > 1
    for span in found:
        assert embed.start_time_unix_nano - 1e9 < span.start_time_unix_nano
        assert span.start_time_unix_nano < span.end_time_unix_nano
        assert span.end_time_unix_nano < embed.end_time_unix_nano + 1e9


def test_a_request_is_part_of_its_caller_s_trace(
    collector: Neighbour, server: LiveServer, tmp_path: Path
) -> None:
    """A request for vectors goes on with its caller's trace, as does its time in the lane."""
    traces = {"traces": f"{collector.url}/v1/traces", "models": '["null:16"]'}
    port = free_port()
    with (
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"),
        role(server, tmp_path, "serve", "--port", str(port), **traces),
    ):
        wait_until(lambda: is_open(port))
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/embeddings",
            json.dumps({"model": "null:16", "input": ["a", "b"]}).encode(),
            {"content-type": "application/json", "traceparent": f"00-{TRACE}-{'1' * 16}-01"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 -- on loopback
            assert answer.status == 200
    found = [span for span in spans(collector) if span.trace_id.hex() == TRACE]
    [lane] = [span for span in found if span.name == "lane"]
    assert facts(lane) == {"model": "null:16", "texts": 2}
    [asked] = [span for span in found if span.parent_span_id.hex() == "1" * 16]
    assert "/v1/embeddings" in asked.name


def test_without_the_setting_there_is_nothing(tmp_path: Path) -> None:
    """The exporter is imported only with the setting, which is refused without its packages.

    The client for Redis imports some of opentelemetry by itself.
    """
    words = "import embedfarm.contract.tracing, sys; a = 'opentelemetry' in sys.modules; "
    words += "import embedfarm.runs.run, embedfarm.cli.embed, embedfarm.workers.worker;"
    asked = f"{words} print(a or 'opentelemetry.exporter' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"
    assert is_installed()
    hide = "import sys; sys.modules['opentelemetry.exporter'] = None; "
    missing = subprocess.run(
        [*COMMAND[:2], hide + COMMAND[2], "embed", "x", "--out", str(tmp_path / "out")],
        env={"EMBEDFARM_TRACES": "http://127.0.0.1:9/", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=False,
        text=True,
    )
    assert (missing.returncode, "embedfarm[traces]" in missing.stderr) == (2, True)
