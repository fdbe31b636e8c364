"""Tests of jobs by HTTP: what is accepted, what becomes of it, and what is refused."""

import contextlib
import gzip
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from fastapi.testclient import TestClient
from rq import Worker
from rq.job import JobStatus

import embedfarm
from embedfarm.collector.manifest import read_manifest
from embedfarm.contract import wire
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JOB_FIELDS, JobSpec
from embedfarm.contract.scheduling_terms import Terms, read_deadline
from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_queue import Submissions
from embedfarm.ingest.task_job import TaskJob
from embedfarm.ingest.task_worker import TaskWorker
from embedfarm.ingest.tasks import cleanup, option_words
from embedfarm.runs.own_job import JOB_ID_FILE
from embedfarm.watch.overview import JobFacts
from embedfarm.web.auth.keys import Key
from embedfarm.web.jobs.job_requests import name_corpus
from embedfarm.web.jobs.retries import options_of
from embedfarm.workers import model_store
from tests.contract.little_job import make_job
from tests.farm.harness import check_output, run, texts_of, write_corpus
from tests.ingest.rq_farm import START_SECONDS, Door
from tests.poison_worker import HEALED, MARKER, open_poison_engine
from tests.runs.test_by_reference import shared
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.forms import fields_of
from tests.web.test_gate import bearer, say, served
from tests.workers.running import worker_on, working

NULL: Final = "null:16"
SLOW: Final = "null:16:5000"
JSONL: Final = {"content-type": "application/x-ndjson"}


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The directory in which jobs have theirs."""
    return tmp_path / "jobs"


@pytest.fixture
def web(
    server: LiveServer, client: redis.Redis, tmp_path: Path, jobs: Path
) -> Iterator[TestClient]:
    """An application whose jobs are not worked on."""
    del client
    roots = [tmp_path / "data"]
    with client_of(server, models=(NULL, SLOW), jobs_directory=jobs, ingest_roots=roots) as web:
        yield web


@contextlib.contextmanager
def doing(server: LiveServer, home: Path) -> Iterator[Door]:
    """Run one worker, and `embedfarm ingest` for the directory of `web`."""
    door = Door(server, home)
    with working(worker_on(server)), door.ingest(jobs_directory=home / "jobs"):
        yield door
    door.connection.close()


def facts(web: TestClient, job: str) -> dict[str, Any]:
    """The facts of a job, by HTTP, without how fast it goes now."""
    found: dict[str, Any] = web.get(f"/v1/jobs/{job}").json()
    return {name: found[name] for name in JobFacts.__dataclass_fields__}


def wait_for(web: TestClient, job: str, state: str) -> dict[str, Any]:
    """Wait until a job is in a state, and return its facts."""
    wait_until(lambda: facts(web, job)["state"] == state, START_SECONDS)
    return facts(web, job)


def left(jobs: Path) -> list[str]:
    """The files in the directories of jobs, and on their way there."""
    return sorted(str(path.relative_to(jobs)) for path in jobs.rglob("*") if path.is_file())


def parquet_of(texts: list[str], path: Path) -> bytes:
    """Write a Parquet corpus, and return its bytes."""
    pq.write_table(pa.table({"text": texts}), path)
    return path.read_bytes()


def arrow_of(texts: list[str]) -> bytes:
    """Return a corpus as a stream of Arrow's."""
    table, file = pa.table({"text": texts}), pa.BufferOutputStream()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 7)
    return bytes(file.getvalue())


