"""Protocol of peers: processes that embed a file of texts and say how long it took.

    python -m benchmarks.peers.NAME TEXTS MODEL DEVICE OUT [--size N] [--dtype NAME]

A peer writes one row for each text to OUT (.npy), and its last line of output is a JSON object. Its
environment has what the peer needs, and NumPy.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

WARM_UP_TEXTS: Final = 64

Vectors: TypeAlias = NDArray[np.float32]
Embed: TypeAlias = Callable[[list[str]], Vectors]


@dataclass(frozen=True)
class Task:
    """A task for a peer: the texts, the model, the device, and where the vectors go.

    Attributes:
        texts: JSON Lines with the field "text".
        model: Directory of a sentence-transformers model.
        device: "cpu" or "cuda".
        out: File for the vectors.
        size: Rows of a batch or number of workers, as the peer has it; 0 for its default.
        dtype: Type in which the farm computes; other peers choose by themselves.
    """

    texts: Path
    model: Path
    device: str
    out: Path
    size: int
    dtype: str

    def read_texts(self) -> list[str]:
        """Read all texts in order."""
        with self.texts.open(encoding="utf-8") as file:
            return [json.loads(line)["text"] for line in file]


def read_task() -> Task:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    return Task(**vars(parser.parse_args()))


def measure(load: Callable[[Task], Embed], package: str) -> None:
    """Load, warm up and embed; only the embedding counts.

    Args:
        load: Function that loads the model and returns the function that embeds.
        package: The distribution whose version is reported.
    """
    task = read_task()
    texts = task.read_texts()
    began = time.monotonic()
    embed = load(task)
    embed(texts[:WARM_UP_TEXTS])
    loaded = time.monotonic()
    vectors = embed(texts)
    ended = time.monotonic()
    report(task, vectors, package, seconds=ended - loaded, load_seconds=loaded - began)


def report(  # noqa: PLR0913 # each is a figure by name
    task: Task,
    vectors: Vectors,
    package: str,
    *,
    seconds: float,
    load_seconds: float,
    facts: dict[str, str] | None = None,
) -> None:
    """Write the vectors to their file, and print the figures.

    Args:
        task: The task.
        vectors: Vectors in shape (texts, dimensions).
        package: The distribution whose version is reported.
        seconds: Time from the first text to the last vector.
        load_seconds: Time until the model is warm.
        facts: Further facts, by name.
    """
    np.save(task.out, np.asarray(vectors, dtype=np.float32))
    figures = {
        "seconds": seconds,
        "load_seconds": load_seconds,
        "version": f"{package} {importlib.metadata.version(package)}",
        "facts": facts or {},
    }
    sys.stdout.write("\n" + json.dumps(figures) + "\n")
