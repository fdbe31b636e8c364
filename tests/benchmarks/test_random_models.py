"""Tests of models of known architectures with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, ModernBertConfig, PreTrainedConfig, Qwen3Config

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


@pytest.mark.parametrize(("kind", "pooling"), [("modernbert", "mean"), ("qwen3", "lasttoken")])
def test_a_random_model_embeds(kind: str, pooling: str, tmp_path: Path) -> None:
    """A random model loads like any other, and is the same each time it is built."""
    build(Architecture(TINY[kind], pooling), tmp_path / "one")
    build(Architecture(TINY[kind], pooling), tmp_path / "other")
    first, second = (
        SentenceTransformer(str(tmp_path / name / "model"), device="cpu").encode(["a text"])
        for name in ("one", "other")
    )
    assert first.shape == (1, 32)
    np.testing.assert_array_equal(first, second)
