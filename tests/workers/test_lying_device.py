"""Devices that begin to compute wrongly in mid-job: none of their wrong vectors is stored."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import redis
import torch
from numpy.typing import NDArray

from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.canary_keeper import ComputesWrongly, embed_texts
from embedfarm.workers.engines.engine import Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from tests.support import LiveServer, wait_until
from tests.workers.running import Running, worker_on, working
from tests.workers.support import NULL, block_of, embedded, plan_blocks

LIAR: Final = "liar"  # the thread that drives the device which begins to lie
CHUNKS: Final = 200

Lie: TypeAlias = Callable[[Any, Callable[[], NDArray[np.float32]]], NDArray[np.float32]]


def of_another_text() -> Lie:
    """Give each text the vector of the one before it, in this device batch or the last one."""
    last: list[NDArray[np.float32]] = []

    def lie(_engine: object, truth: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        vectors = truth()
        before = last[0] if last else vectors[-1:]
        last[:] = [vectors[-1:].copy()]
        return np.concatenate([before, vectors[:-1]])

    return lie


def of_changed_weights(random: Random) -> Lie:
    """Compute with weights that were damaged: all a little, or one matrix for good."""
    damaged: list[object] = []

    def lie(engine: Any, truth: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:  # noqa: ANN401 # has a model
        if not damaged:
            named = engine.model.named_parameters()
            weights = [each for name, each in named if each.dim() == 2 and "pooler" not in name]
            with torch.inference_mode():
                for each in random.choice([weights, random.sample(weights, 1)]):
                    each.add_(each.std() * torch.randn(each.shape))
            damaged.append(engine)
        return truth()

    return lie


def begin_to_lie(monkeypatch: pytest.MonkeyPatch, engine: type, lie: Lie, after: int) -> None:
    """Let an engine lie on the liar's thread, once it has embedded so many device batches."""
    method = "forward" if engine is NullEngine else "start"  # the one that the other one calls
    truth, left = getattr(engine, method), [after]

    def embed(self: object, batch: Tokenised, rows: NDArray[np.intp]) -> Any:  # noqa: ANN401 # vectors, or what returns them
        if threading.current_thread().name != LIAR:
            return truth(self, batch, rows)
        left[0] -= 1
        if left[0] >= 0:
            return truth(self, batch, rows)
        if method == "forward":
            return lie(self, partial(truth, self, batch, rows))
        vectors = lie(self, truth(self, batch, rows))
        return lambda: vectors

    monkeypatch.setattr(engine, method, embed)


def run(server: LiveServer, farm: FarmClient, model: str, name: str) -> BaseException | None:
    """Embed a job with the liar and then another worker; check it, and return the liar's error."""
    spec = JobSpec(model=model, engine="auto" if model == NULL else "torch", dtype="float32")
    job = farm.job(name)
    job.create(spec, 0)
    blocks = [block_of(4 * at, 4, f"text of {name}") for at in range(CHUNKS // 4)]
    job.push([(block, encode(block)) for block in blocks])
    job.close(CHUNKS)
    worker = worker_on(server, "cpu-1")
    plan_blocks(farm, worker.name, 2, name)
    liar = Running(worker, LIAR)
    try:
        wait_until(lambda: worker.stop.is_set() or job.status().chunks_done == CHUNKS)
        with working(worker_on(server)):
            wait_until(lambda: job.status().chunks_done == CHUNKS)
    finally:
        liar.stop()
    texts = [text for block in blocks for text in block.texts]
    expected = embed_texts(open_engine(spec, "cpu", Settings()), texts)
    assert cosine(embedded(job), expected).min() > 0.9999
    assert not job.status().chunks_failed
    return liar.error


@pytest.mark.parametrize("runs", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_wrong_is_stored(
    client: redis.Redis,
    server: LiveServer,
    models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    runs: int,
) -> None:
    """A device that begins to lie at any moment stops, and says why; others embed the rest."""
    farm = FarmClient(client)
    for seed in range(runs):
        random = Random(seed)
        engine, model, lie = random.choice(
            [
                (NullEngine, NULL, of_another_text()),
                (SentenceTransformerEngine, str(models("mean_pooled")), of_another_text()),
                (SentenceTransformerEngine, str(models("mean_pooled")), of_changed_weights(random)),
            ]
        )
        with monkeypatch.context() as patch:
            begin_to_lie(patch, engine, lie, random.randrange(2, 40))
            error = run(server, farm, model, f"job-{seed}")
        assert isinstance(error, ComputesWrongly), seed
        (told,) = farm.timeline.newest(1)
        assert (told.kind, told.worker) == ("computes wrongly", worker_on(server, "cpu-1").name)
        assert str(error) in told.sentence
