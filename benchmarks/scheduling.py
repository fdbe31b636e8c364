"""Benchmark of policies on real processes: workers of unequal speed share a job.

    python -m benchmarks.scheduling [--seconds S] [--rounds N] [--policies P,P] [--json]

Four worker processes, each half as fast as the one before (an engine that takes the time a device
of its speed would), a private server, a scheduler, and the collector. The ideal makespan is that of
the rates that the workers themselves measured in the same job.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import redis

from benchmarks.slow_worker import slow_workers
from embedfarm.contract import wire
from embedfarm.contract.broker import PrivateServer, closing_client, wait_until_ready
from embedfarm.contract.encoding import decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.processes import Child, Supervisor
from embedfarm.contract.records import Completion
from embedfarm.contract.settings import Settings
from embedfarm.runs.private_farm import SERVER_SECONDS_MAX, scheduler_child
from embedfarm.scheduler.policies import POLICIES

TOKENS_PER_SECOND: Final = 40_000  # of the fastest worker
SLOWDOWN: Final = {"cpu-0": 1.0, "cpu-1": 2.0, "cpu-2": 4.0, "cpu-3": 8.0}
CHUNK_BYTES: Final = 400  # 100 tokens
MODEL: Final = f"null:16:{TOKENS_PER_SECOND}"
COMMAND: Final = (sys.executable, "-c", "from embedfarm.cli import main; main()")


@dataclass(frozen=True)
class Run:
    """Figures of one job under one policy.

    Attributes:
        policy: Name of the policy.
        makespan: Seconds from the first block read to the last commit.
        ideal: Tokens over the sum of the workers' rates in this job.
        micro_batches: Number of micro-batches of all workers.
    """

    policy: str
    makespan: float
    ideal: float
    micro_batches: int

    @property
    def ratio(self) -> float:
        """Makespan over the ideal: 1 is perfect."""
        return self.makespan / self.ideal


def run_policies(
    directory: Path, policies: Sequence[str], seconds: float, rounds: int
) -> list[Run]:
    """Run a job under each policy in turn, after a first one from which speeds are known.

    Raises:
        subprocess.CalledProcessError: A job failed.
    """
    speed = sum(TOKENS_PER_SECOND / each for each in SLOWDOWN.values())
    chunks = round(seconds * speed / (CHUNK_BYTES / 4))
    corpus = directory / "corpus.jsonl"
    with corpus.open("w", encoding="ascii") as file:
        for index in range(chunks):
            file.write(json.dumps({"text": f"{index:012d} ".ljust(CHUNK_BYTES, "x")}) + "\n")
    with running_farm(directory / "farm") as url, closing_client(url) as client:
        farm = FarmClient(client)
        runs: list[Run] = []
        for policy in ["fair", *(each for _ in range(rounds) for each in policies)]:
            farm.plans.set_policy(POLICIES[policy])
            runs.append(_run(client, corpus, directory / f"out-{len(runs)}", url, policy))
        return runs[1:]


@contextlib.contextmanager
def running_farm(directory: Path) -> Iterator[str]:
    """Run a private server, a scheduler and the unequal workers; yield the server's URL."""
    server = PrivateServer.at(directory / "server")
    settings = Settings(redis_url=server.url)
    child = Child("server", server.command(settings), {}, die_with_parent=True)
    stations = [scheduler_child(settings), *slow_workers(settings, SLOWDOWN)]
    logs, seconds = directory / "logs", settings.drain_seconds
    with Supervisor([child], logs, drain_seconds=seconds):
        wait_until_ready(server.url, threading.Event(), SERVER_SECONDS_MAX)
        with Supervisor(stations, logs, drain_seconds=seconds):
            yield server.url


def _run(client: redis.Redis, corpus: Path, out: Path, url: str, policy: str) -> Run:
    """Run one job."""
    words = ["embed", str(corpus), "--out", str(out), "--redis", url, "--model", MODEL, "--json"]
    subprocess.run([*COMMAND, *words], check=True, capture_output=True)
    facts: dict[str, Any] = json.loads((out / "_manifest.json").read_text(encoding="utf-8"))
    seconds: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    count = 0
    for _, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(wire.EVENTS)):
        if b"done" in fields:
            each = decode(Completion, fields[b"done"])
            if each.job == facts["job"]:
                seconds[each.worker] += each.seconds
                tokens[each.worker] += each.tokens
                count += 1
    speed = sum(tokens[worker] / seconds[worker] for worker in tokens)
    return Run(policy, facts["embed_seconds"], sum(tokens.values()) / speed, count)


def main() -> None:
    """Print a line for each policy: medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the job, ideally")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="fair,rounds,fixed,adaptive")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    with tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as directory:
        runs = run_policies(Path(directory), policies, arguments.seconds, arguments.rounds)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in runs]) + "\n")
        return
    sys.stdout.write(f"{'policy':10}{'makespan':>10}{'of ideal':>10}{'micro-batches':>15}\n")
    for policy in policies:
        found = [each for each in runs if each.policy == policy]
        makespan = statistics.median(each.makespan for each in found)
        ratio = statistics.median(each.ratio for each in found)
        batches = statistics.median(each.micro_batches for each in found)
        sys.stdout.write(f"{policy:10}{makespan:9.1f}s{ratio:10.3f}{batches:15.0f}\n")


if __name__ == "__main__":
    main()
