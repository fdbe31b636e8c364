"""Jobs of several models on one worker, at a time and one after the other.

    python -m benchmarks.many_models [--models 2] [--fit 2] [--chunks 3000] [--rounds 3]
                                     [--architecture NAME] [--devices cpu|0] [--leave GIB]

Each model is one of an architecture with random weights of its own, and each has a job of the same
docstrings. Of `--models` models so many fit as `--fit` says; with `--leave`, as fit the memory that
another program leaves of a GPU. A farm with one worker does the jobs one after the other, then all
at once, in rounds; the first round, in which engines are chosen and models are loaded for the
first time, is left out. Times are from the first command to the end of the last one, and loads are
those that the farm's timeline tells.
"""

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.corpora import write_corpus
from benchmarks.random_models import architectures, build
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.runs.private_farm import run_local_farm
from embedfarm.workers.engines.memory import predict_bytes

EVENTS_MAX: Final = 1000
GIBIBYTE: Final = 1 << 30
# Takes all memory of a GPU but so many bytes, and keeps it until its input ends.
TAKE: Final = """
import sys
import torch

free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Jobs:
    """What the jobs of the models have in common.

    Attributes:
        url: Server of the farm.
        corpus: File of JSON Lines.
        dtype: Type in which the models compute.
    """

    url: str
    corpus: Path
    dtype: str

    def start(self, model: Path, out: Path) -> "subprocess.Popen[bytes]":
        """Start the command that embeds the corpus with a model."""
        words = ["embed", str(self.corpus), "--out", str(out), "--model", str(model)]
        words += ["--redis", self.url, "--dtype", self.dtype, "--engine", "torch"]
        command = [sys.executable, "-m", "embedfarm", *words]
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
    farm: FarmClient, jobs: Jobs, models: Sequence[Path], rounds: int
) -> list[tuple[float, float, int]]:
    """Return the seconds one after the other and all at once, and the loads at once, by round."""
    outs = (jobs.corpus.parent / f"out-{number}" for number in itertools.count())
    found = []
    for _ in range(1 + rounds):
        began = time.monotonic()
        for model in models:
            end(jobs.start(model, next(outs)))
        apart = time.monotonic() - began
        before, began = loads(farm), time.monotonic()
        for command in [jobs.start(model, next(outs)) for model in models]:
            end(command)
        found.append((apart, time.monotonic() - began, loads(farm) - before))
    return found[1:]


@contextlib.contextmanager
def memory_taken(leave: int) -> Iterator[None]:
    """Have another program take a GPU's memory, but for so many bytes.

    Raises:
        RuntimeError: It could not.
    """
    command = [sys.executable, "-c", TAKE, str(leave)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the GPU's memory cannot be taken")
            yield
        finally:
            process.kill()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--architecture", choices=tuple(architectures()), default="all-minilm-l6")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--leave", type=float, default=0.0, help="GiB; in place of --fit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in range(arguments.models):
            build(architectures()[arguments.architecture], directory / str(seed), seed)
        models = [directory / str(seed) / "model" for seed in range(arguments.models)]
        corpus = write_corpus("mixed", directory, arguments.chunks)
        devices = arguments.devices
        device, dtype = ("cpu", "float32") if devices == "cpu" else ("cuda:0", "bfloat16")
        size = predict_bytes(JobSpec(model=str(models[0]), dtype=dtype), device, Settings())
        limit = 0 if arguments.leave else int((arguments.fit + 0.5) * (size or 0))
        leave = int(arguments.leave * GIBIBYTE)
        with (
            memory_taken(leave) if leave else contextlib.nullcontext(),
            run_local_farm(
                directory / "farm", Settings(models_bytes_max=limit), devices, 1
            ) as local,
            closing_client(local.url) as client,
        ):
            jobs = Jobs(local.url, corpus, dtype)
            rows = measure(FarmClient(client), jobs, models, arguments.rounds)
    sys.stdout.write("| one after the other, s | at once, s | ratio | loads at once |\n")
    sys.stdout.write("|--:|--:|--:|--:|\n")
    for apart, together, count in rows:
        ratio = together / apart
        sys.stdout.write(f"| {apart:.1f} | {together:.1f} | {ratio:.3f} | {count} |\n")
    ratios = [together / apart for apart, together, _ in rows]
    sys.stdout.write(f"median of the ratios {statistics.median(ratios):.3f}\n")


if __name__ == "__main__":
    main()
