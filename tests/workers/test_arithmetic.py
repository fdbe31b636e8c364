"""Tests of how many operations a model needs, and how many a device can do."""

import time

import numpy as np
import pytest
import torch

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines import measurement
from embedfarm.workers.engines.arithmetic import Arithmetic
from embedfarm.workers.engines.measurement import PEAK_SECONDS, measure_peak
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import (
    SentenceTransformerEngine,
    gpu_batch_tokens,
)

LAYERS, WIDTH, INNER = 6, 384, 1536


def test_operations_are_those_of_the_formula() -> None:
    """MiniLM needs 2 L (4 d^2 + 2 d f) a token and 4 L d a pair, but for its pooling layer."""
    model = "sentence-transformers/all-MiniLM-L6-v2"
    engine = open_engine(JobSpec(model=model, dtype="float32", engine="torch"), "cpu", Settings())
    assert isinstance(engine, SentenceTransformerEngine)
    counted = engine.arithmetic
    per_token = 2 * LAYERS * (4 * WIDTH**2 + 2 * WIDTH * INNER)
    assert counted.per_token == pytest.approx(per_token, rel=1e-3)
    assert counted.per_token_squared == pytest.approx(4 * LAYERS * WIDTH, rel=0.01)
    lengths = np.asarray([10, 100])
    exact = sum(n * (per_token + 4 * LAYERS * WIDTH * n) for n in lengths.tolist())
    assert engine.flops(lengths) == pytest.approx(exact, rel=1e-3)
    assert engine.peak_flops_per_second > 0


@pytest.mark.parametrize(
    ("layers", "width", "least", "most"),
    [
        (6, 384, 131_072, 131_072),  # MiniLM-L6
        (12, 768, 55_000, 65_536),  # the architecture of bge-base
        (24, 1024, 16_384, 32_768),  # that of bge-large
        (48, 4096, 16_384, 16_384),
    ],
)
def test_a_large_model_is_busy_with_few_tokens(
    layers: int, width: int, least: int, most: int
) -> None:
    """Token budgets on a GPU follow the model's size, within bounds."""
    per_token = 2 * layers * (4 * width**2 + 2 * width * 4 * width)
    assert least <= gpu_batch_tokens(Arithmetic(per_token)) <= most
    assert gpu_batch_tokens(Arithmetic()) == 65_536  # where nothing could be counted


@pytest.mark.alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_measured_quickly(dtype: torch.dtype) -> None:
    """A peak takes a moment, also on a processor that does not have the dtype."""
    began = time.perf_counter()
    assert measure_peak(torch.device("cpu"), dtype) > 1e8
    assert time.perf_counter() - began < 10 * PEAK_SECONDS


def test_a_peak_that_would_take_long_is_measured_with_small_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor that is too slow for large matrices multiplies no more of them."""
    sizes = []

    def multiply(size: int, *_: object) -> float:
        sizes.append(size)
        return 10.0

    monkeypatch.setattr(measurement, "_multiply", multiply)
    peak = measure_peak(torch.device("cpu"), torch.float32)
    assert sizes == [measurement.CPU_PEAK_SIZE // measurement.SMALLER]
    assert peak == 2 * sizes[0] ** 3 / 10.0


def test_unknown_arithmetic_counts_nothing() -> None:
    """A model whose operations nobody has counted has none."""
    assert Arithmetic().flops(np.asarray([5])) == 0.0
