"""Where device batches of MiniLM are fastest on this CPU: tokens per second by rows and length.

    python -m benchmarks.batch_shapes [THREADS]

What `BATCH_TOKENS` and `LAUNCH_TOKENS` of the CPU in workers/engines/sentence_transformer.py were
read off: the padded tokens beyond which it gets no faster, and the time of a launch in tokens.
"""

import statistics
import sys
import time

import numpy as np
import torch

from embedfarm.records import JobSpec
from embedfarm.settings import Settings
from workers.engines import Engine, Tokenised, open_engine

LENGTHS = (8, 16, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64)
TOKENS_MAX = 16384
REPEATS = 5


def measure(engine: Engine, batch: Tokenised, rows: int) -> float:
    """Median seconds of a forward pass of the first `rows` texts."""
    chosen = np.arange(rows)
    engine.forward(batch, chosen)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        engine.forward(batch, chosen)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Print a table of tokens per second."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    spec = JobSpec(model="sentence-transformers/all-MiniLM-L6-v2", dtype="float32")
    engine = open_engine(spec, "cpu", Settings())
    sys.stdout.write("length " + "".join(f"{rows:>9}" for rows in ROWS) + "\n")
    for length in LENGTHS:
        batch = engine.tokenise(["word " * (length - 2)] * max(ROWS))
        cells = [
            f"{length * rows / measure(engine, batch, rows):9,.0f}"
            for rows in ROWS
            if length * rows <= TOKENS_MAX
        ]
        sys.stdout.write(f"{length:6} {''.join(cells)}\n")


if __name__ == "__main__":
    main()
