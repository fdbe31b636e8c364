"""The farm's engine and packing in a loop in one process: no queue, no scheduler, no files."""

import os

import torch

from benchmarks.peers.protocol import Embed, Task, Vectors, measure
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.cores import available_cores
from embedfarm.workers.engines.comparison import embed as embed_packed
from embedfarm.workers.engines.opening import open_engine


def load(task: Task) -> Embed:
    """Open the engine that a worker of the farm would open, with all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as in a worker
    torch.set_num_threads(len(available_cores()))
    device = "cuda:0" if task.device == "cuda" else task.device
    engine = open_engine(JobSpec(model=str(task.model)), device, Settings())

    def embed(texts: list[str]) -> Vectors:
        return embed_packed(engine, engine.tokenise(texts))

    return embed


if __name__ == "__main__":
    measure(load, "embedfarm")
