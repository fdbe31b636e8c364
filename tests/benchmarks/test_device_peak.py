"""What a model has to compute, and how fast the device could."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, ModernBertConfig, PreTrainedConfig, Qwen3Config

from benchmarks.device_peak import Shape, measure_rate
from benchmarks.random_models import Architecture, build

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TINY: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "modernbert": ModernBertConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16),
}


def test_flops_of_bert_are_the_formula() -> None:
    """2·L·(4d² + 2·d·f) + 4·L·d·s a token, of bge-base at 128 tokens: 174.6 million."""
    shape = Shape(layers=12, hidden=768, inner=3072, query=768, keys=768, gated=False)
    per_token = shape.flops(np.array([128])) / 128
    assert per_token == 2 * 12 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 12 * 768 * 128
    assert per_token == pytest.approx(174.6e6, rel=1e-3)


@pytest.mark.parametrize("kind", sorted(TINY))
def test_matrices_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    """As many weights as the model's own layers have in matrices, for every architecture."""
    TINY[kind].save_pretrained(tmp_path)
    shape = Shape.read(tmp_path)
    model = AutoModel.from_config(TINY[kind])  # type: ignore[no-untyped-call] # not annotated
    weights = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layer" in name
    )
    assert shape.layers * sum(a * b for a, b in shape.matrices) == weights


def test_texts_add_up() -> None:
    """Two texts take what each takes, not what one as long as both would."""
    shape = Shape(layers=1, hidden=8, inner=16, query=8, keys=8, gated=False)
    both = shape.flops(np.array([10, 20]))
    assert both == shape.flops(np.array([10])) + shape.flops(np.array([20]))
    assert both < shape.flops(np.array([30]))


@pytest.mark.parametrize(("kind", "pooling"), [("modernbert", "mean"), ("qwen3", "lasttoken")])
def test_a_random_model_embeds(kind: str, pooling: str, tmp_path: Path) -> None:
    """What is built loads as a model like any other, and is the same each time."""
    build(Architecture(TINY[kind], pooling), tmp_path / "one")
    build(Architecture(TINY[kind], pooling), tmp_path / "other")
    first, second = (
        SentenceTransformer(str(tmp_path / name / "model"), device="cpu").encode(["a text"])
        for name in ("one", "other")
    )
    assert first.shape == (1, 32)
    np.testing.assert_array_equal(first, second)


def test_a_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is one that a processor can have."""
    monkeypatch.setattr("benchmarks.device_peak.SHAPE_SECONDS", 0.01)
    assert 1e8 < measure_rate("cpu", torch.float32, 64, (64, 64)) < 1e14