@pytest.mark.farm
def test_every_form_is_embedded(
    web: TestClient, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Texts, forms, bodies and paths all end as an output of just these texts, in order.

    The job is on the farm with all that was asked for before anything of it runs.
    """
    texts = list(texts_of(30))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "data").mkdir()
    source = write_corpus(tmp_path / "data" / "corpus.jsonl", texts)
    named = {"data": {"name": "mine", "priority": "2"}}
    parquet = parquet_of(texts, tmp_path / "made.parquet")
    requests: list[dict[str, Any]] = [
        {"json": {"texts": [{"text": text, "id": f"i{n}"} for n, text in enumerate(texts)]}},
        {"json": {"source": str(source), "deadline_ms": 5_000_000_000_000, "tenant": "a"}},
        {"files": {"file": ("../../etc/a b.jsonl", lines)}, **named},
        {
            "files": {"file": ("c.parquet", parquet)},
            "data": {"keep": "text", "text": "{text}"},
        },
        {
            "files": {"file": ("d.txt", "".join(f"{each}\n" for each in texts).encode("utf-16"))},
            "data": {"encoding": "utf-16"},
        },
        {"json": {"texts": texts, "encoding": "utf-16"}},  # which these have not
        {
            "content": arrow_of(texts),
            "headers": {"content-type": "application/vnd.apache.arrow.stream"},
        },
        {
            "content": gzip.compress(lines),
            "headers": JSONL | {"content-encoding": "gzip"},
            "params": {"name": "raw", "weight": 3},
        },
    ]
    answers = [web.post("/v1/jobs", **request) for request in requests]
    made = [answer.json() for answer in answers]
    assert [answer.status_code for answer in answers] == [201] * len(requests), made
    assert [answer.headers["location"] for answer in answers] == [
        f"/v1/jobs/{each['job']}" for each in made
    ]
    assert {each["state"] for each in made} == {"queued"}
    assert {each["model"] for each in made} == {NULL}
    assert (made[2]["name"], made[2]["priority"]) == ("mine", 2)
    assert (made[-1]["name"], made[-1]["weight"]) == ("raw", 3)
    assert (made[1]["tenant"], made[1]["deadline_ms"]) == ("a", 5_000_000_000_000)
    assert FarmClient(client).job_ids() == [each["job"] for each in made]
    with doing(server, tmp_path):
        ended = [wait_for(web, each["job"], "finished") for each in made]
    for each in ended:
        check_output(Path(each["out"]), texts, 16)
    kept = pq.read_table(Path(ended[3]["out"]) / "part-000000000000.parquet", columns=["text"])
    assert kept.column("text").to_pylist() == texts
    assert not list((tmp_path / "jobs" / "uploads").iterdir())
    command = FarmClient(client).job(made[2]["job"]).noted("command")
    assert command.startswith("embedfarm embed --model=null:16 --job-id=")


@pytest.mark.farm
def test_vectors_of_finished_jobs_are_taken(
    web: TestClient, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A job embeds what no job that it names has, each text once, and says what was there."""
    texts, more = list(texts_of(30)), ["new", "newer", "new"]
    first = web.post("/v1/jobs", json={"texts": texts[:20], "model": NULL}).json()["job"]
    asked = {"texts": texts, "reuse": first}
    refused = web.post("/v1/jobs", json=asked)
    assert (refused.status_code, f"job {first} has no finished output" in refused.text) == (
        409,
        True,
    )
    unknown = web.post("/v1/jobs", json={"texts": texts, "reuse": "0" * 32})
    assert (unknown.status_code, "no such job by HTTP" in unknown.text) == (404, True)
    with doing(server, tmp_path):
        wait_for(web, first, "finished")
        second = web.post("/v1/jobs", json=asked).json()["job"]
        wait_for(web, second, "finished")
        third = web.post("/v1/jobs", json={"texts": texts + more, "reuse": f"{first},{second}"})
        linked = web.post("/v1/jobs", json=asked | {"by_reference": True}).json()["job"]
        made = wait_for(web, third.json()["job"], "finished")
        whole = Path(wait_for(web, linked, "finished")["out"])
    out = Path(made["out"])
    check_output(out, texts + more, 16)
    assert (made["chunks_in"], made["chunks_reused"]) == (33, 31)
    outputs = [str(tmp_path / "jobs" / each / "output") for each in (first, second)]
    assert read_manifest(out).reused == {outputs[0]: 20, outputs[1]: 10, ".": 1}
    assert not shared(out, Path(outputs[0]))
    check_output(whole, texts, 16)
    assert shared(whole, Path(outputs[0])) == {"part-000000000000.parquet"}
    page = web.get(f"/jobs/{made['job']}").text
    assert "31 reused" in page
    form = f"/jobs/new?of=file&reuse={made['job']}"
    assert f'href="{form.replace("&", "&amp;")}"' in page
    untouched, boxes = fields_of(web.get(form).text, "/jobs/new")
    assert (untouched["reuse"], untouched["model"]) == (made["job"], NULL)
    assert boxes >= {"deduplicate", "by_reference"}
    assert web.get("/jobs/new?reuse=../../etc").status_code == 422
    file = {"file": ("new.txt", "\n".join([*texts, "fresh"]).encode())}
    for ticked in ({}, {"by_reference": "true"}):
        data = untouched | ticked
        made_so = web.post("/jobs/new", data=data, files=file, follow_redirects=False)
        newest = FarmClient(client).job(made_so.headers["location"].rpartition("/")[2])
        words = newest.noted("command").split()
        assert (f"--reuse={out}" in words, "--by-reference" in words) == (True, bool(ticked))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"json": {}}, 422),
        ({"json": {"texts": []}}, 422),
        ({"json": {"texts": ["a", {"text": "b", "id": "c"}]}}, 422),
        ({"json": {"texts": ["a"], "source": "b"}}, 422),
        ({"json": {"texts": ["a"], "weight": 0}}, 422),
        ({"json": {"texts": ["a"], "prompt": "a\0b"}}, 422),
        ({"json": {"texts": ["a"], "other": 1}}, 422),
        ({"json": {"texts": ["a"], "encoding": "base64"}}, 422),
        ({"json": {"texts": ["a"], "reuse": "../../etc"}}, 422),
        ({"json": {"texts": ["a"], "by_reference": True}}, 422),
        ({"json": {"texts": ["a"], "text": "{a!r}"}}, 422),
        ({"json": {"texts": ["a"], "text": "{a}", "text_field": "b"}}, 422),
        ({"json": {"texts": ["a"], "reuse": "0" * 32}}, 404),
        ({"json": {"texts": ["a"]}, "params": {"lsh_bits": 65}}, 422),
        ({"json": {"texts": ["a"], "model": "null:9"}}, 404),
        ({"json": {"texts": ["a"], "webhook": "http://127.0.0.1/"}}, 422),
        ({"json": {"texts": ["a"], "webhook": "file:///etc/passwd"}}, 422),
        ({"json": {"source": "/etc/passwd"}}, 403),
        ({"json": {"source": "../" * 90 + "etc/passwd"}}, 403),
        ({"json": {"source": "https://example.org/a.jsonl"}}, 403),
        ({"json": {"source": "x" * 4000}}, 403),
        (
            {"content": b'{"texts": ["\\ud800"]}', "headers": {"content-type": "application/json"}},
            422,
        ),
        ({"content": b"a", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415),
        ({"content": b"a", "headers": JSONL | {"content-encoding": "br"}}, 415),
        ({"files": {"file": ("a.docx", b"a")}}, 415),
        ({"files": {"file": ("a.parquet.gz", b"a")}}, 415),
        ({"files": {"corpus": ("a.jsonl", b"a")}}, 422),
        ({"files": [("file", ("a.txt", b"a")), ("file", ("b.txt", b"a"))]}, 422),
        ({"files": {"file": ("a.txt", b"a")}, "data": {"name": "n" * 20_000}}, 413),
        ({"files": {"file": ("a.txt", b"a")}, "data": {"other": "1"}}, 422),
        ({"files": {"file": ("a.txt", b"a")}, "data": {str(n): "" for n in range(65)}}, 422),
        (
            {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            422,
        ),
        ({"content": b"a", "headers": {"content-type": "multipart/form-data"}}, 422),
    ],
)
def test_what_is_refused_leaves_nothing(
    web: TestClient, client: redis.Redis, jobs: Path, request_: dict[str, Any], status: int
) -> None:
    """A request that is refused gets a reason, and leaves no job and no file."""
    answer = web.post("/v1/jobs", **request_)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]
    assert not FarmClient(client).job_ids()
    assert not left(jobs)


