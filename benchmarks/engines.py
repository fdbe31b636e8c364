"""Engines side by side on this CPU: speed as a ratio to torch in float32, and what it costs.

    python -m benchmarks.engines [--chunks N] [--threads N] [--rounds N]

Docstrings of the standard library, and beyond those glosses of WordNet, through all-MiniLM-L6-v2 in
the farm's own device batches, the engines in turn, medians of the rounds. Accuracy is the cosine
with torch in float32, and how many of its ten nearest neighbours each text keeps.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import corpora
from embedfarm.records import JobSpec
from embedfarm.settings import Settings
from workers.engines import Engine, Tokenised, open_engine
from workers.packing import pack

MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
VARIANTS: Final = {
    "torch float32": ("torch", "float32"),
    "openvino float32": ("openvino", "float32"),
    "openvino int8": ("openvino", "int8"),
}
NEIGHBOURS: Final = 10
ROWS_AT_A_TIME: Final = 1000
DIRECTORY: Final = Path("build/corpora")


def embed(engine: Engine, batch: Tokenised) -> tuple[float, NDArray[np.float32]]:
    """Seconds and vectors of all texts."""
    batches = pack(batch.lengths, engine.batch_tokens, engine.launch_tokens, padded=True)
    vectors = np.empty((len(batch.lengths), engine.dimensions), np.float32)
    began = time.perf_counter()
    for rows in batches:
        vectors[rows] = engine.forward(batch, rows)
    return time.perf_counter() - began, vectors


def recall(vectors: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Share of each text's nearest neighbours that stays among them, on average."""
    found, expected = _neighbours(vectors), _neighbours(exact)
    kept = [len(np.intersect1d(*each)) for each in zip(found, expected, strict=True)]
    return float(np.mean(kept)) / NEIGHBOURS


def _neighbours(vectors: NDArray[np.float32]) -> NDArray[np.intp]:
    """Indices of the nearest other texts, shape (n, NEIGHBOURS)."""
    found = []
    for first in range(0, len(vectors), ROWS_AT_A_TIME):
        scores = vectors[first : first + ROWS_AT_A_TIME] @ vectors.T
        np.fill_diagonal(scores[:, first:], -np.inf)
        found.append(np.argpartition(-scores, NEIGHBOURS, axis=1)[:, :NEIGHBOURS])
    return np.concatenate(found)


def read_texts(count: int) -> list[str]:
    """So many distinct texts.

    Raises:
        benchmarks.corpora.CorpusUnavailable: More than this machine has.
    """
    texts = corpora.documentation()
    if count > len(texts):
        texts = [*texts, *corpora.glosses(corpora.wordnet(DIRECTORY))]
    return texts[:count]


def main() -> None:
    """Print a line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = read_texts(arguments.chunks)
    engines = {
        name: open_engine(JobSpec(model=MODEL, engine=engine, dtype=dtype), "cpu", Settings())
        for name, (engine, dtype) in VARIANTS.items()
    }
    batch = next(iter(engines.values())).tokenise(texts)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    vectors = {}
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            taken, vectors[name] = embed(engine, batch)
            seconds[name].append(taken)
    report(seconds, vectors, int(batch.lengths.sum()))


def report(
    seconds: dict[str, list[float]], vectors: dict[str, NDArray[np.float32]], tokens: int
) -> None:
    """A table; the first engine is what the others are compared with."""
    first = next(iter(seconds))
    sys.stdout.write(
        f"{'engine':18}{'tokens/s':>10}{'ratio':>7}{'cosine':>9}{'least':>9}{'recall@10':>11}\n"
    )
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[first], times, strict=True))
        cosines = (vectors[name] * vectors[first]).sum(axis=1)
        sys.stdout.write(
            f"{name:18}{tokens / statistics.median(times):10,.0f}{ratio:7.2f}{cosines.mean():9.5f}"
            f"{cosines.min():9.5f}{recall(vectors[name], vectors[first]):11.3f}\n"
        )


if __name__ == "__main__":
    main()
