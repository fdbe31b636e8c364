"""EmbedAnything on candle, which reads the same safetensors."""

import os
import sys
from pathlib import Path

import numpy as np
from embed_anything import EmbeddingModel, TextEmbedConfig, embed_query

from benchmarks.peers.protocol import Embed, Task, Vectors, measure

NAME = "benchmark/model"


def cache(model: Path, home: Path) -> None:
    """Lay a model out as the hub's cache would have it: EmbedAnything takes no directories."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("local", encoding="utf-8")
    snapshot = repository / "snapshots" / "local"
    snapshot.parent.mkdir(exist_ok=True)
    snapshot.unlink(missing_ok=True)
    snapshot.symlink_to(model)


def load(task: Task) -> Embed:
    """Load the model on the CPU."""
    if task.device != "cpu":
        sys.exit("the package for GPUs is another one")
    home = task.out.parent / "hub-cache"
    cache(task.model, home)
    os.environ["HF_HOME"] = str(home)
    model = EmbeddingModel.from_pretrained_hf(NAME)

    # Of 24 texts one at a time took 1.4 s here, four at a time 8.2 s: it gets its best.
    config = TextEmbedConfig(batch_size=task.size or 1)

    def embed(texts: list[str]) -> Vectors:
        found = embed_query(texts, embedder=model, config=config)
        return np.asarray([each.embedding for each in found], dtype=np.float32)

    return embed


if __name__ == "__main__":
    measure(load, "embed-anything")
