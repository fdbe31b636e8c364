"""Benchmark of requests beside a job: seconds of 100 texts on a busy farm, and cost for the job.

    python -m benchmarks.interactive [--requests N] [--share S] [--workers N] [--other] [--json]
                                     [--model DIRECTORY] [--chunks N] [--devices cpu|0]

MiniLM, or another model, on CPU workers, or on a GPU, with an endless job. Phases with and without
requests alternate, so that what else the machine does falls on both; they are of unequal lengths,
so that what the farm does now and then, such as to write a part of the output, does too. Requests
come at a steady rate that makes about the given share of all tokens theirs, whether or not those
before them are answered, and a latency counts from the moment at which its request was due.

With `--other` requests are for another model than the job's, which fits beside it: a second name of
the same files.

A request has two device batches to wait for: the one of the job that is in its way, and its own,
which takes what the request takes on the same farm before there is a job.
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Final

from benchmarks.corpora import MODEL, documentation, write_corpus
from embedfarm.contract import model_files
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane
from embedfarm.contract.records import LaneAnswer
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.runs.private_farm import run_local_farm

WARM_CHUNKS: Final = 500
CHUNKS: Final = 500_000  # more than a run of 500 requests gets through
TEXTS: Final = 100
TEXT_CHARACTERS: Final = 80  # a line, as long as what people ask
TIMEOUT_SECONDS: Final = 60.0
CALLERS: Final = 64
PHASE_SECONDS: Final = (17.0, 29.0, 41.0)  # a part of the output is written about every 80
WARM_TOKENS: Final = 50_000  # of the job, before anything is measured
START_SECONDS_MAX: Final = 300.0
LOOK_SECONDS: Final = 0.05
ALONE: Final = 20  # requests before there is a job
SECONDS_ALLOWED: Final = 0.1
LOSS_ALLOWED: Final = 0.03


@dataclass
class Phase:
    """A stretch of the run, with requests or without.

    Attributes:
        seconds: Time between the first commit of the job in the phase and the last.
        tokens: Tokens of the job in that time.
        batches: Device batches of the job.
        forward_seconds: Time that these device batches took.
    """

    seconds: float = 0.0
    tokens: int = 0
    batches: int = 0
    forward_seconds: float = 0.0

    def add(self, other: "Phase") -> None:
        """Add the figures of another phase of the same kind."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.batches += other.batches
        self.forward_seconds += other.forward_seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the job in tokens per second."""
        return self.tokens / self.seconds

    @property
    def batch_seconds(self) -> float:
        """Mean seconds of a device batch."""
        return self.forward_seconds / self.batches


@dataclass
class Report:
    """Figures of one run.

    Attributes:
        alone: Seconds of each request before there was a job.
        quiet: Sum of all phases without requests.
        busy: Sum of all phases with requests.
        latencies: Seconds of each request, from when it was due.
        waited: Seconds until a worker took the first piece of each request.
        served: Seconds that all devices together worked for each request.
        lane_tokens: Tokens of all requests.
        lane_seconds: Time of all phases with requests.
    """

    alone: list[float] = field(default_factory=list)
    quiet: Phase = field(default_factory=Phase)
    busy: Phase = field(default_factory=Phase)
    latencies: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    lane_tokens: int = 0
    lane_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Share of requests in all tokens of the phases with requests."""
        lane = self.lane_tokens / self.lane_seconds
        return lane / (lane + self.busy.tokens_per_second)

    @property
    def loss(self) -> float:
        """Share of its speed that the job lost to requests."""
        return 1 - self.busy.tokens_per_second / self.quiet.tokens_per_second

    @property
    def allowed(self) -> float:
        """Most seconds that 99 of 100 requests may take."""
        return self.quiet.batch_seconds + percentile(self.alone, 50) + SECONDS_ALLOWED

    def figures(self) -> dict[str, float]:
        """Return all that is reported, by name."""
        return {
            "requests": len(self.latencies),
            "tokens_per_request": self.lane_tokens / len(self.latencies),
            "p50_seconds": percentile(self.latencies, 50),
            "p99_seconds": percentile(self.latencies, 99),
            "max_seconds": max(self.latencies),
            "alone_p50_seconds": percentile(self.alone, 50),
            "alone_p99_seconds": percentile(self.alone, 99),
            "p99_allowed_seconds": self.allowed,
            "waited_p50_seconds": percentile(self.waited, 50),
            "waited_p99_seconds": percentile(self.waited, 99),
            "served_p50_seconds": percentile(self.served, 50),
            "served_p99_seconds": percentile(self.served, 99),
            "batch_seconds": self.busy.batch_seconds,
            "batch_seconds_quiet": self.quiet.batch_seconds,
            "job_tokens_per_second": self.busy.tokens_per_second,
            "job_tokens_per_second_quiet": self.quiet.tokens_per_second,
            "share_of_tokens": self.share,
            "job_loss": self.loss,
            "job_loss_allowed": self.share + LOSS_ALLOWED,
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which so many percent lie."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass
class Traffic:
    """Sender of requests.

    Attributes:
        lane: Queue for interactive requests.
        spec: Specification of all requests.
        share: Share of requests in all tokens.
    """

    lane: Lane
    spec: JobSpec
    share: float
    lines: list[str] = field(default_factory=lambda: [text[:TEXT_CHARACTERS] for text in texts()])
    numbers: Iterator[int] = field(default_factory=count)

    def send(self, requests: int, rate: float) -> list[tuple[float, LaneAnswer]]:
        """Send requests at a steady rate; return seconds since each was due, and its answer."""
        began = time.monotonic()
        with ThreadPoolExecutor(max_workers=CALLERS) as pool:
            asked = [pool.submit(self.ask, began + place / rate) for place in range(requests)]
            return [each.result() for each in asked]

    def ask(self, due: float) -> tuple[float, LaneAnswer]:
        """Send a request at a monotonic time at the earliest; return its latency and answer."""
        threading.Event().wait(max(0.0, due - time.monotonic()))
        first = next(self.numbers) * TEXTS
        chosen = [self.lines[(first + place) % len(self.lines)] for place in range(TEXTS)]
        answer = self.lane.ask(self.spec, chosen, TIMEOUT_SECONDS)
        return time.monotonic() - due, answer


def texts() -> list[str]:
    """Return the first lines of the standard library's docstrings."""
    return [text.split("\n", 1)[0] for text in documentation()]


class Watch:
    """Observer that follows a job in a thread, and notes what becomes of it in a phase."""

    def __init__(self, farm: FarmClient, job: str) -> None:
        self._farm = farm
        self._job = job
        self._ended = threading.Event()
        self._commits: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Add to `phase` what the job does inside the block."""
        watch = Watch(self._farm, self._job)
        before = watch._account()
        watch._thread.start()
        try:
            yield
        finally:
            watch._ended.set()
            watch._thread.join()
        after = watch._account()
        # Between the first commit and the last: what is left at both ends is half a commit.
        changes = [now for last, now in pairwise(watch._commits) if now[1] != last[1]]
        phase.add(
            Phase(
                changes[-1][0] - changes[0][0],
                changes[-1][1] - changes[0][1],
                after[0] - before[0],
                after[1] - before[1],
            )
        )

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            tokens = self._farm.job(self._job).status().real_tokens_done
            self._commits.append((time.monotonic(), tokens))

    def _account(self) -> tuple[int, float]:
        accounts = self._farm.reports.accounts(self._job).values()
        forward = sum(each.seconds.get("forward", 0.0) for each in accounts)
        return sum(each.batches for each in accounts), forward


def measure(
    directory: Path, settings: Settings, arguments: argparse.Namespace, model: str
) -> Report:
    """Send requests alone, then run phases in turn beside a job until there are enough requests."""
    report = Report()
    few = write_corpus("mixed", directory, WARM_CHUNKS)
    many = write_corpus("mixed", directory, arguments.chunks)
    devices, workers = arguments.devices, arguments.workers
    with (
        run_local_farm(directory / "farm", settings, devices, workers) as local,
        closing_client(local.url) as client,
    ):
        farm = FarmClient(client)
        traffic = Traffic(Lane(client, settings), JobSpec(model=model), arguments.share)
        with embedding(few, directory / "few", local.url, arguments.model) as process:
            process.wait()  # after it all workers have the model
        report.alone = [traffic.ask(time.monotonic())[0] for _ in range(ALONE)]
        with embedding(many, directory / "many", local.url, arguments.model):
            job = wait_for_job(farm)
            lengths = cycle(PHASE_SECONDS)
            while len(report.latencies) < arguments.requests:
                measure_phases(report, farm, job, traffic, next(lengths))
    return report


def measure_phases(
    report: Report, farm: FarmClient, job: str, traffic: Traffic, seconds: float
) -> None:
    """Run a phase without requests and one with, of so many seconds each."""
    watch, settings = Watch(farm, job), traffic.lane.settings
    threading.Event().wait(settings.lane_quiet_seconds + settings.micro_batch_seconds_max)
    with watch.phase(report.quiet):
        threading.Event().wait(seconds)
    _, answer = traffic.ask(time.monotonic())
    rate = traffic.share / (1 - traffic.share) * report.quiet.tokens_per_second / answer.token_count
    traffic.send(math.ceil(rate), rate)  # until all know that there are requests
    with watch.phase(report.busy):
        began = time.monotonic()
        answers = traffic.send(math.ceil(rate * seconds), rate)
        report.lane_seconds += time.monotonic() - began
    report.latencies += [seconds for seconds, _ in answers]
    report.waited += [answer.waited_seconds for _, answer in answers]
    report.served += [answer.seconds for _, answer in answers]
    report.lane_tokens += sum(answer.token_count for _, answer in answers)


def wait_for_job(farm: FarmClient) -> str:
    """Wait until a job runs at full speed, and return its id.

    Raises:
        TimeoutError: No job runs at full speed in time.
    """
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(JobGone):
            for job in farm.job_ids():
                if farm.job(job).status().real_tokens_done > WARM_TOKENS:
                    return job
        threading.Event().wait(LOOK_SECONDS)
    raise TimeoutError("no job runs")


@contextlib.contextmanager
def embedding(corpus: Path, out: Path, url: str, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `embedfarm embed` on a farm; it is ended with the block at the latest."""
    words = ["embed", str(corpus), "--out", str(out), "--redis", url, "--model", model]
    with subprocess.Popen(
        [sys.executable, "-c", "from embedfarm.cli import main; main()", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def to_table(report: Report) -> str:
    """Format the figures for people."""
    f = report.figures()
    latency = (f["p50_seconds"], f["p99_seconds"], f["max_seconds"])
    rows = {
        "requests": "{:,} of {} texts, {:,.0f} tokens each".format(
            f["requests"], TEXTS, f["tokens_per_request"]
        ),
        "latency": "P50 {:.3f} s, P99 {:.3f} s, at most {:.3f} s".format(*latency),
        "until it is taken": "P50 {waited_p50_seconds:.3f} s, P99 {waited_p99_seconds:.3f} s",
        "time of devices": "P50 {served_p50_seconds:.3f} s, P99 {served_p99_seconds:.3f} s",
        "job's device batch": "{batch_seconds:.3f} s with requests, {batch_seconds_quiet:.3f} s "
        "without",
        "alone": "P50 {alone_p50_seconds:.3f} s, P99 {alone_p99_seconds:.3f} s",
        "allowed": "P99 {p99_allowed_seconds:.3f} s: the job's device batch, its own, and 100 ms",
        "job": "{job_tokens_per_second:,.0f} tokens/s with requests, "
        "{job_tokens_per_second_quiet:,.0f} without",
        "loss": "{job_loss:.1%}; allowed {job_loss_allowed:.1%}, of which {share_of_tokens:.1%} "
        "are the requests' share of tokens",
    }
    return "".join(f"{name:20}{text.format(**f)}\n" for name, text in rows.items())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.1, help="of all tokens, for requests")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--other", action="store_true", help="ask for another model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--devices", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as name:
        directory, model = Path(name), arguments.model
        if arguments.other:
            model = str(directory / "other")
            Path(model).symlink_to(model_files.resolve(arguments.model), target_is_directory=True)
        report = measure(directory, Settings(), arguments, model)
    if arguments.json:
        sys.stdout.write(json.dumps(report.figures() | {"runs": asdict(report)}) + "\n")
    else:
        sys.stdout.write(to_table(report))


if __name__ == "__main__":
    main()
