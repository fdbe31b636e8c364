"""A job through a server of another make that is killed, restarted and given another model.

    python -m benchmarks.endpoint [--chunks N] [--json] [--report FILE]

The server is infinity-emb's, on CPU, from an environment of its own (`make endpoint`). First it is
asked directly, by as many clients as the worker has requests at a time; then a job goes through it
under the farm. In the middle of a second job it is killed (SIGKILL) and started again; in the
middle of a third it is killed and comes back with other weights, with which the job must end, and
then with its own, with which the same command goes on. Every vector of all outputs is compared with
the model's own here.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

from benchmarks.corpora import MODEL, short
from benchmarks.marked import write_marked
from embedfarm.contract import model_files
from embedfarm.contract.broker import PrivateServer, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.outputs import open_output
from embedfarm.workers.engines.endpoint_client import TEXTS_MAX

WEIGHTS: Final = "model.safetensors"
SERVER: Final = Path("build/peers/infinity/bin/infinity_emb")
START_SECONDS_MAX: Final = 180.0
JOB_SECONDS_MAX: Final = 1800.0
LOOK_SECONDS: Final = 0.02
KILL_AT: Final = 1 / 3  # of a job's chunks
AWAY_SECONDS: Final = 20.0  # longer than a worker waits for its server
COSINE_MIN: Final = 0.9999
DIRECT_TEXTS: Final = 2000
REFUSED_STATUS: Final = 2  # of `embed`, when no worker has the model


class WrongResult(RuntimeError):
    """Raised when an output is not what it must be; the message says how."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS_MAX) -> float:
    """Wait until a condition holds, and return the seconds that it took.

    Raises:
        TimeoutError: It did not hold in time.
    """
    began, wait = time.monotonic(), threading.Event()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(what)
        wait.wait(LOOK_SECONDS)
    return time.monotonic() - began


@dataclass
class Server:
    """A server that embeds, started as often as need be at one port.

    Attributes:
        port: Where it listens.
        log: File of its output.
    """

    port: int
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """What stands before `/embeddings`."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, model: Path) -> None:
        """Start it with a model, and wait until it answers."""
        command = [
            *(str(SERVER), "v2", "--model-id", str(model), "--served-model-name", MODEL),
            *(
                "--engine",
                "torch",
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--no-bettertransformer",
            ),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        quiet = os.environ | {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=quiet, start_new_session=True
            )
        wait_for(self._answers, f"{SERVER} does not start; see {self.log}")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/models").is_success
        return False

    def kill(self) -> None:
        """End it at once, with all that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def ask_directly(url: str, texts: Sequence[str], clients: int) -> float:
    """Return the texts per second that a server embeds for some clients at a time."""
    parts = [list(texts[at : at + TEXTS_MAX]) for at in range(0, len(texts), TEXTS_MAX)]

    with httpx.Client(timeout=START_SECONDS_MAX) as client, ThreadPoolExecutor(clients) as pool:

        def ask(part: list[str]) -> None:
            request = {"model": MODEL, "input": part, "encoding_format": "base64"}
            client.post(f"{url}/embeddings", json=request).raise_for_status()

        ask(parts[0])
        began = time.monotonic()
        list(pool.map(ask, parts))
        return len(texts) / (time.monotonic() - began)


@contextlib.contextmanager
def farm_on(server: Server, directory: Path) -> Iterator[str]:
    """Run a farm whose only worker has the server for a device; yields the farm's URL."""
    redis = PrivateServer.at(directory / "redis")
    environment = os.environ | {"EMBEDFARM_STATE_DIRECTORY": str(directory / "state")}
    commands = [
        redis.command(Settings()),
        embedfarm("schedule", "--redis", redis.url),
        embedfarm("work", "--redis", redis.url, "--endpoint", server.url, "--model", MODEL),
    ]
    with contextlib.ExitStack() as stack, (directory / "farm.log").open("wb") as log:
        for command in commands:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(_end, process)
        wait_for(lambda: _has_worker(redis), f"no worker; see {directory / 'farm.log'}")
        yield redis.url


def embedfarm(*words: str) -> list[str]:
    """Return a command line of this project."""
    return [sys.executable, "-m", "embedfarm", *words]


def _has_worker(redis: PrivateServer) -> bool:
    if not redis.alive():
        return False
    with closing_client(redis.url) as client:
        return bool(FarmClient(client).workers())


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


