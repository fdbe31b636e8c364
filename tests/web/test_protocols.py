"""Tests of OpenAI's and TEI's protocols: real clients get the model's own vectors."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import msgspec
import numpy as np
import openai
import pytest
import redis
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.hyperplanes import hash_once
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.lane import Lane
from embedfarm.contract.model_files import resolve
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.web.auth.keys import make_key
from embedfarm.web.http.tokenizers import tokenizer_of
from tests.contract.little_job import heartbeat
from tests.farm.harness import null_vectors, role
from tests.support import LiveServer, wait_until
from tests.web.conftest import client_of
from tests.web.test_gate import served
from tests.workers.running import worker_on, working

NULL = "null:16"
TEXTS = ["one", "", "x" * 5000]


@pytest.fixture
def null(server: LiveServer) -> Iterator[TestClient]:
    """An application that serves the null model, with a worker."""
    with working(worker_on(server)), client_of(server, models=(NULL,)) as web:
        yield web


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors of length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def embed(web: TestClient, **request: object) -> NDArray[np.float32]:
    """Vectors by OpenAI's route."""
    answer = web.post("/v1/embeddings", json={"model": NULL, **request})
    assert answer.status_code == 200, answer.text
    rows = [each["embedding"] for each in answer.json()["data"]]
    if request.get("encoding_format") == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    return np.asarray(rows, np.float32)


def test_vectors_are_the_models(null: TestClient) -> None:
    """Vectors come in input order, of length 1, as numbers or bytes, cut where wanted."""
    wanted = null_vectors(TEXTS, 16)
    for form in ("float", "base64"):
        found = embed(null, input=TEXTS, encoding_format=form)
        np.testing.assert_allclose(found, unit(wanted), atol=1e-6)
    np.testing.assert_allclose(embed(null, input="one"), unit(wanted[:1]), atol=1e-6)
    short = embed(null, input=TEXTS, dimensions=4)
    np.testing.assert_allclose(short, unit(wanted[:, :4]), atol=1e-6)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"input": []}, 400),
        ({"input": [[]]}, 400),
        ({"input": [1.5]}, 400),
        ({"input": ["a", 1]}, 400),
        ({"input": "a", "dimensions": 17}, 400),
        ({"input": "a", "dimensions": 0}, 400),
        ({"input": "a", "encoding_format": "hex"}, 400),
        ({"input": ["a"] * 2049}, 400),
        ({"input": [1, 2]}, 400),  # a null model has no token ids
        ({"input": "a", "model": "../../etc"}, 404),
    ],
)
def test_errors_are_openais(null: TestClient, request_: dict[str, object], status: int) -> None:
    """A request that cannot be answered gets an error in the shape of OpenAI's client."""
    answer = null.post("/v1/embeddings", json={"model": NULL, **request_})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert answer.json()["error"]["message"]


def test_models_have_a_state(null: TestClient, client: redis.Redis) -> None:
    """The best state on any worker is the model's, and those are named that have it loaded."""
    farm, key = FarmClient(client), model_key(JobSpec(model=NULL))
    failed = ModelState(model=key, state="failed", since=1.0, reason="no memory")
    loading, ready = (
        msgspec.structs.replace(failed, state=state, reason="") for state in ("loading", "ready")
    )
    for beats, state, workers in (
        ({}, "unloaded", []),
        ({"one": failed}, "failed", []),
        ({"two": loading}, "loading", []),
        ({"three": ready}, "ready", ["three"]),
    ):
        for name, each in beats.items():
            farm.beat(msgspec.structs.replace(heartbeat(name), models=[each]), 60)
        (listed,) = null.get("/v1/models").json()["data"]
        assert (listed["state"], listed["workers"]) == (state, workers)
        assert null.get(f"/v1/models/{NULL}").json() == listed


SHAPES: Final = "must be a text, a list of texts, a list of token ids, or a list of such lists"