@pytest.mark.parametrize(
    ("name", "chosen", "called"),
    [
        ("", "", "input.jsonl"),
        ("/etc/corpus.CSV", "", "input.csv"),
        ("a.ndjson.gz", "", "input.jsonl.gz"),
        ("a.docx", "txt", "input.txt"),
        ("..", "", "input.jsonl"),
        ("a.tsv.zst", "csv", "input.csv.zst"),
    ],
)
def test_names_of_users_become_no_paths(name: str, chosen: str, called: str) -> None:
    """Only the format is taken from an upload's name, and a chosen format comes first."""
    assert name_corpus(name, chosen) == called


def test_the_page_asks_for_all_that_a_job_has(web: TestClient, client: redis.Redis) -> None:
    """The form of the page has each field of a job, and a job is made of what it sends.

    A job has the name of its file where it was given none, and a deadline as people say it.
    """
    untouched, boxes = fields_of(web.get("/jobs/new?of=file").text, "/jobs/new")
    assert JOB_FIELDS.keys() - {"ranges"} <= untouched.keys() | boxes
    file = {"file": ("C:\\my texts\\mails.txt", b"a\nb\n")}
    plain = web.post("/jobs/new", data=untouched, files=file, follow_redirects=False)
    assert plain.status_code == 303, plain.text
    name = plain.headers["location"].rpartition("/")[2]
    assert FarmClient(client).job(name).spec() == JobSpec(model=NULL, name="mails.txt")
    given = untouched | {
        "deadline": "2h", "prompt": "query: ", "long": "windows", "vector_dtype": "float16",
        "normalize": "true", "max_length": "64", "on_bad_row": "skip", "name": "mine",
    }  # fmt: skip
    before = time.time()
    full = web.post("/jobs/new", data=given, files=file, follow_redirects=False)
    job = FarmClient(client).job(full.headers["location"].rpartition("/")[2])
    assert job.spec() == JobSpec(
        model=NULL, name="mine", prompt="query: ", long="windows", vector_dtype="float16",
        normalize=True, max_length=64,
    )  # fmt: skip
    assert 7200 <= job.status().deadline_ms / 1000 - before < 7300
    assert "--on-bad-row=skip" in job.noted("command")
    columns = {"text": "{a}\n{b}", "keep": "a,b"}
    made = web.post("/jobs/new", data=untouched | columns, files=file, follow_redirects=False)
    command = FarmClient(client).job(made.headers["location"].rpartition("/")[2]).noted("command")
    assert "--text={a}" in command
    assert "--keep=a,b" in command
    wrong = web.post("/jobs/new", data=given | {"deadline": "soon"}, files=file)
    assert (wrong.status_code, "is no deadline" in unescape(wrong.text)) == (422, True)


def test_a_full_farm_and_a_full_disk(server: LiveServer, client: redis.Redis, jobs: Path) -> None:
    """A full farm answers 429 and a full disk 507; neither leaves a file or takes a place."""
    order = {"texts": ["a"]}
    with client_of(server, models=(NULL,), jobs_directory=jobs, jobs_max=1) as web:
        job = web.post("/v1/jobs", json=order).json()["job"]
        full = web.post("/v1/jobs", json=order)
        assert (full.status_code, int(full.headers["retry-after"]) > 0) == (429, True)
        assert [path.name for path in jobs.iterdir() if path.name != "uploads"] == [job]
    room = shutil.disk_usage(jobs).free * 2
    with client_of(server, models=(NULL,), jobs_directory=jobs, http_disk_bytes_min=room) as web:
        for request in ({"json": order}, {"content": b"a", "headers": JSONL}):
            assert web.post("/v1/jobs", **request).status_code == 507
    assert FarmClient(client).job_ids() == [job]


