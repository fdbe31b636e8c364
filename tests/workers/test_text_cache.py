"""Tests of texts whose vectors lie in the vector cache of a worker's host."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import redis
from numpy.typing import NDArray

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Block, TokenIds, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.contract.usage import Account
from embedfarm.workers.canary_keeper import ComputesWrongly, make_canaries
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.leases import MicroBatch
from embedfarm.workers.text_cache import DIRECTORY, TextCache
from embedfarm.workers.vector_cache import VectorCache
from tests.support import LiveServer, wait_until
from tests.workers.running import Running, worker_on, working
from tests.workers.support import (
    NULL,
    block_of,
    create_job,
    embedded,
    micro_batch,
    null_vectors,
    plan_blocks,
)
from tests.workers.test_lying_device import LIAR, begin_to_lie, of_another_text

TEXTS = tuple(f"{'a chunk of text ' * (number % 3 + 1)}{number}" for number in range(20))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TextCache]:
    """A cache on an empty disk."""
    store = VectorCache(tmp_path / "vectors", 64 << 20)
    yield TextCache(store)
    store.close()


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """A farm without a scheduler."""
    return FarmClient(client)


def embed(
    cache: TextCache, spec: JobSpec, texts: Sequence[str] = TEXTS, engine: Engine | None = None
) -> tuple[NDArray[Any], MicroBatch]:
    """Embed texts as a worker does."""
    engine = engine or open_engine(spec, "cpu", Settings())
    batch = micro_batch([Block(start=0, texts=list(texts))], engine, spec)
    batch.reasons |= dict(batch.tokenised.reasons)
    cache.look_up(batch, make_canaries(engine))
    vectors = Embedder().embed(batch)
    cache.keep(batch)
    return vectors, batch


def cached(batch: MicroBatch) -> int:
    """The texts of a micro-batch whose vectors were in the cache."""
    return sum(part.account.chunks_cached for part in batch.parts)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "ubinary", "lsh"])
def test_a_cached_vector_is_stored_like_the_first(
    cache: TextCache, models: Callable[[str], Path], storage: str
) -> None:
    """Each bit is the one that was stored before, whatever else is in the micro-batch."""
    model = str(models("mean_pooled"))
    engine = open_engine(JobSpec(model=model, engine="torch"), "cpu", Settings())
    least = np.full(engine.dimensions, -1, "<f4")
    ranges = np.concatenate([least, -least]).tobytes() if storage == "int8" else b""
    spec = JobSpec(model=model, engine="torch", vector_dtype=storage, ranges=ranges)
    embed(cache, JobSpec(model=model, engine="torch"))  # another type of storage is no other vector
    first, batch = embed(cache, spec)
    assert (cached(batch), batch.account.batches) == (len(TEXTS), 0)
    more = ["one more", *TEXTS[::-1], "and one"]
    again, batch = embed(cache, spec, more)
    assert (cached(batch), batch.account.batches > 0) == (len(TEXTS), True)
    assert np.array_equal(again[1:-1], first[::-1])
    fresh, _ = embed(TextCache(), spec)
    if storage == "float32":
        assert np.allclose(first, fresh, atol=1e-5)
    else:
        assert (first == fresh).mean() > 0.99


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "query: "},
        {"max_length": 5},
        {"dimensions": 3},
        {"normalize": "never"},
        {"long": "windows", "long_overlap": 4},
        {"dtype": "bfloat16"},
        {"engine": "openvino"},
    ],
    ids=str,
)
def test_what_decides_a_vector_decides_whether_it_is_found(
    cache: TextCache, models: Callable[[str], Path], change: dict[str, Any]
) -> None:
    """A job with another prompt, limit or the like finds nothing, and its own vectors later."""
    fields: dict[str, Any] = {
        "model": str(models("mean_pooled")),
        "engine": "torch",
        "dtype": "float32",
    }
    embed(cache, JobSpec(**fields))
    changed = JobSpec(**fields | change)
    first, batch = embed(cache, changed)
    assert cached(batch) == 0
    again, batch = embed(cache, changed)
    assert cached(batch) == len(TEXTS)
    assert np.array_equal(first, again)


def test_other_weights_find_nothing(cache: TextCache) -> None:
    """Vectors of one model are not those of another one."""
    embed(cache, JobSpec(model="null:8:0:one"))
    _, batch = embed(cache, JobSpec(model="null:8:0:other"))
    assert cached(batch) == 0


def test_long_texts_are_whole(cache: TextCache, models: Callable[[str], Path]) -> None:
    """The vector of a text that is cut into windows is found as one; repeats count each time."""
    spec = JobSpec(model=str(models("mean_pooled")), engine="torch", long="windows", long_overlap=4)
    texts = ["short", "a long text " * 30, "a long text " * 30, "another long one " * 20]
    first, batch = embed(cache, spec, texts)
    assert batch.tokenised.owners is not None
    again, batch = embed(cache, spec, [*texts[::-1], "new words " * 20])
    assert (cached(batch), batch.account.batches) == (4, 1)
    assert np.array_equal(again[:4], first[::-1])


def test_token_ids_are_those_of_their_text(cache: TextCache, models: Callable[[str], Path]) -> None:
    """A text finds its vector whether it came as a text or as token ids, and so do the ids."""
    texts = ["a chunk " * count for count in range(1, 21)]
    spec = JobSpec(model=str(models("mean_pooled")), engine="torch")
    engine = open_engine(spec, "cpu", Settings())
    assert engine.tokenisation is not None
    encoder = TokenEncoder.open(Path(spec.model), engine.tokenisation)
    first, _ = embed(cache, spec, texts[:10], engine)
    ids, lengths = encoder.encode(texts)
    tokens = TokenIds(
        tokenisation=engine.tokenisation,
        ids=ids.astype("<u2").tobytes(),
        width=2,
        lengths=lengths.astype("<u4").tobytes(),
        checksums=text_checksums(texts),
    )
    encoded = Block(start=0, texts=[], tokens=tokens)
    batch = micro_batch([encoded], engine, spec)
    batch.tokenised = engine.tokenise(encoded.chunks())
    cache.look_up(batch, make_canaries(engine))
    vectors = Embedder().embed(batch)
    cache.keep(batch)
    assert cached(batch) == 10
    assert np.array_equal(vectors[:10], first)
    again, batch = embed(cache, spec, texts, engine)
    assert cached(batch) == len(texts)
    assert np.array_equal(again, vectors)


class FailingEngine(NullEngine):
    """An engine that raises for one text."""

    def forward(self, batch: Any, rows: NDArray[np.intp]) -> NDArray[np.float32]:  # noqa: ANN401 # as in the protocol
        """Embed the rows, unless a text of one token is among them."""
        if (batch.lengths[rows] == 1).any():
            raise ValueError("this text again")
        return super().forward(batch, rows)


def test_a_text_that_failed_is_tried_again(cache: TextCache) -> None:
    """A failed text is not in the cache, and those beside it are."""
    engine, spec = FailingEngine.open(JobSpec(model=NULL)), JobSpec(model=NULL)
    texts = ["", "a text of many tokens", "another text of many tokens"]
    for found in (0, 2):
        vectors, batch = embed(cache, spec, texts, engine)
        assert cached(batch) == 0 or found
        assert list(batch.reasons) == [0]
        assert not vectors[0].any()
    assert np.array_equal(vectors[1:], null_vectors(texts[1:]))


def test_a_lost_micro_batch_is_not_kept(cache: TextCache) -> None:
    """Nothing is kept of a micro-batch that was lost on the way: its rows may be zero."""
    spec, engine = JobSpec(model=NULL), NullEngine.open(JobSpec(model=NULL))
    batch = micro_batch([block_of(0, 5)], engine)
    cache.look_up(batch, make_canaries(engine))
    batch.leases[0].lost = True
    Embedder().embed(batch)
    cache.keep(batch)
    _, batch = embed(cache, spec, block_of(0, 5).texts)
    assert cached(batch) == 0


def test_a_device_that_is_wrong_from_the_start_has_vectors_of_its_own(
    cache: TextCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it made is found by nobody who computes rightly, whoever was first."""
    spec = JobSpec(model=NULL)
    for turn, texts in enumerate([TEXTS[:10], TEXTS[10:]]):
        right, batch = embed(cache, spec, texts)
        assert cached(batch) == 0
        with monkeypatch.context() as patch:
            patch.setattr(NullEngine, "runs", -NullEngine.open(spec).runs[::-1])
            wrong, batch = embed(cache, spec, texts)
            assert cached(batch) == 0, turn
            assert not np.array_equal(wrong, right)
        again, batch = embed(cache, spec, texts)
        assert cached(batch) == len(texts)
        assert np.array_equal(again, right)


