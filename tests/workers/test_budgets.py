"""Tests of token budgets: what is learned about a device's memory, shared through the farm."""

from pathlib import Path

import pytest
import redis
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.budgets import Budgets
from embedfarm.workers.engines.memory import limit_batches
from embedfarm.workers.engines.opening import open_engine
from tests.farm.harness import manifest, read_parquet, role, run, write_corpus
from tests.support import LiveServer, wait_until
from tests.workers.support import FakeEngine
from tests.workers.tiny_models import DIMENSIONS, bert

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SPEC = JobSpec(model=MINILM)


def test_budgets_are_shared_by_like_devices(client: redis.Redis) -> None:
    """A worker on a device of the same kind begins with the learned budget; others do not."""
    engine = FakeEngine()
    one = Budgets(FarmClient(client), "a GPU, 24 GiB")
    assert one.tokens(SPEC, engine) == engine.batch_tokens
    one.halve(SPEC, 600)
    assert one.tokens(SPEC, engine) == 300
    assert Budgets(FarmClient(client), "a GPU, 24 GiB").tokens(SPEC, engine) == 300
    assert Budgets(FarmClient(client), "a GPU, 24 GiB", 200).tokens(SPEC, engine) == 200
    assert Budgets(FarmClient(client), "a GPU, 80 GiB").tokens(SPEC, engine) == engine.batch_tokens
    other = JobSpec(model=MINILM, dtype="float16")
    assert Budgets(FarmClient(client), "a GPU, 24 GiB").tokens(other, engine) == engine.batch_tokens
    (key,) = client.scan_iter("ef:{farm}:budget:*")
    assert 0 < client.ttl(key) <= 7 * 86400


def test_a_lost_server_costs_no_budget(server: LiveServer, client: redis.Redis) -> None:
    """A worker without the server keeps and halves a budget of its own."""
    budgets = Budgets(FarmClient(client), "a kind")
    server.kill()
    assert budgets.tokens(SPEC, FakeEngine()) == FakeEngine.batch_tokens
    budgets.halve(SPEC, 500)
    assert budgets.tokens(SPEC, FakeEngine()) == 250


def test_full_memory_settles_the_budget(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """The budget of a device with little memory settles within 10 batches, and no chunk fails.

    The next job, on a new worker, begins with what the server remembers: half of what was learned
    here, so that it fits whatever that process takes beside its batches.
    """
    limits = {"batch_bytes_max": str(384 << 20), "batch_tokens_max": "65536"}
    model = tmp_path / "model"
    transformer = bert(tmp_path / "transformer", inner=16384)  # 128 KiB for a token
    modules = [transformer, Pooling(DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(model))
    texts = [f"{index} " + "the river bank " * 12 for index in range(200)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ("--redis", server.url, "--json", "--model", model, "--dtype", "float32")
    accounts = []
    for name in ("first", "second"):
        with (
            role(server, tmp_path, "schedule"),
            role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1", **limits),
        ):
            wait_until(lambda: len(FarmClient(client).workers()) == 1, 30)
            done = run("embed", corpus, "--out", tmp_path / name, *words)
        assert done.returncode == 0, done.stderr
        assert len(read_parquet(tmp_path / name)[0]) == len(texts)
        (account,) = manifest(tmp_path / name)["accounts"].values()
        accounts.append(account)
        (key,) = client.scan_iter(match="ef:{farm}:budget:*")
        assert int(client.get(key) or 0) == account["budget_tokens"]
        client.set(key, account["budget_tokens"] // 2)
        wait_until(lambda: not FarmClient(client).workers(), 30)
    first, second = accounts
    assert 1 <= first["batches_refused"] <= 10
    assert first["budget_tokens"] < 65536
    assert second["batches_refused"] == 0
    assert second["budget_tokens"] == first["budget_tokens"] // 2


def test_openvino_takes_no_limit(tmp_path: Path) -> None:
    """OpenVINO refuses a memory limit, since without memory it goes on to wrong vectors."""
    spec = JobSpec(model=MINILM, engine="openvino")
    with pytest.raises(ModelError, match="limit"):
        open_engine(spec, "cpu", Settings(engine_cache=tmp_path, batch_bytes_max=1 << 30))


def test_a_limit_is_lifted_again() -> None:
    """A limit of zero takes the limit away, so that the next model finds room."""
    limit_batches("cpu", 1 << 30)
    limit_batches("cpu", 0)
    assert len(bytearray(2 << 30)) == 2 << 30
