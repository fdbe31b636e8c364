"""Tests of estimates by HTTP and on the form: what a job would take, before it is made."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import redis
from fastapi.testclient import TestClient

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.records import Rate
from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.readers import CorpusError, CorpusOptions
from embedfarm.watch.corpus_beginning import BEGINNING_BYTES, read_beginning
from tests.contract.little_job import heartbeat
from tests.farm.harness import texts_of, write_corpus
from tests.support import LiveServer
from tests.web.conftest import client_of

NULL: Final = "null:16"
BROWSER: Final = {"accept": "text/html"}
LINES: Final = {"content-type": "application/jsonl"}
JSONL: Final = CorpusOptions(format="jsonl")


def remember(client: redis.Redis, spec: JobSpec, *speeds: float) -> None:
    """Let a farm remember workers of these speeds; an hour of the first one costs 3.60."""
    farm = FarmClient(client)
    for place, speed in enumerate(speeds):
        beat = heartbeat(f"w{place}")
        price = 0.0 if place else 3.6
        farm.beat(msgspec.structs.replace(beat, device_cost_per_hour=price, devices=1), 600)
        key = f"w{place}|{model_key(spec)}|6"
        rate = Rate(tokens_per_second=speed, overhead_seconds=0.0, updated=1e9, samples=99)
        farm.statistics.remember({key: rate}, [])


@pytest.fixture
def web(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[TestClient]:
    """A farm with a fast worker that has a price, and a slow one that has none."""
    remember(client, JobSpec(model=NULL), 3000.0, 1000.0)
    models, jobs = (NULL, DEFAULT_MODEL), tmp_path / "jobs"
    with client_of(server, models=models, ingest_roots=[tmp_path], jobs_directory=jobs) as web:
        yield web


def estimate(web: TestClient, query: str = "", **request: Any) -> dict[str, Any]:  # noqa: ANN401 -- as httpx has them
    """Ask for an estimate, and return it."""
    answer = web.post(f"/v1/estimates{query}", **request)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def rows(count: int) -> bytes:
    """Return a corpus of rows of a text of 392 bytes, which are 100 tokens of a null model."""
    return b"".join(b'{"text": "%s"}\n' % (b"x" * 392) for _ in range(count))


def test_all_of_a_small_corpus_is_known(web: TestClient, client: redis.Redis) -> None:
    """Time is tokens by the speed of all, and each worker's share has its time and its price."""
    said = estimate(web, json={"texts": ["x" * 392] * 400})
    assert (said["chunks"], said["tokens"], said["read_ratio"]) == (400, 40_000, 1)
    assert (said["workers"], said["tokens_per_second"]) == (2, 4000)
    assert said["seconds"] == pytest.approx(10)
    assert said["device_hours"] == pytest.approx(20 / 3600)
    assert said["cost"] == pytest.approx(10 / 1000)
    for name in ("seconds", "device_hours", "cost"):
        assert said[f"{name}_most"] / said[name] == pytest.approx(
            said[name] / said[f"{name}_least"]
        )
        assert 1.05 <= said[f"{name}_most"] / said[name] < 1.2
    assert not FarmClient(client).job_ids()


def test_a_beginning_stands_for_the_whole(web: TestClient, tmp_path: Path) -> None:
    """A part of a corpus is enough, by its bytes or its chunks, and the range is wider for it."""
    whole = estimate(web, content=rows(10_000), headers=LINES)
    assert (whole["chunks"], whole["tokens"]) == (10_000, 1_000_000)
    assert whole["read_ratio"] == pytest.approx(BEGINNING_BYTES / len(rows(10_000)), rel=0.01)
    part = rows(100)
    by_bytes = estimate(web, f"?bytes={len(rows(10_000))}", content=part, headers=LINES)
    by_chunks = estimate(web, "?chunks=10000", content=part, headers=LINES)
    texts = estimate(web, "?chunks=10000", json={"texts": ["x" * 392] * 100})
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["x" * 392] * 10_000)
    source = estimate(web, json={"source": str(corpus)})
    for said in (by_bytes, by_chunks, texts, source):
        assert (said["chunks"], said["tokens"]) == (10_000, 1_000_000)
    assert 1.3 < by_bytes["seconds_most"] / by_bytes["seconds"] < 1.6
    assert whole["seconds_most"] < by_bytes["seconds_most"]
    assert list((tmp_path / "jobs" / "uploads").iterdir()) == []