def test_uploads_have_limits_of_their_own(
    server: LiveServer, client: redis.Redis, jobs: Path
) -> None:
    """A file may be larger than a body that is held in memory; both have an end."""
    limits: dict[str, Any] = {"http_body_bytes_max": 1000, "http_upload_bytes_max": 100_000}
    with client_of(server, models=(NULL,), jobs_directory=jobs, **limits) as web:
        line = b'{"text": "a"}\n'
        assert web.post("/v1/jobs", content=line * 1000, headers=JSONL).status_code == 201
        other = {"content-type": "application/jsonl"}  # not JSON, though its name begins so
        assert web.post("/v1/jobs", content=line * 1000, headers=other).status_code == 201
        pieces = (line * 1000 for _ in range(8))  # of a length that is not announced
        assert web.post("/v1/jobs", content=pieces, headers=JSONL).status_code == 413
        assert web.post("/v1/jobs", content=line * 8000, headers=JSONL).status_code == 413
        assert web.post("/v1/jobs", json={"texts": ["a" * 1000]}).status_code == 413
        assert web.post("/v1/embeddings", content=line * 1000, headers=JSONL).status_code == 413
    assert len(FarmClient(client).job_ids()) == 2
    assert not list((jobs / "uploads").iterdir())


def test_an_upload_that_breaks_off_is_removed(server: LiveServer, jobs: Path) -> None:
    """An upload is removed when its sender goes away or is too slow."""
    head = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
    head += b"content-length: 100\r\n\r\nbegun"
    settings = {"jobs_directory": jobs, "models": json.dumps([NULL])}
    with served(server, http_body_seconds=1, **settings) as (address, _):
        assert b"408" in say(address, head).partition(b"\r\n")[0]
        assert not left(jobs)
    with served(server, http_body_seconds=60, **settings) as (address, _):
        with socket.create_connection(address) as connection:
            connection.sendall(head)
            wait_until(lambda: left(jobs))
        wait_until(lambda: not left(jobs))


def test_the_same_request_makes_one_job(
    web: TestClient, client: redis.Redis, server: LiveServer, jobs: Path
) -> None:
    """A repeat with its Idempotency-Key gets the same answer; another request with it gets 422."""
    order = {"json": {"texts": ["a"]}, "headers": {"idempotency-key": "k"}}
    first = web.post("/v1/jobs", **order)  # type: ignore[arg-type] # as above
    again = web.post("/v1/jobs", **order)  # type: ignore[arg-type] # as above
    with client_of(server, models=(NULL, SLOW), jobs_directory=jobs) as other:
        later = other.post("/v1/jobs", **order)  # type: ignore[arg-type] # as above
    for answer in (again, later):
        assert (answer.status_code, answer.content) == (201, first.content)
        assert answer.headers["location"] == first.headers["location"]
    for another in ({"texts": ["b"]}, {"texts": ["a"], "name": "n"}):
        answer = web.post("/v1/jobs", json=another, headers={"idempotency-key": "k"})
        assert answer.status_code == 422
    assert len(FarmClient(client).job_ids()) == 1
    (key,) = client.scan_iter(wire.answer_key("*"))
    assert 0 < client.ttl(key) <= 86_400


def test_a_form_with_a_deadline_is_sent_again(web: TestClient) -> None:
    """A repeat of a form whose deadline counts from now is that form, and makes nothing new."""
    form: dict[str, Any] = {"files": {"file": ("a.txt", b"a\n")}, "data": {"deadline": "2h"}}
    headers = {"idempotency-key": "k"}
    first = web.post("/v1/jobs", headers=headers, **form)
    wait_until(lambda: read_deadline("2h") > first.json()["deadline_ms"])
    again = web.post("/v1/jobs", headers=headers, **form)
    assert (again.status_code, again.text) == (201, first.text)
    form["data"] = {"deadline": "3h"}
    assert web.post("/v1/jobs", headers=headers, **form).status_code == 422


def test_a_key_is_its_owners(
    server: LiveServer, client: redis.Redis, jobs: Path, keys: dict[str, tuple[str, Key]]
) -> None:
    """Two API keys may use the same Idempotency-Key; one without the scope may submit nothing."""
    known = [key for _, key in keys.values()]
    with client_of(server, known, models=(NULL,), jobs_directory=jobs) as web:
        answers = {
            scope: web.post(
                "/v1/jobs",
                json={"texts": ["a"]},
                headers={**bearer(secret), "idempotency-key": "k"},
            )
            for scope, (secret, _) in keys.items()
        }
    assert {scope: answer.status_code for scope, answer in answers.items()} == {
        "submit": 201, "admin": 201, "read": 403,
    }  # fmt: skip
    assert len(FarmClient(client).job_ids()) == 2


def test_concurrent_requests_make_one_job(web: TestClient, client: redis.Redis) -> None:
    """One of several requests at once is done; others get its answer, or 409 meanwhile."""
    barrier = threading.Barrier(8)

    def ask(_: int) -> tuple[int, bytes]:
        barrier.wait()
        answer = web.post("/v1/jobs", json={"texts": ["a"]}, headers={"idempotency-key": "k"})
        return answer.status_code, answer.content

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert {status for status, _ in answers} <= {201, 409}
    assert len({content for status, content in answers if status == 201}) == 1
    assert len(FarmClient(client).job_ids()) == 1