@pytest.mark.parametrize(
    ("request_", "param", "code", "message"),
    [
        ({"input": {}}, "input", "invalid_value", f"body.input: {SHAPES}"),
        ({"input": []}, "input", "invalid_value", "body.input: List should have at least 1"),
        ({"input": ["a", 1]}, "input.1", "invalid_value", "body.input.1: Input should be a valid"),
        ({"input": [[1], [-1]]}, "input.1.0", "invalid_value", "body.input.1.0: Input should be"),
        ({}, "input", "invalid_value", "body.input: Field required"),
        ({"input": "a", "model": "no"}, "model", "model_not_found", "model 'no' is not served"),
    ],
)
def test_what_is_wrong_is_named(
    null: TestClient, request_: dict[str, object], param: str, code: str, message: str
) -> None:
    """An error has the field that is at fault and a code, in words that a client's user knows."""
    answer = null.post("/v1/embeddings", json={"model": NULL, **request_})
    fault = answer.json()["error"]
    assert (fault["param"], fault["code"]) == (param, code)
    assert fault["message"].startswith(message), fault
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_route_of_openais_that_is_not_here(null: TestClient) -> None:
    """What OpenAI has and the farm has not is refused in the shape that its clients read."""
    answer = null.post("/v1/chat/completions", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    first = answer.headers["x-request-id"]
    assert first != null.get("/v1/models").headers["x-request-id"]


def test_null_is_the_default(null: TestClient) -> None:
    """Fields that a client sends as null have their defaults."""
    fields: dict[str, object] = {"encoding_format": None, "dimensions": None, "user": None}
    np.testing.assert_array_equal(embed(null, input="one", **fields), embed(null, input="one"))


def test_tei_routes(null: TestClient) -> None:
    """`/embed`, `/rerank`, `/lsh` and `/info` say the same vectors in TEI's words."""
    wanted = null_vectors(TEXTS, 16)
    found = null.post("/embed", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(found, unit(wanted), atol=1e-6)
    (one,) = null.post("/embed", json={"inputs": "one"}).json()
    np.testing.assert_allclose(one, unit(wanted)[0], atol=1e-6)
    ranked = null.post(
        "/rerank", json={"query": "one", "texts": ["two", "one"], "return_text": True}
    ).json()
    assert [(each["index"], each["text"]) for each in ranked] == [(1, "one"), (0, "two")]
    assert ranked[0]["score"] == pytest.approx(1, abs=1e-6)
    for seed in (0, 7):
        asked = {"inputs": TEXTS, "bitn": 128, "seed": seed}
        bits = hash_once(wanted, 128, seed)
        assert null.post("/lsh", json=asked).json() == [row.tobytes().hex() for row in bits]
        coded = null.post("/lsh", json={**asked, "encoding": "base64"}).json()
        assert [base64.b64decode(each) for each in coded] == [row.tobytes() for row in bits]
    for wrong in ({"bitn": 56}, {"bitn": 8200}, {"bitn": 100}, {"seed": -1}):
        assert null.post("/lsh", json={"inputs": "a", **wrong}).status_code == 422
    named = null.post("/embed", json={"inputs": "a", "prompt_name": "query"})
    assert (named.status_code, "no prompt 'query'" in named.json()["detail"]) == (404, True)
    info = null.get("/info").json()
    assert (info["model_id"], info["max_client_batch_size"]) == (NULL, 2048)


def test_all_that_tei_takes(null: TestClient) -> None:
    """The fields of TEI's clients have their effect, at `/embed` and at the root alike."""
    wanted = unit(null_vectors(TEXTS, 16)[:, :4])
    request = {"inputs": TEXTS, "dimensions": 4, "encoding_format": "base64", "normalize": None}
    for path in ("/", "/embed"):
        coded = null.post(path, json={**request, "truncation_direction": "Right"}).json()
        found = np.asarray([np.frombuffer(base64.b64decode(row), "<f4") for row in coded])
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert null.post("/embed", json={"inputs": "a", "dimensions": 17}).status_code == 422
    assert (
        null.post("/embed", json={"inputs": "a", "truncation_direction": "Left"}).status_code == 422
    )


def test_what_openai_takes(null: TestClient) -> None:
    """2,048 texts of 300,000 tokens together are taken, and a limit is named that is exceeded."""
    texts = ["word " * 146] * 2048
    assert embed(null, input=texts).shape == (2048, 16)
    for more, limit in (
        (["a"] * 2049, "LANE_TEXTS"),
        (["x" * (1 << 20)] * 3 + ["x"], "LANE_BYTES"),
    ):
        answer = null.post("/embed", json={"inputs": more})
        assert f"EMBEDFARM_{limit}_MAX" in answer.json()["detail"], answer.text


def test_a_full_lane_says_when_to_come_again(server: LiveServer, client: redis.Redis) -> None:
    """A full lane or program answers 429 with Retry-After, and other routes are served."""
    request = {"inputs": "a"}
    with (
        client_of(server, models=(NULL,), lane_seconds_max=60, lane_pieces_max=1) as web,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(web.post, "/embed", json=request)
        wait_until(lambda: Lane(client).asked())
        full = web.post("/embed", json=request)
        assert (full.status_code, int(full.headers["retry-after"]) > 0) == (429, True)
        web.app.state.interactive.waiting_max = 1  # type: ignore[attr-defined] # of FastAPI
        busy = web.post("/embed", json=request)
        assert (busy.status_code, "1 requests wait" in busy.json()["detail"]) == (429, True)
        assert web.get("/livez").status_code == 200
        with working(worker_on(server)):
            assert waiting.result().status_code == 200
    with client_of(server, models=(NULL,), lane_seconds_max=0.1) as web:
        assert web.post("/embed", json=request).status_code == 503  # nobody works


def test_tokens_are_the_models(server: LiveServer, client: redis.Redis, web: TestClient) -> None:
    """Tokens come with ids and their characters; ids are refused, or those that no text has."""
    del client
    text = "Micro-batches, naïvely embedded."
    (tokens,) = web.post("/tokenize", json={"inputs": text}).json()
    assert (tokens[0]["text"], tokens[0]["special"]) == ("[CLS]", True)
    assert "".join(each["text"] for each in tokens[1:-1]) == text.replace(" ", "")
    assert all(text[t["start"] : t["stop"]] == t["text"] for t in tokens[1:-1])
    plain = web.post("/tokenize", json={"inputs": [text], "add_special_tokens": False}).json()
    assert plain == [tokens[1:-1]]
    tokenizer = tokenizer_of(DEFAULT_MODEL, Settings())
    broken = [tokenizer.token_to_id("##ing"), tokenizer.token_to_id("##ing")]
    with client_of(server, accept_token_ids=True) as taking:
        for asked, said in ((web, "check_embedding_ctx_length=False"), (taking, "input 0")):
            for ids in (broken, [10**6]):
                answer = asked.post("/v1/embeddings", json={"model": DEFAULT_MODEL, "input": ids})
                assert answer.status_code == 400
                assert said in answer.json()["error"]["message"]


def test_the_openai_client(server: LiveServer, tmp_path: Path) -> None:
    """OpenAI's own client gets the vectors of `encode`, and real token counts."""
    secret, key = make_key("ann", ["submit", "read"])
    file = tmp_path / "keys"
    file.write_text(key.line() + "\n")
    texts = ["A farm of devices.", "Vectors in order, " * 20, "naïve"]
    reference = SentenceTransformer(str(resolve(DEFAULT_MODEL)), device="cpu")
    wanted = np.asarray(reference.encode(texts), np.float32)
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    with (
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"),
        served(server, keys_file=file, accept_token_ids=True) as ((host, port), _),
        openai.OpenAI(api_key=secret, base_url=f"http://{host}:{port}/v1") as client,
    ):
        assert [each.id for each in client.models.list()] == [DEFAULT_MODEL]
        assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL
        assert dict(client.models.retrieve(DEFAULT_MODEL))["state"] == "unloaded"
        answer = client.embeddings.create(model=DEFAULT_MODEL, input=texts, user="u")
        found = np.asarray([each.embedding for each in answer.data])
        assert (found * wanted).sum(axis=1).min() >= 0.9999
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        floats = client.embeddings.create(
            model=DEFAULT_MODEL, input=ids, encoding_format="float", dimensions=128
        )
        short = np.asarray([each.embedding for each in floats.data])
        assert short.shape == (3, 128)
        assert (short * unit(wanted[:, :128])).sum(axis=1).min() >= 0.9999
        request = {"inputs": "a", "normalize": False}
        bearer = {"authorization": f"Bearer {secret}"}
        plain = httpx.post(f"http://{host}:{port}/embed", json=request, headers=bearer)
        assert (plain.status_code, "length 1" in plain.json()["detail"]) == (422, True)
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.embeddings.create(model="none", input="a")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=DEFAULT_MODEL, input="a", dimensions=999)
    with (
        served(server, keys_file=file) as ((host, port), _),
        openai.OpenAI(api_key="wrong", base_url=f"http://{host}:{port}/v1") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
