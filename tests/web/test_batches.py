"""Tests of OpenAI's files and batches: answers are those of `/v1/embeddings`."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest
import redis
from fastapi.testclient import TestClient
from rq import Worker
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.model_files import resolve
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.contract.token_ids import FILE, decode_ids
from embedfarm.contract.wire import JobKeys
from embedfarm.ingest.job_queue import Submissions
from embedfarm.ingest.openai_batches import Planner, find_model
from embedfarm.ingest.openai_files import ASKED, BATCH_INPUT
from embedfarm.ingest.task_job import TaskJob
from embedfarm.ingest.task_worker import TaskWorker
from embedfarm.ingest.tasks import embed_batch
from embedfarm.web.auth.keys import make_key
from tests.farm.harness import null_vectors, role, run
from tests.ingest.rq_farm import Door
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.test_gate import served
from tests.web.test_protocols import unit
from tests.web.test_submissions import forget_answer, outage_before_enqueueing
from tests.word_tokenizer import write_tokenizer
from tests.workers.running import worker_on, working

NULL: Final = "null:16"
SLOW: Final = "null:16:100"  # a text of one token in a hundredth of a second


def line(custom_id: str, model: str = NULL, **body: object) -> str:
    """A request of a batch."""
    asked = {"model": model, **body}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": asked}
    return json.dumps(request)


def lines_of(content: bytes) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(each) for each in content.splitlines()]


def vectors_of(answer: dict[str, Any]) -> list[Any]:
    """The vectors in a line of the output."""
    return [each["embedding"] for each in answer["response"]["body"]["data"]]


def finish(client: openai.OpenAI, batch: str) -> Any:  # noqa: ANN401 -- the client's type
    """Wait until a batch has ended, and return it."""
    ends = {"completed", "failed", "expired", "cancelled"}
    wait_until(lambda: client.batches.retrieve(batch).status in ends, 240)
    return client.batches.retrieve(batch)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The directory in which batches have theirs."""
    return tmp_path / "jobs"


@pytest.fixture
def web(server: LiveServer, client: redis.Redis, jobs: Path) -> Iterator[TestClient]:
    """An application whose batches are not worked on."""
    del client
    with client_of(server, models=(NULL,), jobs_directory=jobs) as web:
        yield web


def upload(web: TestClient, *lines: str) -> str:
    """Upload a file of requests, and return its id."""
    form = {"file": ("../x.jsonl", "\n".join(lines).encode())}
    answer = web.post("/v1/files", files=form, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def create(web: TestClient, file: str, **headers: str) -> dict[str, Any]:
    """Create a batch of a file, and return it."""
    asked = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    answer = web.post("/v1/batches", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_whole_batch(server: LiveServer, tmp_path: Path) -> None:
    """Each request of a batch is answered in order by `custom_id`, or named among the errors."""
    lines = [
        "no json",
        line("one", input="a river"),
        line("two", input=["a", "b"], encoding_format="base64", dimensions=8),
        line("other", input="a", model="null:8"),
        line("one", input="again"),
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat", "body": {}}),
        line("empty", input=[]),
        line("mixed", input=["a", [1]]),
        line("long", input="a", dimensions=17),
        line("ids", input=[1, 2]),
        line("form", input="a", encoding_format="hex"),
        "",
        line("last", input=["c"] * 3, user="u"),
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    settings: dict[str, Any] = {"jobs_directory": tmp_path / "jobs", "models": json.dumps([NULL])}
    door = Door(server, tmp_path)
    with (
        working(worker_on(server)),
        door.ingest(**settings),
        served(server, **settings) as ((host, port), _),
        openai.OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1") as client,
    ):
        file = client.files.create(file=path, purpose="batch")
        assert (file.filename, file.bytes) == ("requests.jsonl", path.stat().st_size)
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"a": "b"},
        )
        assert batch.status in {"validating", "in_progress"}
        client.files.delete(file.id)  # the batch has it still
        done = finish(client, batch.id)
        assert (done.status, done.metadata, done.model) == ("completed", {"a": "b"}, NULL)
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (12, 3, 9)
        answers = lines_of(client.files.content(done.output_file_id).content)
        errors = lines_of(client.files.content(done.error_file_id).content)
        files = client.files.list().data
        assert {each.id for each in files} == {done.output_file_id, done.error_file_id}
        assert [each.id for each in client.batches.list()] == [batch.id]
        facts = httpx.get(f"http://{host}:{port}/v1/jobs/{batch.id}").json()
        assert facts["reason"] == "9 of 12 requests have no answer, but an error"
    door.connection.close()
    assert [each["custom_id"] for each in answers] == ["one", "two", "last"]
    assert [each["response"]["status_code"] for each in answers] == [200] * 3
    full = unit(null_vectors(["a river", "c", "c", "c"], 16))
    np.testing.assert_allclose(vectors_of(answers[0]), full[:1], atol=1e-6)
    short = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors_of(answers[1])]
    np.testing.assert_allclose(short, unit(null_vectors(["a", "b"], 16)[:, :8]), atol=1e-6)
    np.testing.assert_allclose(vectors_of(answers[2]), full[1:], atol=1e-6)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        (None, "invalid_json_line"),
        ("other", "model_not_found"),
        ("one", "duplicate_custom_id"),
        ("chat", "invalid_url"),
        ("empty", "invalid_request"),
        ("mixed", "invalid_request"),
        ("long", "invalid_request"),
        ("ids", "invalid_request"),
        ("form", "invalid_request"),
    ]
    usage = [each["response"]["body"]["usage"]["total_tokens"] for each in answers]
    assert usage == [1, 2, 3]
    assert done.usage.total_tokens == 6


