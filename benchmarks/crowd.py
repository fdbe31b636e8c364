"""What many workers cost the server and the scheduler, and what is lost when many die at once.

    python -m benchmarks.crowd [--workers 64 256 1000] [--seconds 60] [--speed 1000]

For each number of workers a farm of a real server, a scheduler and so many workers embeds one job.
The workers are those of any farm, with the null engine at `--speed` tokens a second each, in five
processes (`benchmarks.worker_crowd`). After the measurement one of these is killed, with a fifth
of the workers; the job goes on to its end, and every vector is compared. Server and scheduler have
a core of their own, so that the workers, which would be elsewhere, are not in their way.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

import embedfarm
from embedfarm.contract.broker import PrivateServer, closing_client, wait_until_ready
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import Child, Supervisor
from embedfarm.contract.records import SchedulerStats
from embedfarm.contract.settings import Settings
from embedfarm.runs.private_farm import scheduler_child
from embedfarm.workers.engines.null import NullEngine

PROCESSES: Final = 5  # with workers
DIMENSIONS: Final = 32
TEXT_BYTES: Final = 1024  # 256 tokens, as the null engine counts
TOKENS: Final = TEXT_BYTES // 4
WARM_SECONDS: Final = 15.0  # until rates are known, and micro-batches have their size
START_SECONDS_MAX: Final = 300.0
LOOK_SECONDS: Final = 0.2
SERVER_SECONDS_MAX: Final = 30.0
DRAIN_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Load:
    """What a farm did in some seconds.

    Attributes:
        server: Seconds of a processor that the server took in each second.
        scheduler: Seconds of a processor that the scheduler took in each second.
        commands: Commands that the server did in each second.
        chunks: Chunks that were done in each second.
        micro_batches: Micro-batches that were done in each second.
        stats: The scheduler's own figures, of the last minute.
    """

    server: float
    scheduler: float
    commands: float
    chunks: float
    micro_batches: float
    stats: SchedulerStats


@dataclass
class Crowd:
    """A farm with many workers.

    Attributes:
        url: URL of its server.
        farm: Its state.
        server: Its server.
        scheduler: Its scheduler.
        workers: The processes that have its workers.
    """

    url: str
    farm: FarmClient
    server: psutil.Process
    scheduler: psutil.Process
    workers: list["subprocess.Popen[bytes]"]

    def measure(self, job: str, seconds: float) -> Load:
        """Watch the farm for some seconds, in which it is at work on a job."""
        before, began = self._counts(job), time.monotonic()
        threading.Event().wait(seconds)
        took = time.monotonic() - began
        now = self._counts(job)
        return Load(
            **{name: (now[name] - before[name]) / took for name in now}, stats=self._stats()
        )

    def _counts(self, job: str) -> dict[str, float]:
        return {
            "server": sum(self.server.cpu_times()[:2]),
            "scheduler": sum(self.scheduler.cpu_times()[:2]),
            "commands": self.farm.client.info("stats")["total_commands_processed"],
            "chunks": self.farm.job(job).status().chunks_done,
            "micro_batches": self._stats().micro_batches,
        }

    def _stats(self) -> SchedulerStats:
        stats = self.farm.plans.scheduler_stats()
        if stats is None:
            raise SystemExit("no scheduler is active")
        return stats


def write(path: Path, count: int) -> Path:
    """Write a corpus of texts of equal length."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"{number} ".ljust(TEXT_BYTES, ".")}) + "\n")
    return path


def compare(out: Path, corpus: Path) -> None:
    """Compare every vector with that of the text in its place.

    Raises:
        SystemExit: A vector is another one, or missing.
    """
    engine = NullEngine.open(JobSpec(model=f"null:{DIMENSIONS}"))
    with corpus.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenised = engine.tokenise(texts)
    wanted = engine.forward(tokenised, np.arange(len(texts)))
    made = embedfarm.open(out).matrix
    if made.shape != wanted.shape or not np.array_equal(made, wanted):
        raise SystemExit(f"{out} has not the vectors of its texts")


