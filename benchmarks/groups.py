"""Speed of a group of CPU ranks beside one worker with as many threads, on a random Qwen3.

    python -m benchmarks.groups [--ranks N] [--layers N] [--width N] [--chunks N] [--rounds N]

A group has the memory of all its devices; what it costs is the exchange between them. Both embed
the same texts, in turns, in float32; the speeds are medians of the rounds, the ratio is the median
of the ratios within each round. Each rank has one thread, and the single worker as many as there
are ranks.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.corpora import CORPORA
from benchmarks.packing import embed
from benchmarks.random_models import Architecture, build
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.group import FORMED, Group
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine

HEAD_WIDTH: Final = 64
GROUP_SECONDS: Final = 600.0
SAMPLE: Final = 64  # texts whose vectors are compared


def architecture(layers: int, width: int) -> Architecture:
    """Return a decoder of such a size, in the proportions of Qwen3-Embedding."""
    heads = width // HEAD_WIDTH
    config = Qwen3Config(
        vocab_size=30_522,  # that of the tokenizer
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_WIDTH,
        intermediate_size=3 * width,
    )
    return Architecture(config, "lasttoken", padding_side="left")


def speed(engine: Engine, texts: list[str], threads: int) -> float:
    """Return the tokens that an engine embeds in a second with so many threads in this process."""
    torch.set_num_threads(threads)
    began = time.perf_counter()
    _, tokens, _ = embed(engine, texts, engine.launch_tokens)
    return tokens / (time.perf_counter() - began)


def least_cosine(one: Engine, other: Engine, texts: list[str]) -> float:
    """Return the cosine of the two vectors of a text, that of the text where they differ most."""
    rows = np.arange(len(texts))
    vectors = [engine.forward(engine.tokenise(texts), rows) for engine in (one, other)]
    return float(cosine(*vectors).min())


def compare(spec: JobSpec, texts: list[str], ranks: int, rounds: int) -> None:
    """Print the speeds of a group and of one worker."""
    single = SentenceTransformerEngine.open(spec, "cpu", None)
    group = open_engine(spec, "cpu", Settings())
    least = least_cosine(single, group, texts[:SAMPLE])
    speeds: dict[str, list[float]] = {"single": [], "group": []}
    for engine, threads in ((single, ranks), (group, 1)):
        speed(engine, texts[:SAMPLE], threads)
    for _ in range(rounds):
        speeds["single"].append(speed(single, texts, ranks))
        speeds["group"].append(speed(group, texts, 1))
    ratios = [g / s for s, g in zip(speeds["single"], speeds["group"], strict=True)]
    one, several = (statistics.median(speeds[name]) for name in ("single", "group"))
    sys.stdout.write(
        f"one worker, {ranks} threads: {one:,.0f} tokens/s\n"
        f"{ranks} ranks, a thread each: {several:,.0f} tokens/s\n"
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in "
        f"{rounds} rounds); least cosine of {len(texts[:SAMPLE])} texts {least:.6f}\n"
    )


def main() -> None:
    """Build the model, form a group, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the other ranks
    ended: list[str] = []
    group = Group("cpu", arguments.ranks, GROUP_SECONDS, ended.append)
    FORMED.append(group)
    make, _ = CORPORA["mixed"]
    with tempfile.TemporaryDirectory() as directory:
        build(architecture(arguments.layers, arguments.width), Path(directory))
        spec = JobSpec(model=str(Path(directory) / "model"), dtype="float32")
        texts = make(Path(directory), arguments.chunks)
        sys.stdout.write(f"Qwen3, {arguments.layers} layers {arguments.width} wide\n")
        compare(spec, texts, arguments.ranks, arguments.rounds)
    group.close()


if __name__ == "__main__":
    main()
