"""Tests of a worker's canaries: as the job embeds, once for each engine, and in nobody's way."""

import gc
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.canaries import TEXTS, canaries_of, likeness
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.canary_keeper import ENGINES_MAX, CanaryKeeper, embed_texts, make_canaries
from embedfarm.workers.engines.engine import DeviceFailed, Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.opening import open_engine
from tests.support import LiveServer, wait_until
from tests.workers.running import worker_on, working
from tests.workers.support import (
    NULL,
    FakeEngine,
    block_of,
    create_job,
    embedded,
    null_vectors,
    results,
)
from tests.workers.tiny_models import build


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"prompt": "Query: ", "normalize": True},
        {"dimensions": 8, "max_length": 12},
        {"long": "windows", "long_overlap": 4, "max_length": 24},
    ],
    ids=["plain", "prompt", "short", "windows"],
)
@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_they_are_embedded_as_a_job_embeds(
    tmp_path: Path, engine: str, asked: dict[str, Any]
) -> None:
    """Prompt, limit, dimensions and windows count, and both engines agree; a text is its own."""
    model = build("mean_pooled", tmp_path)
    spec = JobSpec(model=str(model), engine=engine, dtype="float32", **asked)
    opened = open_engine(spec, "cpu", Settings(engine_cache=tmp_path / "cache"))
    made = make_canaries(opened)
    assert made is not None
    assert made.texts == list(TEXTS)
    assert made.dimensions == asked.get("dimensions", 32)
    one_by_one = np.concatenate([embed_texts(opened, [text]) for text in TEXTS])
    assert likeness(made.matrix(), one_by_one).least > 0.99999
    if asked.get("long") != "windows":
        plain = SentenceTransformer(str(model), device="cpu")
        plain.max_seq_length = asked.get("max_length") or plain.max_seq_length
        expected = plain.encode(
            list(TEXTS), prompt=asked.get("prompt"), truncate_dim=asked.get("dimensions")
        )
        assert likeness(made.matrix(), expected).least > 0.99999


def test_a_text_that_fails_has_none() -> None:
    """Canaries over the limit of a job that fails such texts are zero, and the others are there."""

    class Strict(FakeEngine):
        """An engine that takes no text of over thirty characters."""

        def tokenise(self, chunks: Any) -> Tokenised:  # noqa: ANN401 # the protocol's
            """Say why single texts cannot be embedded."""
            made = super().tokenise(chunks)
            reasons = dict.fromkeys(np.flatnonzero(made.lengths > 30).tolist(), "too long")
            return Tokenised(made.lengths, made.features, reasons=reasons)

    made = make_canaries(Strict())
    assert made is not None
    has_one = made.matrix().any(axis=1)
    assert has_one.tolist() == [len(text) <= 30 for text in TEXTS]


def test_an_engine_that_raises_makes_none() -> None:
    """What a model raises over a canary costs no job anything; a failed device is a failed one."""

    class Raising(FakeEngine):
        """An engine that raises what it is told to."""

        error: Exception = ValueError("not this text")

        def refuse(self, _texts: Any) -> None:  # noqa: ANN401 # the fake's
            """Raise the error."""
            raise self.error

    engine = Raising()
    assert make_canaries(engine) is None
    keeper = CanaryKeeper()
    keeper.make(engine)
    assert (keeper.has(engine), keeper.of(engine)) == (True, None)
    engine.error = DeviceFailed("gone")
    with pytest.raises(DeviceFailed):
        make_canaries(engine)


def test_each_engine_makes_them_once() -> None:
    """Canaries are kept by engine as long as that lives, and an engine anew makes its own."""
    keeper = CanaryKeeper()
    first, second = FakeEngine(), FakeEngine()
    assert (keeper.has(first), keeper.of(first)) == (False, None)
    keeper.make(first)
    assert keeper.of(first) is keeper.of(first) is not None
    assert not keeper.has(second)
    number = id(first)
    del first
    gc.collect()
    keeper._made[id(second)] = keeper._made.pop(number)  # as if it had the number of the other
    assert (keeper.has(second), keeper.of(second)) == (False, None)
    engines = [FakeEngine() for _ in range(ENGINES_MAX + 2)]
    for each in engines:
        keeper.make(each)
    assert [keeper.has(each) for each in (engines[0], engines[-1])] == [False, True]


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


def lie(monkeypatch: pytest.MonkeyPatch, threads: set[str]) -> None:
    """Let null engines on some threads give other vectors, under the same fingerprint."""
    truth = NullEngine.forward

    def forward(
        engine: NullEngine, batch: Tokenised, rows: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        vectors = truth(engine, batch, rows)
        return vectors[:, ::-1].copy() if threading.current_thread().name in threads else vectors

    monkeypatch.setattr(NullEngine, "forward", forward)


def test_a_worker_with_other_vectors_does_no_harm(
    server: LiveServer, farm: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose files are the job's, and whose vectors are not, leaves the job to others."""
    blocks = [block_of(10 * at, 10) for at in range(30)]
    job = create_job(farm, blocks)
    honest = make_canaries(NullEngine.open(JobSpec(model=NULL)))
    assert honest is not None
    farm.reports.agree_on_canaries([("j", "")], honest, "float32")
    liar = worker_on(server, "cpu-1")
    lie(monkeypatch, {"liar"})
    with working(liar, name="liar"):
        wait_until(lambda: liar.name in farm.reports.refusals("j"))
        reason = farm.reports.refusals("j")[liar.name]
        assert "other vectors" in reason
        assert not results(job)
        with working(worker_on(server)):
            wait_until(lambda: job.status().chunks_done == 300)
    assert np.array_equal(embedded(job), null_vectors([t for b in blocks for t in b.texts]))
    assert {each.worker for each in results(job)} == {worker_on(server).name}
    assert not job.status().chunks_failed


def test_the_first_worker_notes_them(server: LiveServer, farm: FarmClient) -> None:
    """A worker that begins a job notes its canaries, which are those of the engine alone."""
    job = create_job(farm, [block_of(0, 5)])
    with working(worker_on(server)):
        wait_until(lambda: job.status().chunks_done == 5)
    known = farm.reports.canaries("j")
    assert known == canaries_of(null_vectors(TEXTS))
    assert msgspec.json.decode(msgspec.json.encode(known), type=type(known)) == known
