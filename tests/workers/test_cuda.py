"""Tests of the torch engine on a real GPU: its vectors, its memory, and its errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import redis
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch._dynamo.utils import counters

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.devices import describe_devices
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.compiled import compile_layers
from embedfarm.workers.engines.engine import OutOfMemory
from embedfarm.workers.engines.memory import limit_batches, predict_bytes
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.unpadded import unpad
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.watchdog import Watchdog
from tests.workers.support import block_of, micro_batch
from tests.workers.tiny_models import DIMENSIONS, KINDS, SENTENCES, bert, build

pytestmark = pytest.mark.skipif(not describe_devices().gpus, reason="this machine has no GPU")

GPU: Final = "cuda:0"
WIDE: Final = 24_576  # inside the layers of a model of some twelve mebibytes
WORDLESS: Final = {"static", "bag_of_words"}
TEXTS: Final = (*SENTENCES, "one", "a", "emoji 🦊🦊 and 漢字", "long " * 2000, "x" * 500)
# What is compared in which precision, and the least cosine of any text with float32 on the CPU.
CASES: Final = [
    *((kind, "float32", False, 0.9999) for kind in KINDS),
    *((kind, "bfloat16", False, 0.999) for kind in KINDS),
    *((kind, "bfloat16", True, 0.999) for kind in KINDS if kind not in WORDLESS),
    *((kind, "float16", True, 0.999) for kind in KINDS if kind not in WORDLESS),
]
BREAK: Final = """
import sys
import torch
from embedfarm.workers.engines.engine import DeviceFailed
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.contract.job_spec import JobSpec
import numpy as np

engine = SentenceTransformerEngine.open(JobSpec(model=sys.argv[1]), "cuda:0", None)
batch = engine.tokenise(["one text"])
batch.features.columns["input_ids"][:] = 1 << 30
try:
    engine.forward(batch, np.arange(1))
except DeviceFailed as error:
    print("device failed:", error)
