"""Tests of the benchmark of a GPU's parts, with a tiny model on the CPU."""

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import Parts, union
from benchmarks.random_models import Architecture
from tests.benchmarks.test_random_models import TINY

MODEL = "bge-base"


@pytest.mark.parametrize(
    ("spans", "covered"),
    [([], 0.0), ([(1, 3), (2, 5), (7, 8)], 5.0), ([(0, 9), (1, 2)], 9.0), ([(3, 4), (3, 4)], 1.0)],
)
def test_time_that_spans_cover(spans: list[tuple[float, float]], covered: float) -> None:
    """Time in which two kernels run side by side counts once."""
    assert union(spans) == covered


def test_a_model_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The figures of a model are kept: speeds of all sizes that fill some batches, both ways."""
    monkeypatch.setattr(gpu, "architectures", lambda: {MODEL: Architecture(TINY["bert"], "cls")})
    monkeypatch.setattr(gpu_parts, "CHUNKS", {MODEL: 1000})
    monkeypatch.setattr(gpu_parts, "SIZES", (128, 256, 1 << 20))
    words = ["--models", MODEL, "--device", "cpu", "--rounds", "1", "--build", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_parts", *words])
    gpu_parts.main()
    kept = (tmp_path / "gpu" / f"{MODEL}-parts.json").read_bytes()
    parts = msgspec.json.decode(kept, type=Parts)
    assert parts.chunks == 100
    assert parts.tokens > 4 * 256
    for speeds in (parts.padded, parts.unpadded):
        assert set(speeds) == {128, 256}, "there are not enough texts for the largest size"
        assert min(speeds.values()) > 0
    assert parts.features_seconds > 0
    assert parts.start_seconds > 0
    assert not parts.busy, "nobody watched a GPU"
    assert not parts.compiled, "it was not asked for"