def test_without_canaries_nothing_is_looked_up(cache: TextCache) -> None:
    """An engine of which nothing tells whether it computes rightly has no part in the cache."""
    engine = NullEngine.open(JobSpec(model=NULL))
    batch = micro_batch([block_of(0, 5)], engine)
    cache.look_up(batch, None)
    assert batch.cached is None
    cache.keep(batch)


# Whole workers.


def done(farm: FarmClient, name: str) -> bool:
    """Whether every chunk of a job has a result."""
    status = farm.job(name).status()
    return status.chunks_done == status.chunk_count


def account_of(farm: FarmClient, name: str) -> Account:
    """What the one worker of a job did for it."""
    (account,) = farm.reports.accounts(name).values()
    return account


def test_workers_share_what_they_made(server: LiveServer, farm: FarmClient, tmp_path: Path) -> None:
    """A job of another worker, all of it in the cache, ends with the same vectors and no device.

    Its account says so, and its worker is held for no faster than it is.
    """
    blocks = [block_of(10 * at, 10) for at in range(30)]
    model = "null:8:5000"
    one = create_job(farm, blocks, "one", model)
    with working(worker_on(server, vector_cache_directory=tmp_path)):
        wait_until(lambda: done(farm, "one"))
    another = create_job(farm, blocks, "another", model)
    mixed = [Block(start=0, texts=[*blocks[3].texts, "new"], token_count=44), block_of(11, 10)]
    with working(worker_on(server, "cpu-1", vector_cache_directory=tmp_path)) as worker:
        wait_until(lambda: done(farm, "another"))
        account = account_of(farm, "another")
        assert (account.chunks_cached, account.chunks, account.real_tokens) == (300, 300, 0)
        assert worker.committer.tokens_per_second == 0
        third = create_job(farm, mixed, "third", model)
        wait_until(lambda: done(farm, "third"))
    assert np.array_equal(embedded(one), embedded(another))
    texts = [text for block in mixed for text in block.texts]
    assert np.array_equal(embedded(third), null_vectors(texts))
    assert account_of(farm, "third").chunks_cached == 20
    assert all(event.tokens == 0 for event in farm.statistics.events("0", 0.01)[1][-2:])


