"""Milliseconds of device batches of MiniLM on this CPU by rows and length, and a fit of them.

    python -m benchmarks.batch_shapes [--engine NAME] [--dtype NAME] [--threads N]

`BATCH_TOKENS` and `LAUNCH_TOKENS` of the CPU in workers/engines were read off here: the tokens
beyond which it gets no faster, and the time of a launch in tokens. The fit is
`a + b * padded tokens + c * sum of squared lengths`, least squares of the relative error.
"""

import argparse
import sys
import time

import numpy as np
import torch
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import Engine, Tokenised
from embedfarm.workers.engines.opening import open_engine

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LENGTHS = (4, 8, 16, 24, 32, 64, 96, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64)
TOKENS_MAX = 4096
REPEATS = 7


def measure(engine: Engine, batch: Tokenised, rows: int) -> float:
    """Return the least seconds of a forward pass of the first `rows` texts."""
    chosen = np.arange(rows)
    engine.forward(batch, chosen)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        engine.forward(batch, chosen)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print the table and the fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = JobSpec(model=MODEL, engine=arguments.engine, dtype=arguments.dtype)
    engine = open_engine(spec, "cpu", Settings())
    shapes, seconds = [], []
    sys.stdout.write("length " + "".join(f"{rows:>9}" for rows in ROWS) + "\n")
    for length in LENGTHS:
        batch = engine.tokenise(["word " * (length - 2)] * max(ROWS))
        cells = []
        for rows in ROWS:
            if length * rows <= TOKENS_MAX:
                shapes.append((1, length * rows, length**2 * rows))
                seconds.append(measure(engine, batch, rows))
                cells.append(f"{seconds[-1] * 1e3:9.2f}")
        sys.stdout.write(f"{length:6} {''.join(cells)}\n")
    report(np.asarray(shapes, dtype=np.float64), np.asarray(seconds))


def report(shapes: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
    """Print the fit, and how far off it is."""
    relative = shapes / seconds[:, None]
    (launch, token, square), *_ = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)
    errors = np.abs(relative @ (launch, token, square) - 1)
    sys.stdout.write(
        f"a {launch * 1e3:.2f} ms, b {token * 1e6:.1f} us, c {square * 1e9:.1f} ns: a launch is "
        f"{launch / token:.0f} tokens; off by {errors.mean():.1%}, at most {errors.max():.1%}\n"
    )


if __name__ == "__main__":
    main()
