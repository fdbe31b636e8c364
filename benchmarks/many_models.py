"""Jobs of several models on one worker, at a time and one after the other.

    python -m benchmarks.many_models [--models 2] [--fit 2] [--chunks 3000] [--rounds 3]

Each model is one of all-MiniLM-L6-v2's architecture with random weights of its own, in float32, and
each has a job of the same docstrings. Of `--models` models so many fit as `--fit` says. A farm with
one CPU worker does the jobs one after the other, then all at once, in rounds; the first round,
in which engines are chosen and models are loaded for the first time, is left out. Times are
from the first command to the end of the last one, and loads are those that the farm's
timeline tells.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.random_models import architectures, build
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.producer.docstrings import docstrings
from embedfarm.runs.private_farm import run_local_farm
from embedfarm.workers.engines.memory import predict_bytes

EVENTS_MAX: Final = 1000
OPTIONS: Final = ("--dtype", "float32", "--engine", "torch")


def start(corpus: Path, out: Path, model: Path, url: str) -> "subprocess.Popen[bytes]":
    """Start the command that embeds the corpus with a model."""
    words = ["embed", str(corpus), "--out", str(out), "--model", str(model), "--redis", url]
    command = [sys.executable, "-m", "embedfarm", *words, *OPTIONS]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def end(command: "subprocess.Popen[bytes]") -> None:
    """Wait for a command.

    Raises:
        RuntimeError: It has failed.
    """
    if command.wait():
        raise RuntimeError(f"{command.args!r} has failed")


def loads(farm: FarmClient) -> int:
    """Return how many times a worker has loaded a model."""
    return sum(each.kind == "loaded" for each in farm.timeline.newest(EVENTS_MAX))


def measure(
    farm: FarmClient, url: str, corpus: Path, models: Sequence[Path], rounds: int
) -> list[tuple[float, float, int]]:
    """Return the seconds one after the other and all at once, and the loads at once, by round."""
    outs = (corpus.parent / f"out-{number}" for number in itertools.count())
    found = []
    for _ in range(1 + rounds):
        began = time.monotonic()
        for model in models:
            end(start(corpus, next(outs), model, url))
        apart = time.monotonic() - began
        before, began = loads(farm), time.monotonic()
        for command in [start(corpus, next(outs), model, url) for model in models]:
            end(command)
        found.append((apart, time.monotonic() - began, loads(farm) - before))
    return found[1:]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in range(arguments.models):
            build(architectures()["all-minilm-l6"], directory / str(seed), seed)
        models = [directory / str(seed) / "model" for seed in range(arguments.models)]
        corpus = directory / "corpus.jsonl"
        texts = itertools.islice(docstrings(), arguments.chunks)
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in texts))
        size = predict_bytes(JobSpec(model=str(models[0]), dtype="float32"), "cpu", Settings())
        limit = int((arguments.fit + 0.5) * (size or 0))
        settings = Settings(models_bytes_max=limit)
        with (
            run_local_farm(directory / "farm", settings, "cpu", 1) as local,
            closing_client(local.url) as client,
        ):
            rows = measure(FarmClient(client), local.url, corpus, models, arguments.rounds)
    sys.stdout.write("| one after the other, s | at once, s | ratio | loads at once |\n")
    sys.stdout.write("|--:|--:|--:|--:|\n")
    for apart, together, count in rows:
        ratio = together / apart
        sys.stdout.write(f"| {apart:.1f} | {together:.1f} | {ratio:.3f} | {count} |\n")
    ratios = [together / apart for apart, together, _ in rows]
    sys.stdout.write(f"median of the ratios {statistics.median(ratios):.3f}\n")


if __name__ == "__main__":
    main()
