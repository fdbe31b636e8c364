"""Peer `SentenceTransformer.encode` with its multi-process pool."""

import os

from sentence_transformers import SentenceTransformer

from benchmarks.peers.protocol import Embed, Task, Vectors, measure


def load(task: Task) -> Embed:
    """Start a process for each core, or those that the pool chooses on a machine with GPUs."""
    model = SentenceTransformer(str(task.model), device=task.device, local_files_only=True)
    cores = len(os.sched_getaffinity(0))
    pool = model.start_multi_process_pool(["cpu"] * cores if task.device == "cpu" else None)

    def embed(texts: list[str]) -> Vectors:
        return model.encode(texts, pool=pool)

    return embed


if __name__ == "__main__":
    measure(load, "sentence-transformers")