"""


def open_on_gpu(model: Path, dtype: str = "auto") -> SentenceTransformerEngine:
    """Open a model on the GPU."""
    return SentenceTransformerEngine.open(JobSpec(model=str(model), dtype=dtype), GPU, None)


def embed(engine: SentenceTransformerEngine) -> NDArray[np.float32]:
    """The vectors of all texts in two device batches, both begun before one is waited for."""
    batch = engine.tokenise(TEXTS)
    halves = np.array_split(np.arange(len(TEXTS)), 2)
    finishes = [engine.start(batch, rows) for rows in halves]
    return np.concatenate([finish() for finish in finishes])


@pytest.mark.parametrize(("kind", "dtype", "unpadded", "least"), CASES)
def test_vectors_are_those_of_encode(
    kind: str, dtype: str, least: float, tmp_path: Path, *, unpadded: bool
) -> None:
    """Each kind of model gives on the GPU, in each precision, what `encode` gives on a CPU."""
    model = build(kind, tmp_path)
    plain: dict[str, Any] = {"dtype": torch.float32}
    reference = SentenceTransformer(str(model), device="cpu", model_kwargs=plain)
    expected = np.concatenate([reference.encode([text]) for text in TEXTS])
    engine = open_on_gpu(model, dtype)
    planned = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call] # not annotated
    assert not planned, "by cuDNN for each shape"
    if unpadded:
        unpad(engine)
    vectors = embed(engine)
    some = expected.any(axis=1)
    assert cosine(vectors[some], expected[some]).min() >= least
    assert not vectors[~some].any()
    if kind not in WORDLESS:
        assert engine.flops(np.asarray([10])) > 0
        assert engine.peak_flops_per_second > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
@pytest.mark.parametrize("kind", ["mean_pooled", "windowed", "last_token_pooled"])
def test_compiled_layers(kind: str, tmp_path: Path) -> None:
    """Layers that are compiled for the GPU give the vectors of those that are not."""
    engine = open_on_gpu(build(kind, tmp_path))
    unpad(engine)
    compiled = compile_layers(engine)
    assert cosine(embed(compiled), embed(engine)).min() >= 0.999
    forms = dict(counters["stats"])
    batch = engine.tokenise(SENTENCES)
    for rows in ([0], [0, 1], [2, 1, 0]):
        compiled.forward(batch, np.asarray(rows))
    assert counters["stats"]["unique_graphs"] <= 2 * forms["unique_graphs"], "one for a text alone"


def test_full_memory_costs_no_chunk(tmp_path: Path) -> None:
    """Device batches shrink until they fit a GPU with a limit, and every text is embedded."""
    transformer = bert(tmp_path / "transformer", inner=65_536)  # 256 KiB for a token in float32
    modules = [transformer, Pooling(DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    engine = open_on_gpu(tmp_path / "model", "float32")
    torch.cuda.empty_cache()
    limit_batches(GPU, 256 << 20)
    try:
        batch = micro_batch([block_of(0, 4000)], engine)
        with pytest.raises(OutOfMemory):
            engine.forward(batch.tokenised, np.arange(4000))
        vectors = Embedder().embed(batch)
    finally:
        limit_batches(GPU, 64 << 30)
    assert not batch.reasons
    assert vectors.any(axis=1).all()
    assert 1 <= batch.account.batches_refused <= 10


@pytest.mark.parametrize("swaps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_models_in_little_memory(client: redis.Redis, tmp_path: Path, swaps: int) -> None:
    """Twenty models in turn never take more than is allowed, and swaps lose no memory."""
    modules = [bert(tmp_path / "transformer", inner=WIDE), Pooling(DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    names = [tmp_path / f"model-{number}" for number in range(20)]
    for name in names:
        name.symlink_to(tmp_path / "model", target_is_directory=True)
    specs = [JobSpec(model=str(name), engine="torch") for name in names]
    size = predict_bytes(specs[0], GPU, Settings())
    assert size
    settings = Settings(models_bytes_max=3 * size + size // 2, models_parked_bytes_max=0)
    store = ModelStore(FarmClient(client), "w", GPU, settings, Watchdog(settings))
    process, before, reserved = psutil.Process(), 0, 0
    for swap in range(swaps):
        assert store.load(specs[swap % len(specs)])
        last = [specs[each % len(specs)].model for each in range(max(0, swap - 2), swap + 1)]
        assert [each.spec.model for each in store.resident] == last
        assert store.resident.bytes <= settings.models_bytes_max
        if swap == swaps // 4:
            before, reserved = process.memory_info().rss, torch.cuda.memory_reserved(GPU)
    assert process.memory_info().rss < 1.05 * before
    assert torch.cuda.memory_reserved(GPU) <= reserved + size


def test_a_parked_model_leaves_the_gpu(client: redis.Redis, tmp_path: Path) -> None:
    """A model that makes room for another one leaves the GPU's memory, and returns as it was."""
    modules = [bert(tmp_path / "transformer", inner=WIDE), Pooling(DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "a"))
    (tmp_path / "b").symlink_to(tmp_path / "a", target_is_directory=True)
    first, second = (JobSpec(model=str(tmp_path / name), engine="torch") for name in "ab")
    size = predict_bytes(first, GPU, Settings())
    assert size
    settings = Settings(models_bytes_max=size + size // 2)
    store = ModelStore(FarmClient(client), "w", GPU, settings, Watchdog(settings))
    engine = store.load(first)
    assert isinstance(engine, SentenceTransformerEngine)
    before, allocated = embed(engine), torch.cuda.memory_allocated(GPU)
    assert store.load(second)
    assert [each.spec for each in store.room.parked] == [first]
    assert {each.device.type for each in engine.model.parameters()} == {"cpu"}
    assert torch.cuda.memory_allocated(GPU) < allocated + size // 2
    again = store.load(first)
    assert again is engine
    assert np.array_equal(embed(engine), before)
    model = store.resident.last
    assert model is not None
    assert model.came_seconds < model.load_seconds


def test_a_broken_device_is_named(tmp_path: Path) -> None:
    """What breaks CUDA in this process raises `DeviceFailed`: no chunk is to blame for the rest."""
    model = build("mean_pooled", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BREAK, str(model)], capture_output=True, text=True, check=False
    )
    assert "device failed: CUDA error" in done.stdout, done.stderr