def test_a_real_tokenizer_counts(web: TestClient, client: redis.Redis) -> None:
    """Tokens are those of the model's own tokenizer, and no more than the job's length of each."""
    for max_length in (0, 4):
        remember(client, JobSpec(model=DEFAULT_MODEL, max_length=max_length), 1000.0)
    asked = {"texts": ["one two three four five six seven eight"] * 10, "model": DEFAULT_MODEL}
    assert estimate(web, json=asked)["tokens"] == 100
    assert estimate(web, json=asked | {"max_length": 4})["tokens"] == 40
    long = asked | {"texts": ["word " * 900] * 10}
    assert estimate(web, json=long)["tokens"] == 2560  # of the model's own length
    assert estimate(web, json=long | {"long": "windows"})["tokens"] == 10_040


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"json": {"texts": ["a"], "model": DEFAULT_MODEL}}, 409, "no worker of the farm"),
        ({"json": {"texts": ["a"], "model": "none"}}, 404, "none"),
        ({"json": {"source": "/etc/passwd"}}, 403, "not below one of ingest_roots"),
        ({"content": b"PAR1", "headers": {"content-type": "application/vnd.apache.parquet"}}, 422,
         "parquet is not estimated by its beginning"),
        ({"content": b"nonsense\n", "headers": LINES}, 422, "line 1"),
        ({"content": b"", "headers": LINES}, 422, "there is no row in it"),
        ({"json": {"texts": ["a"], "wide": 1}}, 422, "wide"),
        ({"json": {"source": "https://host/a?sig=x", "input_format": "csv"}}, 422, "a URL is not"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated(
    web: TestClient, request_: dict[str, Any], status: int, words: str
) -> None:
    """Requests for which there is nothing to go by are refused, with what to do."""
    answer = web.post("/v1/estimates", **request_)
    assert answer.status_code == status, answer.text
    assert words in json.dumps(answer.json())


def test_a_pipe_is_not_waited_for(web: TestClient, tmp_path: Path) -> None:
    """A pipe below a root, which nobody writes to, is refused at once; so is a directory."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "directory.jsonl").mkdir()
    for name in ("pipe", "directory"):
        answer = web.post("/v1/estimates", json={"source": str(tmp_path / f"{name}.jsonl")})
        assert answer.status_code == 422
        assert "it is no file" in answer.json()["detail"]


def test_the_form_estimates(web: TestClient, client: redis.Redis) -> None:
    """The form has a button for it, which shows size, time and cost, and submits nothing."""
    for of in ("texts", "file"):
        form = web.get(f"/jobs/new?of={of}", headers=BROWSER).text
        assert 'formaction="/jobs/new/estimate"' in form
    fields = {"input_format": "txt", "deadline": "2h", "bytes": str(100 * 393)}
    file = {"file": ("", b"x" * 392 + b"\n")}
    page = web.post("/jobs/new/estimate", data=fields, files=file, headers=BROWSER)
    assert page.status_code == 200, page.text
    for words in (
        "about 100 chunks, about 10,000 tokens",
        "first 1.0 % of it",
        "2 workers",
        "cost",
    ):
        assert words in page.text, words
    assert not FarmClient(client).job_ids()


def test_a_beginning_may_end_anywhere(tmp_path: Path) -> None:
    """Half a row at the end of a beginning is no row, and what is no corpus is refused."""
    path = tmp_path / "corpus.jsonl"
    texts = list(texts_of(20_000))
    write_corpus(path, texts)
    found = read_beginning(path, JSONL)
    assert found.texts == texts[: len(found.texts)]
    assert found.chunks == pytest.approx(20_000, rel=0.05)  # the later ones are longer
    assert 0 < found.read_ratio < 1
    utf_16 = tmp_path / "corpus.csv"
    utf_16.write_text("text\n" + "\n".join(f'"row {each}"' for each in range(90_000)), "utf-16")
    read = read_beginning(utf_16, CorpusOptions(format="csv", encoding="utf-16"))
    assert read.texts[:2] == ["row 0", "row 1"]
    path.write_bytes(b'{"text": "' + b"x" * BEGINNING_BYTES + b'"}\n')
    with pytest.raises(CorpusError, match="line 1"):
        read_beginning(path, JSONL)
