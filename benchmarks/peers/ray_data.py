"""Peer Ray Data: `map_batches` with `SentenceTransformer.encode` in an actor for each device."""

import os
import time
from typing import Any, Final

import numpy as np
import ray
from sentence_transformers import SentenceTransformer

from benchmarks.peers.protocol import read_task, report

BATCH_ROWS: Final = 256  # of map_batches; encode makes its own batches of 32 from them


class Embedder:
    """Actor of Ray that holds the model."""

    def __init__(self, model: str, device: str) -> None:
        self.model = SentenceTransformer(model, device=device, local_files_only=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Embed a batch, and add the time at which that began."""
        began = time.time()
        vectors = self.model.encode(list(batch["text"]))
        times = np.full(len(vectors), began)
        return {"index": batch["index"], "vector": vectors, "began": times}


def main() -> None:
    """Run the task once; the loading of the model ends where the first batch begins."""
    task = read_task()
    cores = len(os.sched_getaffinity(0))
    devices: dict[str, Any] = {"compute": ray.data.ActorPoolStrategy(size=cores)}
    if task.device == "cuda":
        devices = {"compute": ray.data.ActorPoolStrategy(size=1), "num_gpus": 1}
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=cores)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"index": i, "text": text} for i, text in enumerate(task.read_texts())]
    began = time.time()
    embedded = ray.data.from_items(rows).map_batches(
        Embedder,
        fn_constructor_args=(str(task.model), task.device),
        batch_size=BATCH_ROWS,
        **devices,
    )
    found = sorted(embedded.take_all(), key=lambda row: row["index"])
    ended = time.time()
    loaded = min(row["began"] for row in found)
    vectors = np.stack([row["vector"] for row in found])
    report(task, vectors, "ray", seconds=ended - loaded, load_seconds=loaded - began)


if __name__ == "__main__":
    main()