def test_speed_is_that_of_the_device(server: LiveServer, farm: FarmClient, tmp_path: Path) -> None:
    """While half of each micro-batch is in the cache, a worker says the speed of its device."""
    model, speed = "null:8:2000", 2000
    known = [block_of(20 * at, 20) for at in range(10)]
    settings: dict[str, Any] = {"vector_cache_directory": tmp_path}
    create_job(farm, known, "one", model)
    with working(worker_on(server, **settings)) as worker:
        plan_blocks(farm, worker.name, 2, "one")
        wait_until(lambda: done(farm, "one"))
    texts = [[*block.texts, *(f"other {text}" for text in block.texts)] for block in known]
    blocks = [
        Block(start=40 * at, texts=each, token_count=sum(len(text) // 4 for text in each))
        for at, each in enumerate(texts)
    ]
    create_job(farm, blocks, "half", model)
    with working(worker_on(server, **settings)) as worker:
        plan_blocks(farm, worker.name, 2, "half")
        wait_until(lambda: done(farm, "half"))
        wait_until(lambda: worker.committer.total.chunks == 400)
        assert account_of(farm, "half").chunks_cached == 200
        assert worker.committer.tokens_per_second < 1.1 * speed


def test_a_lying_device_poisons_nothing(
    server: LiveServer, farm: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that begins to lie in mid-job leaves no wrong vector in the cache."""
    settings: dict[str, Any] = {"vector_cache_directory": tmp_path}
    for seed in range(3):
        name = f"job-{seed}"
        blocks = [block_of(4 * at, 4, f"text {seed}") for at in range(50)]
        job = create_job(farm, blocks, name)
        with monkeypatch.context() as patch:
            begin_to_lie(patch, NullEngine, of_another_text(), Random(seed).randrange(6, 30))
            worker = worker_on(server, "cpu-1", **settings)
            plan_blocks(farm, worker.name, 2, name)
            liar = Running(worker, LIAR)
            wait_until(worker.stop.is_set)
            liar.stop()
        assert isinstance(liar.error, ComputesWrongly)
        kept = job.status().chunks_done
        again = create_job(farm, blocks, f"again-{seed}")
        with working(worker_on(server, **settings)):
            wait_until(lambda name=name: done(farm, name) and done(farm, f"again-{name[4:]}"))  # type: ignore[misc]
        texts = [text for block in blocks for text in block.texts]
        assert np.array_equal(embedded(job), null_vectors(texts))
        assert np.array_equal(embedded(again), null_vectors(texts))
        assert account_of(farm, f"again-{seed}").chunks_cached >= kept > 0


def test_a_cache_that_fails_stops_no_job(
    server: LiveServer, farm: FarmClient, tmp_path: Path
) -> None:
    """A worker whose cache has no directory to lie in embeds its jobs as without one."""
    (tmp_path / DIRECTORY).touch()
    blocks = [block_of(10 * at, 10) for at in range(5)]
    job = create_job(farm, blocks)
    with working(worker_on(server, vector_cache_directory=tmp_path)):
        wait_until(lambda: done(farm, "j"))
    assert np.array_equal(embedded(job), null_vectors([t for b in blocks for t in b.texts]))
    assert account_of(farm, "j").chunks_cached == 0
