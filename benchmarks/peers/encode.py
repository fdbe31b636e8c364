"""Peer `SentenceTransformer.encode`, with its default or a given batch size."""

from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from benchmarks.peers.protocol import Embed, Task, Vectors, measure


def load(task: Task) -> Embed:
    """Load the model in one process; `task.size` is the batch size."""
    model = SentenceTransformer(str(task.model), device=task.device, local_files_only=True)
    options: dict[str, Any] = {"batch_size": task.size} if task.size else {}

    def embed(texts: list[str]) -> Vectors:
        return np.asarray(model.encode(texts, **options), dtype=np.float32)

    return embed


if __name__ == "__main__":
    measure(load, "sentence-transformers")