@contextmanager
def crowd(home: Path, count: int) -> Iterator[Crowd]:
    """Run a farm with so many workers."""
    cores = sorted(psutil.Process().cpu_affinity())
    apart, rest = cores[:1], cores[1:] or cores
    own = PrivateServer.at(home / "server")
    settings = Settings(redis_url=own.url)
    children = [
        Child("server", own.command(settings), {}, die_with_parent=True),
        scheduler_child(settings),
    ]
    with ExitStack() as stack:
        stack.callback(own.leave)
        outer = stack.enter_context(Supervisor(children[:1], home / "logs", DRAIN_SECONDS))
        wait_until_ready(own.url, threading.Event(), SERVER_SECONDS_MAX)
        inner = stack.enter_context(Supervisor(children[1:], home / "logs", DRAIN_SECONDS))
        client = stack.enter_context(closing_client(own.url))
        wait_for(lambda: inner.pids and outer.pids)
        server = psutil.Process(outer.pids["server"])
        scheduler = psutil.Process(inner.pids["scheduler"])
        for process in (server, scheduler):
            process.cpu_affinity(apart)
        psutil.Process().cpu_affinity(rest)  # and all that is started from now on
        stack.callback(psutil.Process().cpu_affinity, cores)
        farm = FarmClient(client)
        workers = [start(settings, count, place, stack) for place in range(PROCESSES)]
        wait_for(lambda: len(farm.workers()) == count)
        yield Crowd(own.url, farm, server, scheduler, workers)


def start(
    settings: Settings, count: int, place: int, stack: ExitStack
) -> "subprocess.Popen[bytes]":
    """Start a process with its share of the workers, which is stopped with the stack."""
    first, end = (count * each // PROCESSES for each in (place, place + 1))
    words = ["--first", str(first), "--count", str(end - first)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker_crowd", *words],
        env=os.environ | settings.environment(),
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds.

    Raises:
        SystemExit: It did not for long.
    """
    end = time.monotonic() + START_SECONDS_MAX
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("the farm does not start")
        threading.Event().wait(LOOK_SECONDS)


def run(home: Path, count: int, seconds: float, speed: float) -> Load:
    """Embed a job with so many workers, of which a fifth is killed; return what was measured."""
    chunks = int(count * speed * (WARM_SECONDS + 2 * seconds) / TOKENS)
    corpus, out = write(home / "corpus.jsonl", chunks), home / "out"
    words = [str(corpus), "--out", str(out), "--model", f"null:{DIMENSIONS}:{speed}"]
    with crowd(home, count) as farm:
        command = [sys.executable, "-m", "embedfarm", "embed", *words, "--redis", farm.url]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as embed:
            wait_for(farm.farm.job_ids)
            (job,) = farm.farm.job_ids()
            threading.Event().wait(WARM_SECONDS)
            load = farm.measure(job, seconds)
            farm.workers[-1].kill()
            _, said = embed.communicate()
        if embed.returncode:
            raise SystemExit(said.decode())
    compare(out, corpus)
    return load


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--speed", type=float, default=1000.0)
    options = parser.parse_args()
    sys.stdout.write(
        "| workers | micro-batches/s | chunks/s | commands/s | server, of a core | scheduler, of a "
        "core | decision, mean | decision, P99 | efficiency |\n" + "|--:" * 9 + "|\n"
    )
    for count in options.workers:
        with tempfile.TemporaryDirectory(prefix="embedfarm-crowd-") as home:
            load = run(Path(home), count, options.seconds, options.speed)
        stats = load.stats
        sys.stdout.write(
            f"| {count:,} | {load.micro_batches:,.1f} | {load.chunks:,.0f} "
            f"| {load.commands:,.0f} | {load.server:.1%} | {load.scheduler:.1%} "
            f"| {1000 * stats.decision_seconds_mean:.1f} ms "
            f"| {1000 * stats.decision_seconds_p99:.1f} ms | {stats.efficiency:.1%} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
