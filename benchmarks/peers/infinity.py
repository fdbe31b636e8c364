"""Peer infinity-emb: its engine on torch with defaults, without its HTTP server."""

import asyncio

import numpy as np
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from benchmarks.peers.protocol import Embed, Task, Vectors, measure


def load(task: Task) -> Embed:
    """Make the engine, which runs in threads of its own while it embeds."""
    engine = AsyncEmbeddingEngine.from_args(
        EngineArgs(model_name_or_path=str(task.model), engine="torch", device=task.device)
    )

    async def run(texts: list[str]) -> Vectors:
        async with engine:
            vectors, _tokens = await engine.embed(sentences=texts)
        return np.asarray(vectors, dtype=np.float32)

    return lambda texts: asyncio.run(run(texts))


if __name__ == "__main__":
    measure(load, "infinity-emb")