def test_a_request_whose_server_died_is_done_once(web: TestClient, client: redis.Redis) -> None:
    """A repeat of a request whose answer was never kept finds the job that was made for it."""
    order = {"json": {"texts": ["a"]}, "headers": {"idempotency-key": "k"}}
    first = web.post("/v1/jobs", **order).json()  # type: ignore[arg-type] # as above
    (key,) = client.scan_iter(wire.answer_key("*"))
    record = json.loads(client.get(key) or b"")
    client.set(key, json.dumps([*record[:2], None]))
    assert web.post("/v1/jobs", **order).json() == first  # type: ignore[arg-type] # as above
    client.set(key, json.dumps([*record[:2], None]))
    client.set(key.replace(b"answer", b"in-work"), 1)
    busy = web.post("/v1/jobs", **order)  # type: ignore[arg-type] # as above
    assert (busy.status_code, busy.headers["retry-after"]) == (409, "1")
    assert FarmClient(client).job_ids() == [first["job"]]


def forget_answer(client: redis.Redis) -> None:
    """Leave a record as a server leaves it that dies before it keeps the answer."""
    (key,) = client.scan_iter(wire.answer_key("*"))
    record = json.loads(client.get(key) or b"")
    client.set(key, json.dumps([*record[:2], None]))


def all_that_is_kept(client: redis.Redis, job: str, directory: Path) -> tuple[Any, ...]:
    """All that the server and the disk have of a job by HTTP."""
    request = client.hgetall(f"rq:job:http-{job}")
    queued = client.lrange("rq:queue:embedfarm", 0, -1)
    files = {path: path.stat().st_ino for path in directory.rglob("*")}
    return client.hgetall(wire.JobKeys(job).meta), request, queued, files


@pytest.mark.parametrize("state", ["open", "started", "cancelled", "failed", "finished"])
def test_a_repeat_finds_the_job_as_it_is(
    web: TestClient, client: redis.Redis, tmp_path: Path, jobs: Path, state: str
) -> None:
    """A repeat after a server died without keeping the answer changes nothing of the job.

    The repeat does not need the corpus any more, which may be gone since.
    """
    (tmp_path / "data").mkdir()
    source = write_corpus(tmp_path / "data" / "a.jsonl", ["a"])
    order = {"json": {"source": str(source)}, "headers": {"idempotency-key": "k"}}
    job = web.post("/v1/jobs", **order).json()["job"]  # type: ignore[arg-type] # as above
    if state == "cancelled":
        assert web.post(f"/v1/jobs/{job}/cancel").status_code == 200
    elif state in {"failed", "finished"}:
        FarmClient(client).end(job, cast("Any", state), "", Settings())
    if state not in {"open", "cancelled"}:
        client.hset(f"rq:job:http-{job}", "status", state)
        client.delete("rq:queue:embedfarm")
    source.unlink()
    forget_answer(client)
    before = all_that_is_kept(client, job, jobs / job)
    again = web.post("/v1/jobs", **order)  # type: ignore[arg-type] # as above
    assert (again.status_code, again.json()) == (201, facts(web, job))
    assert all_that_is_kept(client, job, jobs / job) == before


def test_a_repeat_does_what_was_left(web: TestClient, client: redis.Redis) -> None:
    """A repeat enqueues a job that was made only; one that left the farm is not made again."""
    order = {"json": {"texts": ["a"]}, "headers": {"idempotency-key": "k"}}
    job = web.post("/v1/jobs", **order).json()["job"]  # type: ignore[arg-type] # as above
    forget_answer(client)
    client.delete("rq:queue:embedfarm", f"rq:job:http-{job}")
    assert web.post("/v1/jobs", **order).json() == facts(web, job)  # type: ignore[arg-type] # as above
    assert client.lrange("rq:queue:embedfarm", 0, -1) == [f"http-{job}".encode()]
    forget_answer(client)
    FarmClient(client).job(job).delete()
    assert web.post("/v1/jobs", **order).status_code == 404  # type: ignore[arg-type] # as above
    assert not FarmClient(client).job_ids()


