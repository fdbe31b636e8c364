"""EmbedAnything on candle, which reads the same safetensors."""

import numpy as np
from embed_anything import EmbeddingModel, TextEmbedConfig, WhichModel, embed_query

from benchmarks.peers.protocol import Embed, Task, Vectors, measure


def load(task: Task) -> Embed:
    """The model from its directory."""
    model = EmbeddingModel.from_pretrained_hf(WhichModel.Bert, model_id=str(task.model))

    def embed(texts: list[str]) -> Vectors:
        found = embed_query(texts, embedder=model, config=TextEmbedConfig())
        return np.asarray([each.embedding for each in found], dtype=np.float32)

    return embed


if __name__ == "__main__":
    measure(load, "embed-anything")
