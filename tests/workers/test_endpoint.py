"""Tests of a server that embeds in place of a device: its vectors, its failings, its changes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import redis
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.endpoint import EndpointEngine
from embedfarm.workers.engines.endpoint_client import RequestRefused
from embedfarm.workers.engines.engine import DeviceAway, Engine, ModelUnavailable
from embedfarm.workers.engines.opening import open_engine
from tests.support import LiveServer, wait_until
from tests.workers import tiny_models
from tests.workers.embedding_server import EmbeddingServer, listening
from tests.workers.running import Running, worker_on, working
from tests.workers.support import block_of, create_job, embedded, results
from tests.workers.tiny_models import LENGTH_MAX, SENTENCES, build

TEXTS: Final = (
    *SENTENCES,
    "one",
    "",
    "same",
    "same",
    "emoji 🦊🦊 and 漢字",
    "long " * 500,
    "x" * 900,
)
QUICK: Final = 1.0  # twice the seconds for which a server may be away
KINDS: Final = ["mean_pooled", "last_token_pooled", "dense_headed", "prompted", "routed"]
MODEL: Final = "mean_pooled"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The directory of each model."""
    return {kind: str(build(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model of the same shape with other weights."""
    return str(build(MODEL, tmp_path_factory.mktemp("other"), seed=1))


def strict(directory: str, task: str = "") -> EmbeddingServer:
    """A server that runs a model, and does not cut what is too long for it.

    What the model puts before texts is the client's to put there.
    """
    model = SentenceTransformer(directory, device="cpu")
    model.default_prompt_name = None
    encode = model.encode_document if task == "document" else model.encode
    server = EmbeddingServer(lambda texts: np.asarray(encode(list(texts)), np.float32))
    server.takes = lambda text: len(model.tokenizer(text)["input_ids"]) <= LENGTH_MAX
    return server


@pytest.fixture
def served(directories: dict[str, str]) -> Iterator[EmbeddingServer]:
    """A server that runs a model."""
    with listening(strict(directories[MODEL])) as found:
        yield found


def settings_for(served: EmbeddingServer, model: str, **changes: Any) -> Settings:  # noqa: ANN401 # any setting
    """Settings of a worker on a server."""
    return Settings(
        endpoint_url=served.url, endpoint_model=model, **{"hang_seconds": QUICK} | changes
    )


def opened(served: EmbeddingServer, model: str, **fields: Any) -> Engine:  # noqa: ANN401 # any field
    """The engine of a job on a server."""
    return open_engine(JobSpec(model=model, **fields), "cpu", settings_for(served, model))


def vectors_of(engine: Engine, texts: tuple[str, ...] = TEXTS) -> NDArray[np.float32]:
    """The vectors of texts, a row each."""
    batch = engine.tokenise(texts)
    return engine.forward(batch, np.arange(len(batch.lengths)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prompted"])
def test_vectors_and_tokens_are_those_of_the_model(kind: str, directories: dict[str, str]) -> None:
    """A server that cuts nothing is sent texts as the model itself would cut and prompt them."""
    model = directories[kind]
    task = "document" if kind == "routed" else ""
    with listening(strict(model, task)) as served:
        engine = opened(served, model, task=task)
        assert isinstance(engine, EndpointEngine)
        expected = engine.reference
        texts = tuple(text for text in TEXTS if text)
        assert cosine(vectors_of(engine, texts), vectors_of(expected, texts)).min() >= 0.9999
    lengths, counted = expected.tokenise(texts).lengths, engine.tokenise(texts).lengths
    assert lengths.tolist() == counted.tolist()
    assert max(len(request) for request in served.requests) <= served.texts_max


@pytest.mark.parametrize(
    "fields",
    [
        {"dimensions": 7},
        {"normalize": True, "dimensions": 9},
        {"max_length": 9},
        {"prompt": "q: "},
        {"long": "windows", "long_overlap": 4},
    ],
    ids=str,
)
def test_each_job_gets_what_it_asks_for(
    fields: dict[str, Any], served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """Dimensions, lengths, prompts and windows are the farm's, not the server's."""
    model = directories[MODEL]
    engine = opened(served, model)
    spec = JobSpec(model=model, **fields)
    ours = engine.for_job(spec)
    expected = open_engine(
        msgspec.structs.replace(spec, dtype="float32", engine="torch"), "cpu", Settings()
    )
    assert ours is not None
    assert np.allclose(vectors_of(ours), vectors_of(expected), atol=1e-5)
    assert ours.fingerprint == expected.fingerprint


def test_a_server_without_base64(served: EmbeddingServer, directories: dict[str, str]) -> None:
    """Vectors in plain numbers are read as well."""
    engine = opened(served, directories[MODEL])
    before = vectors_of(engine)
    served.base64 = False
    assert np.allclose(before, vectors_of(engine), atol=1e-6)


def test_a_server_that_is_busy_is_asked_again_when_it_says(
    served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """An answer of 429 is followed by the same request, not before the time that it names."""
    engine = opened(served, directories[MODEL])
    before = vectors_of(engine)
    served.refusals.append((429, {"retry-after": "0.3"}, "too many"))
    began = time.monotonic()
    assert np.allclose(before, vectors_of(engine), atol=1e-6)
    assert time.monotonic() - began >= 0.3
    assert not served.refusals


@pytest.mark.parametrize("wait", ["3600", "tomorrow"])
def test_a_server_that_stays_busy_is_given_up(
    wait: str, served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """A wait that is too long, and waits that add up to that, end with what the server says."""
    engine = opened(served, directories[MODEL])
    served.refusals.extend([(503, {"retry-after": wait}, "overloaded")] * 1000)
    with pytest.raises(DeviceAway, match="HTTP status 503: overloaded"):
        vectors_of(engine)


def test_a_server_that_restarts_is_waited_for(
    served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """A device batch of a server that is away for a moment comes out as if nothing had been."""
    engine = opened(served, directories[MODEL])
    before = vectors_of(engine)
    served.stop()
    batch = engine.tokenise(TEXTS)
    finish = engine.start(batch, np.arange(len(TEXTS)))
    served.start()
    assert np.allclose(before, finish(), atol=1e-6)
    served.stop()
    with pytest.raises(DeviceAway, match="does not embed now"):
        vectors_of(engine)


def test_another_model_behind_the_url_is_noticed_at_once(
    served: EmbeddingServer, directories: dict[str, str], other: str
) -> None:
    """The very first answer of another model is not used, whatever its vectors' dimensions."""
    engine = opened(served, directories[MODEL])
    model = SentenceTransformer(other, device="cpu")
    served.embed = lambda texts: np.asarray(model.encode(list(texts)), np.float32)
    with pytest.raises(DeviceAway, match="other vectors than the model here: cosine"):
        vectors_of(engine, ("one",))
    served.embed = lambda texts: np.ones((len(texts), 5), np.float32)
    with pytest.raises(DeviceAway, match="5 dimensions, and the model's have 32"):
        vectors_of(engine, ("one",))
    served.embed = lambda texts: np.full((len(texts), 32), np.nan, np.float32)
    with pytest.raises(DeviceAway, match="cosine nan"):
        vectors_of(engine, ("one",))


def test_what_a_server_is_refused_for(
    served: EmbeddingServer, directories: dict[str, str], other: str
) -> None:
    """Each reason not to work with a server is said; one that passes is told apart."""
    model = directories[MODEL]
    served.key = "the secret"
    with pytest.raises(ModelError, match="HTTP status 401: no such key") as refused:
        opened(served, model)
    assert not isinstance(refused.value, ModelUnavailable)
    served.key, served.names = "", ["this", "that"]
    with pytest.raises(ModelError, match=r"has no model '.*', but this, that"):
        opened(served, model)
    served.names = None
    served.embed = strict(other).embed
    with pytest.raises(ModelError, match="other vectors than the model here"):
        opened(served, model)
    served.stop()
    with pytest.raises(ModelUnavailable, match="does not embed now"):
        opened(served, model)


def test_a_server_that_cuts_texts_sooner_is_refused(
    served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """A server with a lower limit than the model's would make other vectors of long texts."""
    model = SentenceTransformer(directories[MODEL], device="cpu")
    model.max_seq_length = LENGTH_MAX // 2
    served.embed = lambda texts: np.asarray(model.encode(list(texts)), np.float32)
    with pytest.raises(ModelError, match="cut or prompted in another way"):
        opened(served, directories[MODEL])


def test_a_server_that_cuts_long_texts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that a server would cut fail by name; those that it takes as a whole have vectors."""
    monkeypatch.setattr(tiny_models, "LENGTH_MAX", 4096)
    model = str(build(MODEL, tmp_path))
    cutting = SentenceTransformer(model, device="cpu")
    server = EmbeddingServer(lambda texts: np.asarray(cutting.encode(list(texts)), np.float32))
    texts = tuple(SENTENCES[0] * few + SENTENCES[1] * many for few, many in ((1, 0), (60, 60)))
    long = (*texts, SENTENCES[0] * 100 + SENTENCES[1] * 120)
    with listening(server) as served:
        expected = vectors_of(opened(served, model).exact_twin, long)  # type: ignore[arg-type]
        assert cosine(vectors_of(opened(served, model), long), expected).min() >= 0.9999
        cutting.max_seq_length = 2048
        engine = opened(served, model)
        assert cosine(vectors_of(engine, texts), expected[:2]).min() >= 0.9999
        asked = len(served.requests)
        for _ in range(2):
            with pytest.raises(RequestRefused, match="2,048 tokens, and cuts those of 4,096"):
                vectors_of(engine, long)
        assert len(served.requests) == asked + 1
        assert cosine(vectors_of(engine, texts), expected[:2]).min() >= 0.9999


def test_a_model_that_keeps_the_ends_of_texts_is_refused(
    served: EmbeddingServer, tmp_path: Path
) -> None:
    """Texts for a server are cut at their ends; a model that keeps those is not served."""
    file = build(MODEL, tmp_path) / "tokenizer_config.json"
    ends = {"truncation_side": "left"}
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | ends))
    with pytest.raises(ModelError, match="beginnings"):
        opened(served, str(file.parent))


def test_a_prompt_that_the_model_pools_without(directories: dict[str, str]) -> None:
    """A server that knows nothing of a prompt cannot leave it out of the mean; that is noticed."""
    model = directories["prompted"]
    with (
        listening(strict(model)) as served,
        pytest.raises(ModelError, match="prompted in another way"),
    ):
        opened(served, model)


def test_a_prompt_of_a_job_that_the_model_pools_without(tmp_path: Path) -> None:
    """A model that leaves prompts out of its mean serves jobs without one, and no others."""
    file = build("prompted", tmp_path) / "config_sentence_transformers.json"
    without = msgspec.json.decode(file.read_bytes()) | {"default_prompt_name": None}
    file.write_bytes(msgspec.json.encode(without))
    model = str(file.parent)
    with listening(strict(model)) as served:
        engine = opened(served, model)
        assert np.allclose(vectors_of(engine), vectors_of(engine.exact_twin), atol=1e-5)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="leaves the prompt out"):
            engine.for_job(JobSpec(model=model, prompt="q: "))
        with pytest.raises(ModelError, match="leaves the prompt out"):
            opened(served, model, prompt_name="query")


def test_a_server_that_scales_vectors(directories: dict[str, str]) -> None:
    """A server that makes all lengths 1 serves jobs that want them so, and no others."""
    model = directories["dense_headed"]
    plain = SentenceTransformer(model, device="cpu")
    scaled = EmbeddingServer(
        lambda texts: np.asarray(plain.encode(list(texts), normalize_embeddings=True), np.float32)
    )
    with listening(scaled) as served:
        with pytest.raises(ModelError, match="serves jobs that want them so"):
            opened(served, model)
        engine = opened(served, model, normalize=True)
        assert np.allclose(vectors_of(engine), vectors_of(engine.exact_twin), atol=1e-5)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="serves jobs that want them so"):
            engine.for_job(JobSpec(model=model))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "null:8"}, "no other model"),
        ({"engine": "torch"}, "no engine 'torch'"),
        ({"dtype": "bfloat16"}, "computes in float32"),
    ],
)
def test_jobs_that_are_not_for_a_server(
    fields: dict[str, Any],
    reason: str,
    served: EmbeddingServer,
    directories: dict[str, str],
) -> None:
    """Jobs for other models, engines or types are refused before anything is loaded or asked."""
    model = directories[MODEL]
    spec = JobSpec(**{"model": model} | fields)
    with pytest.raises(ModelError, match=reason):
        open_engine(spec, "cpu", settings_for(served, model))
    assert not served.requests


def test_the_key_is_sent_and_not_shown(
    served: EmbeddingServer, directories: dict[str, str]
) -> None:
    """The key goes with each request, and into nothing that is printed."""
    served.key = "the secret"
    model = directories[MODEL]
    settings = settings_for(served, model, endpoint_key=served.key)
    engine = open_engine(JobSpec(model=model), "cpu", settings)
    assert len(vectors_of(engine, ("one",)))
    assert served.key not in f"{engine!r} {settings!r} {settings.model_dump_json()}"
    assert served.key in settings.environment().values()


# A whole worker.


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


def test_a_text_that_a_server_does_not_take_fails_alone(
    served: EmbeddingServer, farm: FarmClient, server: LiveServer, directories: dict[str, str]
) -> None:
    """The other texts of its requests are embedded, in order."""
    model = directories[MODEL]
    served.takes = lambda text: text != "chunk 13"
    job = create_job(farm, [block_of(0, 40)], model=model)
    settings = {"endpoint_url": served.url, "endpoint_model": model}
    with working(worker_on(server, "endpoint-a-1", **settings)):
        wait_until(lambda: job.status().chunks_done == 40)
    (result,) = results(job)
    ((place, reason),) = [(error.index, error.reason) for error in result.errors]
    assert place == 13
    assert "not to our liking" in reason
    reference = SentenceTransformer(model, device="cpu").encode([f"chunk {i}" for i in range(40)])
    kept = [row for row in range(40) if row != 13]
    assert cosine(embedded(job)[kept], np.asarray(reference)[kept]).min() >= 0.9999


def test_a_server_that_goes_away_costs_no_try(
    served: EmbeddingServer, farm: FarmClient, server: LiveServer, directories: dict[str, str]
) -> None:
    """However often a worker's server goes away, its blocks are neither split nor given up."""
    model = directories[MODEL]
    job = create_job(farm, [block_of(0, 8), block_of(8, 8)], model=model)
    settings = {
        "endpoint_url": served.url,
        "endpoint_model": model,
        "hang_seconds": 4 * QUICK,  # on a busy machine a thread may wait longer than for QUICK
        "deliveries_max": 1,
    }
    served.is_busy = lambda texts: any("chunk" in text for text in texts)
    for _ in range(2):
        running = Running(worker_on(server, "endpoint-a-1", **settings))
        try:
            running.end()
        finally:
            running.stop()
        assert isinstance(running.error, DeviceAway)
    assert not job.status().chunks_done
    served.is_busy = lambda _texts: False
    with working(worker_on(server, "endpoint-a-1", **settings)):
        wait_until(lambda: job.status().chunks_done == 16)
    assert [(result.start, result.count) for result in results(job)] == [(0, 8), (8, 8)]
    assert not any(result.errors for result in results(job))
