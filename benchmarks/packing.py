"""Benchmark of packing: how much faster a corpus is when more of its chunks come together.

    python -m benchmarks.packing [--corpus NAME] [--chunks N] [--rounds N] [--launches A,B]

Sizes and launch costs take turns, each is run once in a round, on one thread; seconds are medians.
It shows that micro-batches of some seconds have chunks enough, also on a slow worker.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Final

import torch

from benchmarks.batch_shapes import MODEL
from benchmarks.corpora import CORPORA
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.packing import batch_tokens, pack

SIZES: Final = (100, 225, 450, 900, 1800)


def embed(engine: Engine, texts: list[str], launch_tokens: float) -> tuple[int, int, int]:
    """Embed texts together; return device batches, tokens, and tokens with their padding."""
    batch = engine.tokenise(texts)
    batches = pack(batch.lengths, engine.batch_tokens, launch_tokens, padded=engine.padded)
    for rows in batches:
        engine.forward(batch, rows)
    padded = sum(batch_tokens(batch.lengths[rows], padded=engine.padded) for rows in batches)
    return len(batches), int(batch.lengths.sum()), padded


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="mixed", choices=sorted(CORPORA))
    parser.add_argument("--chunks", type=int, default=3600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--launches", default="16,32,64")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = open_engine(JobSpec(model=MODEL, engine=arguments.engine), "cpu", Settings())
    make, _ = CORPORA[arguments.corpus]
    with tempfile.TemporaryDirectory() as directory:
        texts = make(Path(directory), arguments.chunks)
    launches = [float(each) for each in arguments.launches.split(",")]
    seconds: defaultdict[tuple[int, float], list[float]] = defaultdict(list)
    found: dict[tuple[int, float], list[int]] = {}
    for _ in range(arguments.rounds):
        for size, launch in product(SIZES, launches):
            began = time.perf_counter()
            parts = [embed(engine, texts[n : n + size], launch) for n in range(0, len(texts), size)]
            seconds[size, launch].append(time.perf_counter() - began)
            found[size, launch] = [sum(column) for column in zip(*parts, strict=True)]
    best = min(map(statistics.median, seconds.values()))
    sys.stdout.write(" chunks  launch  batches  padding  seconds  to the best\n")
    for (size, launch), times in seconds.items():
        count, tokens, padded = found[size, launch]
        median = statistics.median(times)
        cells = f"{size:7} {launch:7.0f} {count:8} {1 - tokens / padded:8.2%} {median:8.2f}"
        sys.stdout.write(f"{cells} {median / best:11.3f}\n")


if __name__ == "__main__":
    main()