def test_the_real_model(server: LiveServer, tmp_path: Path) -> None:
    """A batch's vectors, also of token ids, are those of `encode`, and tokens its tokenizer's."""
    texts = ["A farm of devices.", "Vectors in order, " * 20, "naïve"]
    reference = SentenceTransformer(str(resolve(DEFAULT_MODEL)), device="cpu")
    wanted = np.asarray(reference.encode(texts), np.float32)
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    requests = [line("texts", DEFAULT_MODEL, input=texts), line("ids", DEFAULT_MODEL, input=ids)]
    settings: dict[str, Any] = {"jobs_directory": tmp_path / "jobs", "accept_token_ids": True}
    door = Door(server, tmp_path)
    with (
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"),
        door.ingest(**settings),
        served(server, **settings) as ((host, port), _),
        openai.OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1") as client,
    ):
        content = "\n".join(requests).encode()
        file = client.files.create(file=("a.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        done = finish(client, batch.id)
        answers = lines_of(client.files.content(done.output_file_id).content)
    door.connection.close()
    for answer in answers:
        assert (np.asarray(vectors_of(answer)) * wanted).sum(axis=1).min() >= 0.9999
        assert answer["response"]["body"]["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert done.request_counts.completed == 2


def test_files_are_kept_by_id(web: TestClient, jobs: Path) -> None:
    """Files are uploaded, listed by pages, read and deleted by id, whatever they are called."""
    names = [upload(web, str(number)) for number in range(5)]
    found: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": ""}
    while page["has_more"]:
        page = web.get("/v1/files", params={"limit": 2, "after": page["last_id"]}).json()
        found += [each["id"] for each in page["data"]]
    assert found == names[::-1]
    oldest = web.get("/v1/files", params={"order": "asc", "limit": 1}).json()["data"]
    assert [each["id"] for each in oldest] == names[:1]
    assert web.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
    assert web.get(f"/v1/files/{names[0]}").json()["filename"] == "../x.jsonl"
    assert web.get(f"/v1/files/{names[0]}/content").content == b"0"
    assert web.delete(f"/v1/files/{names[0]}").json()["deleted"] is True
    for path in (names[0], f"{names[0]}/content", "..%2F..", "file-x"):
        answer = web.get(f"/v1/files/{path}")
        assert answer.status_code == 404
    assert web.get(f"/v1/files/{names[0]}").json()["error"]["message"]
    for form in ({"purpose": "fine-tune"}, {}):
        answer = web.post("/v1/files", files={"file": b"a"}, data=form)
        assert (answer.status_code, "purpose" in answer.json()["error"]["message"]) == (400, True)
    assert not list((jobs / "uploads").iterdir())


def test_a_batch_is_cancelled(web: TestClient, client: redis.Redis) -> None:
    """A cancelled batch cancels its job; to cancel it a second time changes nothing."""
    batch = create(web, upload(web, line("a", input="a")))["id"]
    for _ in range(2):
        answer = web.post(f"/v1/batches/{batch}/cancel").json()
        assert (answer["status"], answer["output_file_id"]) == ("cancelled", None)
    assert FarmClient(client).job(batch).status().state == "cancelled"
    other = create(web, upload(web, line("a", input="a")))["id"]
    web.post(f"/v1/jobs/{other}/cancel")
    assert web.get(f"/v1/batches/{other}").json()["status"] == "cancelled"


def test_a_cancelled_batch_keeps_what_is_embedded(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A batch that is cancelled in the midst of it has answers up to there, and names the rest."""
    texts = {f"r{n}": [f"a{n}", f"b{n}", f"c{n}"] for n in range(200)}
    content = "\n".join(line(name, SLOW, input=some) for name, some in texts.items())
    settings: dict[str, Any] = {"jobs_directory": tmp_path / "jobs", "models": json.dumps([SLOW])}
    door = Door(server, tmp_path)
    with (
        working(worker_on(server)),
        door.ingest(**settings),
        served(server, **settings) as ((host, port), _),
        openai.OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1") as api,
    ):
        file = api.files.create(file=("a.jsonl", content.encode()), purpose="batch")
        batch = api.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        ).id

        def completed() -> int:
            counts = api.batches.retrieve(batch).request_counts
            return counts.completed if counts else 0

        wait_until(lambda: completed() > 20)
        api.batches.cancel(batch)
        done = finish(api, batch)
        answers = lines_of(api.files.content(done.output_file_id).content)
        errors = lines_of(api.files.content(done.error_file_id).content)
    door.connection.close()
    counts = done.request_counts
    assert (done.status, counts.total) == ("cancelled", 200)
    assert (counts.completed, counts.failed) == (len(answers), len(errors))
    assert 20 < counts.completed < 200
    assert [each["custom_id"] for each in answers + errors] == list(texts)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    for each in answers:
        wanted = unit(null_vectors(texts[each["custom_id"]], 16))
        np.testing.assert_allclose(vectors_of(each), wanted, atol=1e-6)
    assert done.usage.total_tokens == 3 * len(answers)
    assert done.created_at <= done.cancelling_at <= done.cancelled_at
    status = FarmClient(client).job(batch).status()
    assert (status.state, status.reason) == ("cancelled", "")


def test_a_batch_of_bad_requests_fails(web: TestClient, server: LiveServer, tmp_path: Path) -> None:
    """A batch of which no request can be done fails, and names each bad line."""
    batch = create(web, upload(web, "no json", "", line("a", input=[])))["id"]
    door = Door(server, tmp_path)
    with door.ingest(jobs_directory=tmp_path / "jobs", models=json.dumps([NULL])):
        wait_until(lambda: web.get(f"/v1/batches/{batch}").json()["status"] == "failed", 60)
    door.connection.close()
    answer = web.get(f"/v1/batches/{batch}").json()
    faults = answer["errors"]["data"]
    assert [(each["code"], each["line"]) for each in faults] == [
        ("invalid_json_line", 1),
        ("invalid_request", 3),
    ]
    assert answer["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    reason = web.get(f"/v1/jobs/{batch}").json()["reason"]
    assert reason.startswith("none of the 2 requests can be done; line 1: ")
    plan = tmp_path / "jobs" / batch / "output"
    (plan / "requests.jsonl").write_bytes(b"\xff\n")
    (plan / "ends.u64").unlink()
    [fault] = web.get(f"/v1/batches/{batch}").json()["errors"]["data"]
    assert fault["message"] == reason


def test_time_alone_ends_no_batch(web: TestClient, client: redis.Redis, jobs: Path) -> None:
    """A batch past its window goes on; one that was marked as expired stays so."""
    batch = create(web, upload(web, line("a", input="a")))["id"]
    path = jobs / batch / "batch.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created_at": 1000}))
    answer = web.get(f"/v1/batches/{batch}").json()
    assert (answer["status"], answer["expires_at"]) == ("validating", 1000 + 86_400)
    assert FarmClient(client).job(batch).status().state == "open"
    (jobs / batch / "stopped.json").write_text('{"state": "expired", "at": 90000}')
    answer = web.get(f"/v1/batches/{batch}").json()
    assert (answer["status"], answer["expired_at"]) == ("expired", 90_000)
    assert web.post(f"/v1/batches/{batch}/cancel").status_code == 409


def test_a_batch_without_requests_fails(
    web: TestClient, server: LiveServer, tmp_path: Path
) -> None:
    """A batch of an empty file fails, and says why in OpenAI's list of errors."""
    batch = create(web, upload(web, ""))["id"]
    door = Door(server, tmp_path)
    with door.ingest(jobs_directory=tmp_path / "jobs"):
        wait_until(lambda: web.get(f"/v1/batches/{batch}").json()["status"] == "failed", 60)
    door.connection.close()
    answer = web.get(f"/v1/batches/{batch}").json()
    assert "no request" in answer["errors"]["data"][0]["message"]
    assert answer["failed_at"] >= answer["created_at"]


def test_a_failed_batch_has_its_reason(
    web: TestClient, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has its reason from the moment that its RQ job has failed."""
    batch = create(web, upload(web, line("a", input="a")))["id"]
    fail, seen = Worker.handle_job_failure, list[Any]()

    def look(*words: Any) -> None:  # noqa: ANN401 -- as RQ has it
        fail(*words)
        seen.append(web.get(f"/v1/batches/{batch}").json()["errors"])

    monkeypatch.setattr(Worker, "handle_job_failure", look)
    worker = TaskWorker(Settings(redis_url=server.url))
    job = TaskJob.fetch(f"http-{batch}", worker.connection, "json")
    worker.handle_job_failure(job, worker.queues[0], exc_string="CommandFailed: no memory")
    worker.connection.close()
    assert [each["data"][0]["message"] for each in seen] == ["no memory"]


def test_a_batch_that_is_being_made(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is listed while it is being made is not shown as failed."""
    answer, seen = Submissions.answer, list[str]()

    def look() -> None:
        seen.extend(each["status"] for each in web.get("/v1/batches").json()["data"])

    def answer_seen(self: Submissions, batch: str, model: str) -> None:
        look()
        answer(self, batch, model)
        look()

    monkeypatch.setattr(Submissions, "answer", answer_seen)
    create(web, upload(web, line("a", input="a")))
    look()
    assert {*seen} == {"validating"}


@pytest.mark.parametrize("lost", ["answer", "batch"])
def test_a_repeat_finds_the_batch_as_it_is(
    web: TestClient, client: redis.Redis, jobs: Path, lost: str
) -> None:
    """A repeat, after a server died that kept no answer, finds the batch as it is: a failed one."""
    file = upload(web, line("a", input="a"))
    batch = create(web, file, **{"idempotency-key": "k"})
    FarmClient(client).end(batch["id"], "failed", "no luck", Settings())
    client.hset(f"rq:job:http-{batch['id']}", "status", "failed")
    client.delete("rq:queue:embedfarm")
    before = client.hgetall(JobKeys(batch["id"]).meta)
    web.delete(f"/v1/files/{file}")
    forget_answer(client)
    if lost == "batch":
        (jobs / batch["id"] / ASKED).unlink()
    again = create(web, file, **{"idempotency-key": "k"})
    assert again == web.get(f"/v1/batches/{batch['id']}").json()
    assert (again["id"], again["status"]) == (batch["id"], "failed")
    assert again["created_at"] == batch["created_at"]
    assert client.hgetall(JobKeys(batch["id"]).meta) == before
    assert not client.exists("rq:queue:embedfarm")


def test_files_of_a_batch_that_its_maker_left_unfinished(
    server: LiveServer, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has files of its tenant, though its server died before it wrote whose it is."""
    secret, key = make_key("ann", ["submit", "read"], "alpha")
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
    monkeypatch.setenv("EMBEDFARM_JOBS_DIRECTORY", str(jobs))
    monkeypatch.setenv("EMBEDFARM_MODELS", json.dumps([NULL]))
    with client_of(server, [key], models=(NULL,), jobs_directory=jobs) as web:
        web.headers["authorization"] = f"Bearer {secret}"
        file = upload(web, line("a", input="a"))
        batch = create(web, file, **{"idempotency-key": "k"})["id"]
        (jobs / batch / ASKED).unlink()
        with working(worker_on(server)):
            assert embed_batch(batch, NULL)["completed"] == 1
        with closing_client(server.url) as client:
            forget_answer(client)
        done = create(web, file, **{"idempotency-key": "k"})
        assert (done["id"], done["status"]) == (batch, "completed")
        content = web.get(f"/v1/files/{done['output_file_id']}/content")
        assert [each["custom_id"] for each in lines_of(content.content)] == ["a"], content.text


def test_an_outage_between_making_and_enqueueing_loses_no_batch(
    web: TestClient,
    server: LiveServer,
    client: redis.Redis,
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeat enqueues, with its input, a batch that was made before the server went away."""
    file = upload(web, line("a", input="a"))
    order = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    with outage_before_enqueueing(server, client, monkeypatch):
        lost = web.post("/v1/batches", json=order, headers={"idempotency-key": "k"})
        assert lost.status_code == 503
    batch = create(web, file, **{"idempotency-key": "k"})["id"]
    assert client.lrange("rq:queue:embedfarm", 0, -1) == [f"http-{batch}".encode()]
    assert (jobs / batch / BATCH_INPUT).is_file()


def test_a_batch_that_was_not_enqueued_is_answered_all_the_same(
    web: TestClient, client: redis.Redis, jobs: Path
) -> None:
    """A batch whose HTTP server died before it was enqueued is enqueued by those who answer it."""
    batch = create(web, upload(web, line("a", input="a")))["id"]
    client.delete("rq:queue:embedfarm", f"rq:job:http-{batch}")
    submissions = Submissions(client, Settings(jobs_directory=jobs), client)
    assert submissions.enqueue_forgotten() == [batch]
    request = TaskJob.fetch(f"http-{batch}", client, "json")
    assert request.func_name == "producer.tasks.embed_batch"
    assert request.kwargs == {"job_id": batch, "model": NULL}


def test_batches_by_pages_and_once(web: TestClient) -> None:
    """Batches are listed newest first, each once; an Idempotency-Key makes one batch."""
    file = upload(web, line("a", input="a"))
    names = [create(web, file)["id"] for _ in range(3)]
    assert create(web, file, **{"idempotency-key": "k"}) == create(
        web, file, **{"idempotency-key": "k"}
    )
    first = web.get("/v1/batches", params={"limit": 2}).json()
    assert first["has_more"]
    second = web.get("/v1/batches", params={"after": first["last_id"]}).json()
    assert [each["id"] for each in second["data"]] == names[1::-1]
    for wrong in (
        {"input_file_id": "file-none"},
        {"endpoint": "/v1/chat/completions"},
        {"completion_window": "1h"},
        {"metadata": {str(n): "" for n in range(17)}},
    ):
        asked = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        answer = web.post("/v1/batches", json=asked | wrong)
        assert answer.status_code in {400, 404}, wrong
        assert answer.json()["error"]["message"]
    assert web.get("/v1/batches/..%2Ffiles").status_code == 404
    assert web.get("/v1/batches/batch_none").status_code == 404


def test_the_model_of_a_batch(tmp_path: Path) -> None:
    """A batch's model is that of the first request that names a served one; others are refused."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["x", line("a", "none", input="a"), line("b", "m2", input="a")]))
    assert find_model(path, ["m1", "m2"], 9) == "m2"
    assert find_model(path, ["m1", "m2"], 2) == "m1"
    planner = Planner("m2", ["m1", "m2"], lambda _: [], Settings().lane_texts_max)
    request, texts = planner.read(line("a", "m1", input="a").encode())
    assert (request.code, texts) == ("mismatched_model", [])


def test_token_ids_below_zero_cost_their_request_only(tmp_path: Path) -> None:
    """A request with token ids that no text has is refused by itself, and not its batch."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / FILE))
    planner = Planner("m", ["m"], lambda rows: decode_ids(tokenizer, rows), 9)
    for name, ids in (("flat", [-5, 3]), ("rows", [[-5, 3]])):
        request, texts = planner.read(line(name, "m", input=ids).encode())
        assert (request.custom_id, request.code, texts) == (name, "invalid_request", [])


def test_a_command_refuses_another_file_or_model(server: LiveServer, tmp_path: Path) -> None:
    """A command answers the file and by the model that its output was begun with, or refuses."""
    path, out = tmp_path / "requests.jsonl", tmp_path / "out"
    environment = {"EMBEDFARM_MODELS": json.dumps([NULL, "null:8"])}

    def answer(*words: object) -> tuple[int, str]:
        command = ["batch", path, "--out", out, "--redis", server.url, *words]
        done = run(*command, environment=environment)
        return done.returncode, done.stderr

    first, second = line("a", input="one"), line("b", input="two")
    with working(worker_on(server)):
        path.write_text(first)
        assert answer()[0] == 0
        path.write_text(second)
        status, said = answer()
        assert (status, "belongs to another request" in said) == (2, True), said
        path.write_text(first)
        status, said = answer("--model", "null:8")
        assert (status, f"model: {NULL} before, null:8 now" in said) == (2, True), said
        (out / "plan.json").write_text("[1,0]")  # as a release of before has it
        assert answer()[0] == 0
    [only] = lines_of((out / "output.jsonl").read_bytes())
    assert only["custom_id"] == "a"