@contextlib.contextmanager
def outage_before_enqueueing(
    server: LiveServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let the server die when a job is made and not enqueued, and leave it a minute for repeats."""

    def look(*_: object) -> bool:
        server.kill()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Submissions, "is_forgotten", look)
        yield
    server.start()
    wait_until(client.ping)
    client.delete(*client.scan_iter(wire.in_work_key("*")))  # as a minute does


def test_an_outage_between_making_and_enqueueing_loses_no_job(
    web: TestClient,
    server: LiveServer,
    client: redis.Redis,
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeat enqueues, with its input, a job that was made just before the server went away."""
    order = {"json": {"texts": ["a"]}, "headers": {"idempotency-key": "k"}}
    with outage_before_enqueueing(server, client, monkeypatch):
        assert web.post("/v1/jobs", **order).status_code == 503  # type: ignore[arg-type] # as above
    job = web.post("/v1/jobs", **order).json()["job"]  # type: ignore[arg-type] # as above
    assert client.lrange("rq:queue:embedfarm", 0, -1) == [f"http-{job}".encode()]
    assert (jobs / job / "input.jsonl").is_file()


def test_what_was_made_and_not_enqueued_is_done_all_the_same(
    web: TestClient, server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A job whose HTTP server died before it was enqueued is done, though nobody asks again."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    client.delete("rq:queue:embedfarm", f"rq:job:http-{job}")
    with doing(server, tmp_path) as door:
        wait_for(web, job, "finished")
        wait_until(lambda: f"job {job} was made and not enqueued" in door.log())


def test_only_what_was_never_enqueued_is_enqueued(
    web: TestClient, client: redis.Redis, jobs: Path
) -> None:
    """Jobs by HTTP are enqueued that are unfinished and have neither an RQ job nor a run."""
    names = ("left", "enqueued", "damaged", "run", "cancelled", "bare", "emptied", "foreign")
    made = {name: web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"] for name in names}
    farm = FarmClient(client)
    for name, job in made.items():
        if name not in {"enqueued", "damaged"}:
            client.delete(f"rq:job:http-{job}")
    client.hset(f"rq:job:http-{made['damaged']}", "data", b"\xff")
    client.hset(wire.JobKeys(made["run"]).meta, "owner", "an output")
    farm.job(made["cancelled"]).cancel()
    shutil.rmtree(jobs / made["bare"])
    (jobs / made["emptied"] / "call.json").write_bytes(b"")
    client.delete(wire.JobKeys(made["foreign"]).meta)
    client.set(wire.JobKeys(made["foreign"]).meta, "text")
    farm.job("by command").create(JobSpec(model=NULL), 0)
    client.delete("rq:queue:embedfarm")
    submissions = Submissions(client, Settings(jobs_directory=jobs), client)
    assert [submissions.enqueue_forgotten() for _ in range(2)] == [[made["left"]], []]
    assert client.lrange("rq:queue:embedfarm", 0, -1) == [f"http-{made['left']}".encode()]


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\xc1",
        b"",
        b"something else",
        b"9" * 5000,
        b"[" * 100_000,
        b"{}",
        b"[]",
        b'["a", "b"]',
        b'["HASH", "../../elsewhere", null]',
        b'["HASH", "ID", 1]',
        b'["HASH", "ID", "no answer"]',
        b'["HASH", "ID", "[1]"]',
        b'["HASH", "ID", null, 4]',
        b'[1, "ID", null]',
        b'["\xff", "ID", null]',
    ],
)
def test_a_request_whose_record_cannot_be_read_is_refused(
    web: TestClient, client: redis.Redis, damage: bytes
) -> None:
    """A request whose record is damaged gets 409 with the key's name, and others go on."""
    order = {"texts": ["a"]}
    first = web.post("/v1/jobs", json=order, headers={"idempotency-key": "k"}).json()
    (key,) = client.scan_iter(wire.answer_key("*"))
    request, name, _ = json.loads(client.get(key) or b"")
    record = damage.replace(b"HASH", request.encode()).replace(b"ID", name.encode())
    client.set(key, record)
    for body in (order, {"texts": ["b"]}):
        answer = web.post("/v1/jobs", json=body, headers={"idempotency-key": "k"})
        assert answer.status_code == 409, answer.text
        assert f"{key.decode()} cannot be read" in answer.json()["detail"]
    assert client.get(key) == record
    assert FarmClient(client).job_ids() == [first["job"]]
    assert web.post("/v1/jobs", json=order, headers={"idempotency-key": "l"}).status_code == 201
    client.delete(key)
    assert web.post("/v1/jobs", json=order, headers={"idempotency-key": "k"}).status_code == 201


def test_cancelled_and_deleted_before_it_runs(
    web: TestClient, server: LiveServer, tmp_path: Path, jobs: Path
) -> None:
    """A job that is cancelled before it runs embeds nothing; deleted jobs leave no file."""
    names = [web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"] for _ in range(2)]
    assert web.post(f"/v1/jobs/{names[0]}/cancel").json()["state"] == "cancelled"
    with doing(server, tmp_path):
        wait_for(web, names[1], "finished")
    assert not (jobs / names[0] / "output").exists()
    for name in names:
        assert web.delete(f"/v1/jobs/{name}").status_code == 204
    assert not left(jobs)
    assert web.get("/v1/jobs").json()["jobs"] == []


def test_cancelled_when_its_worker_was_killed(web: TestClient, client: redis.Redis) -> None:
    """A job is cancelled although RQ lists an execution whose record is gone with its worker."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    request = TaskJob.fetch(f"http-{job}", client, "json")
    request.set_status(JobStatus.STARTED)
    client.zadd(request.execution_registry.key, {"killed": time.time() + 60})
    answer = web.post(f"/v1/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert TaskJob.fetch(f"http-{job}", client, "json").is_canceled


def test_a_bomb_fails_its_own_job(web: TestClient, server: LiveServer, tmp_path: Path) -> None:
    """A small upload that unpacks to one endless line is never unpacked whole."""
    bomb = gzip.compress(bytes(200 << 20))
    headers = JSONL | {"content-encoding": "gzip"}
    name = web.post("/v1/jobs", content=bomb, headers=headers).json()["job"]
    with doing(server, tmp_path):
        wait_for(web, name, "failed")
    assert "longer than 64 MiB" in web.get(f"/v1/jobs/{name}").json()["reason"]


def test_cancelled_while_it_runs(web: TestClient, server: LiveServer, tmp_path: Path) -> None:
    """A job that is cancelled while it runs ends with all that was embedded in order on disk."""
    order = {"texts": ["word " * 50] * 4000, "model": SLOW}
    job = web.post("/v1/jobs", json=order).json()["job"]
    with doing(server, tmp_path):
        wait_until(lambda: facts(web, job)["chunks_done"] > 0, START_SECONDS)
        assert web.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
        wait_until(lambda: facts(web, job)["ended_ms"] > 0, 60)
        cancelled = facts(web, job)
        assert cancelled["state"] == "cancelled"
        page = web.get(f"/v1/jobs/{job}/results", params={"limit": 9999})
        assert 0 < int(page.headers["x-next-start"]) == cancelled["drained_upto"]
        assert page.headers["x-state"] == "cancelled"
        assert web.delete(f"/v1/jobs/{job}").status_code == 204
    assert web.get(f"/v1/jobs/{job}").status_code == 404


def test_a_failed_job_says_why_and_is_tried_again(
    web: TestClient, server: LiveServer, tmp_path: Path, jobs: Path
) -> None:
    """A failed job has the command's words as its reason, and a retry does it again."""
    job = web.post("/v1/jobs", content=b"no json\n", headers=JSONL).json()["job"]
    assert web.post(f"/v1/jobs/{job}/retry").status_code == 409
    with doing(server, tmp_path):
        reason = wait_for(web, job, "failed")["reason"]
        assert reason.startswith("input.jsonl line 1"), "paths of the server are not for clients"
        assert "Traceback" not in reason
        (jobs / job / "input.jsonl").write_text('{"text": "a river"}\n')
        wait_until(lambda: web.post(f"/v1/jobs/{job}/retry").status_code == 202)
        out = wait_for(web, job, "finished")["out"]
        check_output(Path(out), ["a river"], 16)
        wait_until(lambda: "no chunk of it failed" in web.post(f"/v1/jobs/{job}/retry").text)


def test_a_job_that_is_deleted_as_soon_as_it_has_failed(
    web: TestClient, client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is deleted while its failure is handled leaves nothing behind."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    fail, states = Worker.handle_job_failure, list[str]()

    def delete(*words: Any) -> None:  # noqa: ANN401 -- as RQ has it
        fail(*words)
        states.append(facts(web, job)["state"])
        assert web.delete(f"/v1/jobs/{job}").status_code == 204

    monkeypatch.setattr(Worker, "handle_job_failure", delete)
    worker = TaskWorker(Settings(redis_url=server.url))
    request = TaskJob.fetch(f"http-{job}", worker.connection, "json")
    worker.handle_job_failure(request, worker.queues[0], exc_string="CommandFailed: no memory")
    worker.connection.close()
    assert states == ["failed"]
    assert not client.exists(f"rq:job:http-{job}")


def test_a_job_that_is_tried_again_as_soon_as_it_has_failed(
    web: TestClient, client: redis.Redis, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry that comes while a job's failure is handled waits for that, and is taken."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    fail = Worker.handle_job_failure
    with ThreadPoolExecutor(1) as pool:
        answers = list[Any]()

        def retry(*words: Any) -> None:  # noqa: ANN401 -- as RQ has it
            assert facts(web, job)["state"] == "failed"
            answers.append(pool.submit(web.post, f"/v1/jobs/{job}/retry"))
            wait_until(lambda: client.info("clients")["blocked_clients"])
            fail(*words)

        monkeypatch.setattr(Worker, "handle_job_failure", retry)
        worker = TaskWorker(Settings(redis_url=server.url))
        request = TaskJob.fetch(f"http-{job}", worker.connection, "json")
        worker.handle_job_failure(request, worker.queues[0], exc_string="CommandFailed: no memory")
        worker.connection.close()
        assert answers[0].result().status_code == 202, answers[0].result().text
    assert facts(web, job)["state"] == "queued"


def test_a_job_that_its_worker_gave_up_has_failed(
    web: TestClient, server: LiveServer, tmp_path: Path
) -> None:
    """A job whose command could not start has failed with the command's error as reason."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    (tmp_path / "jobs").rename(tmp_path / "away")
    with doing(server, tmp_path):
        reason = wait_for(web, job, "failed")["reason"]
    assert "no file and no directory" in reason


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_a_retry_reads_the_corpus_as_before(tmp_path: Path, encoding: str) -> None:
    """What failed is tried again with the options that made the output, its encoding among them."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("café\n", encoding=encoding)
    reading = embedfarm.Reading(encoding=encoding)
    embedfarm.embed(corpus, out=tmp_path / "out", model=NULL, reading=reading, progress=False)
    options = options_of(read_manifest(tmp_path / "out"))
    assert options.get("encoding", "utf-8") == encoding
    parquet_of(["a"], tmp_path / "corpus.parquet")
    reading = embedfarm.Reading(text="so: {text}", keep=["text"])
    made = embedfarm.embed(
        tmp_path / "corpus.parquet", out=tmp_path / "kept", model=NULL, reading=reading,
        progress=False,
    )  # fmt: skip
    options = options_of(made.manifest)
    assert (options["text"], options["keep"]) == ("so: {text}", ["text"])


def test_a_retry_says_what_was_said_as_nought(tmp_path: Path) -> None:
    """What failed is tried again with numbers that were given as 0 where that is not the default.

    The options of a retry are those of the output's request, so that it is theirs still.
    """
    (tmp_path / "corpus.txt").write_text("a river\n")
    base = ("embed", tmp_path / "corpus.txt", "--out", tmp_path / "out", "--json")
    run(*base, "--model", NULL, "--chunk-overlap=0", "--long=error", "--long-overlap=0")
    words = option_words(options_of(read_manifest(tmp_path / "out")), Settings())
    assert {"--chunk-overlap=0", "--long-overlap=0"} <= set(words)
    again = run(*base, *words)
    assert (again.returncode, json.loads(again.stdout)["finished_before"]) == (0, True)


@pytest.mark.farm
def test_a_retry_that_fails_is_told_of(
    web: TestClient,
    client: redis.Redis,
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finished job says why the retry of its failed chunks came to nothing, until one does it.

    A retry has the terms of the job, so that it is its tenant's.
    """
    monkeypatch.setenv(HEALED, str(tmp_path / "healed"))
    monkeypatch.setattr(model_store, "open_engine", open_poison_engine)
    terms = Terms(2, "red", 3, 2_211_732_000_250, "a,b", 1.5, 10.0)
    order = {"texts": ["a", f"{MARKER}raises"], **asdict(terms)}
    job = web.post("/v1/jobs", json=order).json()["job"]
    with doing(server, tmp_path):
        assert wait_for(web, job, "finished")["chunks_failed"] == 1
        corpus = next((tmp_path / "jobs" / job).glob("input.*"))
        before = corpus.read_bytes()
        corpus.write_bytes(before.replace(b'"a"', b'"b"'))
        assert web.post(f"/v1/jobs/{job}/retry").status_code == 202
        wait_until(lambda: facts(web, job)["reason"], START_SECONDS)
        failed = facts(web, job)
        corpus.write_bytes(before)
        (tmp_path / "healed").touch()
        assert web.post(f"/v1/jobs/{job}/retry").status_code == 202
        wait_until(lambda: not facts(web, job)["chunks_failed"], START_SECONDS)
    assert (failed["state"], failed["chunks_failed"]) == ("finished", 1)
    assert "other texts" in failed["reason"]
    assert str(tmp_path) not in failed["reason"], "paths of the server are not for clients"
    assert facts(web, job)["reason"] == ""
    for each in web.get("/v1/jobs").json()["jobs"]:
        assert {name: each[name] for name in asdict(terms)} == asdict(terms)
    assert len(FarmClient(client).ended_ids(9)) == 2


def test_a_job_that_is_deleted_while_it_is_retried(
    web: TestClient, client: redis.Redis, jobs: Path
) -> None:
    """What the farm still does for a retry ends when its job is deleted."""
    job = web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"]
    FarmClient(client).end(job, "finished", "", Settings())
    inner = make_job(client, 1, "inner")
    place = jobs / job / "output/.embedfarm/retry-1" / JOB_ID_FILE
    place.parent.mkdir(parents=True)
    place.write_text(f"{inner.id} owner\n")
    assert web.delete(f"/v1/jobs/{job}").status_code == 204
    status = inner.status()
    assert (status.state, status.ended) == ("cancelled", True)


def test_a_job_that_begins_anew_keeps_its_corpus(
    web: TestClient, client: redis.Redis, tmp_path: Path
) -> None:
    """A failed job that is tried again is still one of the runs of its corpus."""
    source = tmp_path / "data" / "a.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "a"}\n')
    job = web.post("/v1/jobs", json={"source": str(source)}).json()["job"]
    before = facts(web, job)["corpus"]
    FarmClient(client).end(job, "failed", "no memory", Settings())
    client.delete(f"rq:job:http-{job}")
    assert web.post(f"/v1/jobs/{job}/retry").json()["corpus"] == before != ""


def test_a_source_that_is_refused_may_be_corrected(web: TestClient, tmp_path: Path) -> None:
    """A request that names a wrong path has made nothing, and does not use up its key."""
    source = tmp_path / "data" / "a.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "a"}\n')
    once = {"idempotency-key": "k"}
    wrong = {"source": str(source.with_name("b.jsonl"))}
    assert web.post("/v1/jobs", json=wrong, headers=once).status_code == 403
    answer = web.post("/v1/jobs", json={"source": str(source)}, headers=once)
    assert answer.status_code == 201, answer.text


def test_cleanup_removes_what_nobody_knows(
    web: TestClient,
    client: redis.Redis,
    server: LiveServer,
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`cleanup` removes old directories whose job is gone, and no others."""
    names = [web.post("/v1/jobs", json={"texts": ["a"]}).json()["job"] for _ in range(2)]
    (jobs / "mine").mkdir()
    (jobs / "uploads" / "broken").touch()
    FarmClient(client).job(names[0]).delete()
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
    monkeypatch.setenv("EMBEDFARM_JOBS_DIRECTORY", str(jobs))
    assert cleanup()["directories"] == []
    for path in (*jobs.iterdir(), jobs / "uploads" / "broken"):
        os.utime(path, (0, 0))
    assert cleanup()["directories"] == names[:1]
    assert sorted(path.name for path in jobs.iterdir()) == sorted([names[1], "mine", "uploads"])
    assert not list((jobs / "uploads").iterdir())


def test_where_jobs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs lie below the state directory by default, and tasks may read and write there."""
    monkeypatch.delenv("EMBEDFARM_JOBS_DIRECTORY")
    settings = Settings(state_directory=Path("/state"))
    assert settings.jobs_path == Path("/state/jobs")
    assert Settings(jobs_directory=Path("/data/jobs")).task_roots[-1] == Path("/data/jobs")
