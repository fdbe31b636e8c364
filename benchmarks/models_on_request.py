"""Requests for a model that does not fit beside the one of an endless job.

    python -m benchmarks.models_on_request [--requests 60] [--timeout 5] [--swap 10] [--pause 20]

MiniLM on one CPU worker with memory for one model, an endless job, and requests over HTTP for a
second name of the same files, each after a random pause. A request waits `--timeout` seconds at
most. What is refused with 503 is asked for once more after the seconds of its `Retry-After`: it
has held if that gets an answer.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from benchmarks.corpora import MODEL, write_corpus
from benchmarks.endpoint import free_port
from benchmarks.interactive import embedding, wait_for_job
from embedfarm.contract import model_files
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.runs.private_farm import run_local_farm
from embedfarm.workers.engines.memory import predict_bytes

CHUNKS: Final = 500_000  # more than a run gets through
FIT: Final = 1.5  # models that fit
SEED: Final = 0
CLIENT_SECONDS: Final = 300.0


@dataclass
class Tally:
    """What became of requests.

    Attributes:
        answered: Seconds of those that were answered when they were asked for first.
        refused: Seconds of those that were refused then.
        promised: The `Retry-After` of each that was refused.
        kept: Whether each of them was answered after it.
    """

    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    def to_table(self) -> str:
        """Format the figures for people."""
        rows = {
            "answered at once": _describe(self.answered),
            "refused": _describe(self.refused),
            "Retry-After": _describe(self.promised),
            "answered after it": f"{sum(self.kept)} of {len(self.kept)}",
        }
        return "".join(f"{name:20}{text}\n" for name, text in rows.items())


def _describe(seconds: list[float]) -> str:
    """Return how many there are, their median and the most."""
    if not seconds:
        return "0"
    middle, most = statistics.median(seconds), max(seconds)
    return f"{len(seconds)}, median {middle:.1f} s, at most {most:.1f} s"


def ask(http: httpx.Client, model: str) -> httpx.Response:
    """Ask for the vector of one text, for the first or the second time.

    Raises:
        httpx.HTTPStatusError: The answer is neither a vector nor to try again.
    """
    answer = http.post("/v1/embeddings", json={"model": model, "input": "one text"})
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        answer.raise_for_status()
    return answer


def measure(http: httpx.Client, model: str, requests: int, pause: float) -> Tally:
    """Ask again and again after pauses of up to so many seconds."""
    tally, chance, wait = Tally(), random.Random(SEED), threading.Event()  # noqa: S311 # no secret
    for _ in range(requests):
        wait.wait(chance.uniform(0.0, pause))
        began = time.monotonic()
        answer = ask(http, model)
        took = time.monotonic() - began
        if answer.is_success:
            tally.answered.append(took)
            continue
        tally.refused.append(took)
        tally.promised.append(float(answer.headers["retry-after"]))
        wait.wait(tally.promised[-1])
        tally.kept.append(ask(http, model).is_success)
    return tally


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--swap", type=float, default=10.0)
    parser.add_argument("--pause", type=float, default=20.0)
    arguments = parser.parse_args()
    size = predict_bytes(JobSpec(model=MODEL), "cpu", Settings())
    with (
        tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        directory, port = Path(name), free_port()
        other = directory / "other"
        other.symlink_to(model_files.resolve(MODEL), target_is_directory=True)
        settings = Settings(
            models=(MODEL, str(other)),
            models_bytes_max=int(FIT * (size or 0)),
            lane_seconds_max=arguments.timeout,
            lane_swap_seconds=arguments.swap,
        )
        corpus = write_corpus("mixed", directory, CHUNKS)
        local = stack.enter_context(run_local_farm(directory / "farm", settings, "cpu", 1, port))
        client = stack.enter_context(closing_client(local.url))
        stack.enter_context(embedding(corpus, directory / "out", local.url, MODEL))
        wait_for_job(FarmClient(client))
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CLIENT_SECONDS)
        tally = measure(stack.enter_context(http), str(other), arguments.requests, arguments.pause)
    sys.stdout.write(tally.to_table())


if __name__ == "__main__":
    main()