@dataclass
class Job:
    """A command that embeds a corpus on a farm.

    Attributes:
        url: URL of the farm.
        corpus: The corpus.
        out: Directory of the output.
    """

    url: str
    corpus: Path
    out: Path

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it, or go on with it."""
        words = [str(self.corpus), "--out", str(self.out), "--redis", self.url, "--model", MODEL]
        return subprocess.Popen(
            embedfarm("embed", *words, "--dtype", "float32", "--json"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def finish(self, process: "subprocess.Popen[bytes]", status: int = 0) -> str:
        """Wait for its end, which must be of this status; return what it said."""
        _, said = process.communicate(timeout=JOB_SECONDS_MAX)
        words = said.decode(errors="replace").strip()
        if process.returncode != status:
            raise WrongResult(f"embed ended with status {process.returncode}: {words}")
        return words.splitlines()[-1] if words else ""

    def chunks_done(self) -> int:
        """Return how many chunks have been embedded since it was last started."""
        with closing_client(self.url) as client:
            jobs = FarmClient(client).statuses().values()
        return sum(status.chunks_done for status in jobs if status.state in {"open", "closed"})


def check(out: Path, expected: NDArray[np.float32]) -> float:
    """Compare an output with the vectors that it must have, in order; return the least cosine.

    Raises:
        WrongResult: It is not verified, or a vector is another one.
    """
    verified = subprocess.run(embedfarm("verify", str(out)), capture_output=True, check=False)
    if verified.returncode:
        raise WrongResult(f"{out}: {verified.stdout.decode()}{verified.stderr.decode()}")
    with open_output(out) as output:
        vectors = np.array(output.matrix, np.float32)
    if vectors.shape != expected.shape:
        raise WrongResult(f"{out} has vectors of shape {vectors.shape}, not {expected.shape}")
    least = float(cosine(vectors, expected).min())
    if least < COSINE_MIN:
        raise WrongResult(f"{out}: least cosine {least}")
    return least


def other_weights(model: Path, directory: Path) -> Path:
    """Write a model of the same shape with other weights, as an upgrade behind a URL would be."""
    shutil.copytree(model, directory)
    random = np.random.default_rng(0)
    weights = load_file(model / WEIGHTS)
    for name, values in weights.items():
        if values.dtype.kind == "f":
            noise = random.standard_normal(values.shape) * values.std() / 2
            weights[name] = (values + noise).astype(values.dtype)
    save_file(weights, directory / WEIGHTS)
    return directory


def run(chunks: int, directory: Path) -> dict[str, float | int | str]:
    """Run the three jobs, and return the figures."""
    model = model_files.resolve(MODEL)
    texts = short(directory, chunks)
    corpus = directory / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = SentenceTransformer(str(model), device="cpu").encode(texts, batch_size=64)
    other = other_weights(model, directory / "other")
    server = Server(free_port(), directory / "server.log")
    figures: dict[str, float | int | str] = {"chunks": chunks}
    try:
        server.start(model)
        clients = Settings().endpoint_requests_max
        with farm_on(server, directory) as url:
            figures["direct_chunks_per_second"] = ask_directly(
                server.url, texts[:DIRECT_TEXTS], clients
            )
            figures |= undisturbed(Job(url, corpus, directory / "first"), expected)
            figures |= killed(Job(url, corpus, directory / "second"), server, model, expected)
            figures |= swapped(
                Job(url, corpus, directory / "third"), server, (model, other), expected
            )
    finally:
        server.kill()
    return figures


def undisturbed(job: Job, expected: NDArray[np.float32]) -> dict[str, float | int | str]:
    """Embed the corpus."""
    process = job.start()
    wait_for(lambda: job.chunks_done() > 0, "the job does not begin")
    began, before = time.monotonic(), job.chunks_done()
    wait_for(lambda: job.chunks_done() >= len(expected) or process.poll() is not None, "no end")
    rate = (len(expected) - before) / (time.monotonic() - began)
    job.finish(process)
    return {"farm_chunks_per_second": rate, "least_cosine": check(job.out, expected)}


def killed(
    job: Job, server: Server, model: Path, expected: NDArray[np.float32]
) -> dict[str, float | int | str]:
    """Embed the corpus, and kill the server in the middle of it."""
    process = job.start()
    wait_for(lambda: job.chunks_done() >= KILL_AT * len(expected), "the job does not get there")
    server.kill()
    threading.Event().wait(AWAY_SECONDS)  # the outage is what is measured
    done = job.chunks_done()
    server.start(model)
    seconds = wait_for(lambda: job.chunks_done() > done, "the job does not go on")
    job.finish(process)
    return {
        "killed_at_chunk": done,
        "away_seconds": AWAY_SECONDS,
        "goes_on_after_seconds": seconds,
        "killed_least_cosine": check(job.out, expected),
    }


def swapped(
    job: Job, server: Server, models: tuple[Path, Path], expected: NDArray[np.float32]
) -> dict[str, float | int | str]:
    """Embed the corpus, and give the server another model in the middle of it."""
    model, other = models
    process = job.start()
    wait_for(lambda: job.chunks_done() >= KILL_AT * len(expected), "the job does not get there")
    server.kill()
    server.start(other)
    reason = job.finish(process, REFUSED_STATUS)
    server.kill()
    server.start(model)
    job.finish(job.start())
    return {"swapped_reason": reason, "swapped_least_cosine": check(job.out, expected)}


def free_port() -> int:
    """Return a port of this host that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def to_markdown(figures: Mapping[str, float | int | str]) -> str:
    """Return the figures as a table of docs/endpoints.md."""
    rows = [f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in figures.items()]
    return "\n".join(["| figure | value |", "|---|---|", *rows])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.5g}"


def main() -> None:
    """Run it, print the figures, and put them into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = run(arguments.chunks, Path(name))
    table = to_markdown(figures)
    print(json.dumps(figures, indent=2) if arguments.json else table)  # noqa: T201 -- its output
    if arguments.report:
        write_marked(arguments.report, "endpoint", table)


if __name__ == "__main__":
    main()
