"""infinity-emb's engine on torch, as it comes, without its HTTP server."""

import asyncio

import numpy as np
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from benchmarks.peers.protocol import Embed, Task, Vectors, measure


def load(task: Task) -> Embed:
    """The engine, warm, in an event loop that lives as long as this process."""
    engine = AsyncEmbeddingEngine.from_args(
        EngineArgs(model_name_or_path=str(task.model), engine="torch", device=task.device)
    )
    runner = asyncio.Runner()
    runner.run(engine.astart())

    def embed(texts: list[str]) -> Vectors:
        vectors, _tokens = runner.run(engine.embed(sentences=texts))
        return np.asarray(vectors, dtype=np.float32)

    return embed


if __name__ == "__main__":
    measure(load, "infinity-emb")
