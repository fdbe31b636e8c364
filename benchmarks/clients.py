"""Benchmark of many people at once: clients that each send small requests in a row by HTTP.

    python -m benchmarks.clients [--clients 200] [--seconds 60] [--model M] [--workers N] [--json]
        [--report FILE]

The farm is `embedfarm up --port` with defaults, but without rate limits. Each client sends
POST /v1/embeddings with one to five short texts, and the next one as soon as it has the answer, on
one connection. An
answer of 429 is no error: the client waits for as long as it is told. The memory of the process
that serves is sampled; it is flat when its median of the last third is that of the first.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
import psutil

from benchmarks.corpora import MODEL, documentation
from benchmarks.interactive import percentile
from embedfarm.workers.cores import available_cores

TEXTS_MAX: Final = 5
TEXT_CHARACTERS: Final = 80  # a line, as long as what people ask
READY_SECONDS_MAX: Final = 300.0
ANSWER_SECONDS_MAX: Final = 150.0  # more than the farm lets anybody wait
SAMPLE_SECONDS: Final = 0.25
WARM_SECONDS: Final = 5.0  # in which the model is loaded, and threads are made
GROWTH_ALLOWED: Final = 0.05
UNUSED: Final = ssl.create_default_context()  # else every client reads all certificates for itself


@dataclass
class Report:
    """Figures of one run.

    Attributes:
        clients: Clients at a time.
        seconds: Length of the run, warm-up excluded.
        latencies: Seconds of each answer with vectors.
        statuses: How often each status came; "error" where no answer did, or a wrong one.
        rss_bytes: Resident memory of the process that serves, at each sample.
        load: Load average of the minute before the run: processes that wanted a core.
    """

    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def errors(self) -> int:
        """Number of answers that were neither vectors nor 429."""
        return self.statuses.total() - self.statuses["200"] - self.statuses["429"]

    @property
    def growth(self) -> float:
        """Growth of memory from the run's first third to its last, by their medians, as a share."""
        third = max(1, len(self.rss_bytes) // 3)
        first, last = (
            statistics.median(part) for part in (self.rss_bytes[:third], self.rss_bytes[-third:])
        )
        return last / first - 1

    def figures(self) -> dict[str, float]:
        """Return all that is reported, by name."""
        return {
            "clients": self.clients,
            "seconds": self.seconds,
            "requests": len(self.latencies),
            "requests_per_second": len(self.latencies) / self.seconds,
            "refused_429": self.statuses["429"],
            "errors": self.errors,
            "p50_seconds": percentile(self.latencies, 50),
            "p99_seconds": percentile(self.latencies, 99),
            "max_seconds": max(self.latencies),
            "rss_mib_max": max(self.rss_bytes) / 2**20,
            "rss_growth": self.growth,
            "rss_growth_allowed": GROWTH_ALLOWED,
            "load_before": self.load,
        }


@contextlib.contextmanager
def farm(directory: Path, model: str, workers: int) -> Iterator[str]:
    """Run `embedfarm up` with its state in a directory; yield its URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["up", "--devices", "cpu", "--workers", str(workers), "--port", str(port)]
    settings = {
        "EMBEDFARM_STATE_DIRECTORY": str(directory),
        "EMBEDFARM_MODELS": json.dumps([model]),
        "EMBEDFARM_HTTP_REQUESTS_PER_SECOND": "0",  # all come from one address here
    }
    with subprocess.Popen(
        [sys.executable, "-m", "embedfarm", *words],
        stdout=subprocess.DEVNULL,
        env=os.environ | settings,
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, model)
            yield url
        finally:
            process.terminate()


def wait_until_ready(url: str, model: str) -> None:
    """Wait until the farm answers with vectors.

    Raises:
        TimeoutError: There were no vectors in `READY_SECONDS_MAX`.
    """
    deadline = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(
                f"{url}/v1/embeddings",
                json={"model": model, "input": "ready?"},
                timeout=ANSWER_SECONDS_MAX,
            )
            if answer.status_code == httpx.codes.OK:
                return
        threading.Event().wait(SAMPLE_SECONDS)
    raise TimeoutError(f"no vectors in {READY_SECONDS_MAX:g} s")


def server_process(url: str) -> psutil.Process:
    """Find the process that serves an address.

    Raises:
        LookupError: No process serves it.
    """
    port = re.escape(url.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if re.search(rf" serve --port {port}$", " ".join(process.cmdline())):
                return process
    raise LookupError(f"nothing serves {url}")


async def ask_on(url: str, model: str, lines: list[str], report: Report, end: float) -> None:
    """Send one client's requests, one after the other, until a monotonic time."""
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS_MAX, verify=UNUSED) as client:
        while time.monotonic() < end:
            texts = random.choices(lines, k=random.randint(1, TEXTS_MAX))  # noqa: S311 -- no secret
            began = time.monotonic()
            try:
                answer = await client.post(
                    f"{url}/v1/embeddings", json={"model": model, "input": texts}
                )
            except httpx.HTTPError as error:
                report.statuses[type(error).__name__] += 1
                continue
            seconds = time.monotonic() - began
            status = answer.status_code
            if status == httpx.codes.OK and len(answer.json()["data"]) != len(texts):
                report.statuses["too few vectors"] += 1
                continue
            report.statuses[str(status)] += 1
            if status == httpx.codes.OK:
                report.latencies.append(seconds)
            elif status == httpx.codes.TOO_MANY_REQUESTS:
                await asyncio.sleep(float(answer.headers["retry-after"]))


async def run(url: str, model: str, report: Report, seconds: float) -> None:
    """Run all clients for some seconds after a warm-up, and sample the server's memory."""
    lines = [text.split("\n", 1)[0][:TEXT_CHARACTERS] for text in documentation()]
    warm = Report(report.clients)
    await _run(url, model, lines, warm, WARM_SECONDS)
    serving = server_process(url)
    ended = asyncio.Event()

    async def sample() -> None:
        while not ended.is_set():
            report.rss_bytes.append(serving.memory_info().rss)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), SAMPLE_SECONDS)

    sampling = asyncio.create_task(sample())
    began = time.monotonic()
    await _run(url, model, lines, report, seconds)
    report.seconds = time.monotonic() - began
    ended.set()
    await sampling
    report.statuses.update({each: warm.statuses[each] for each in warm.statuses if each != "200"})


async def _run(url: str, model: str, lines: list[str], report: Report, seconds: float) -> None:
    end = time.monotonic() + seconds
    asking = (ask_on(url, model, lines, report, end) for _ in range(report.clients))
    await asyncio.gather(*asking)


def measure(directory: Path, model: str, workers: int, clients: int, seconds: float) -> Report:
    """Start a farm of its own, and have so many clients ask it for so long."""
    report = Report(clients)
    with farm(directory, model, workers) as url:
        asyncio.run(run(url, model, report, seconds))
    return report


def to_rows(report: Report) -> dict[str, str]:
    """Format the figures for people, by name."""
    rows = {
        "clients": "{clients} for {seconds:.0f} s",
        "requests": "{requests:,}, {requests_per_second:,.0f}/s, of 1 to 5 lines each",
        "answers": ", ".join(f"{name} {n:,}" for name, n in report.statuses.most_common()),
        "latency": "P50 {p50_seconds:.3f} s, P99 {p99_seconds:.3f} s, at most {max_seconds:.3f} s",
        "memory of serve": "at most {rss_mib_max:,.0f} MiB, {rss_growth:+.1%} from the first third "
        "to the last; allowed {rss_growth_allowed:.0%}",
        "load": "{load_before:.1f} before the run",
    }
    figures = report.figures()
    return {name: text.format(**figures) for name, text in rows.items()}


def to_document(rows: dict[str, str], model: str, workers: int) -> str:
    """Make a page of the documentation from the rows."""
    table = "".join(f"| {name} | {text} |\n" for name, text in rows.items())
    return (
        "# Many clients\n\n"
        f"Made by `python -m benchmarks.clients --workers {workers} --report` on "
        f"{datetime.now(UTC):%Y-%m-%d}; do not edit. "
        f"Model {model},\n{workers} workers on {len(available_cores())} cores, which the clients "
        "share. Each client sends one\n`POST /v1/embeddings` after the other. The load is what "
        "else ran.\n\n"
        f"| figure | here |\n| --- | --- |\n{table}"
    )


def main() -> None:
    """Measure and print; status 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", default=MODEL, help="null:384 for everything but the model")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help="write a page of the documentation")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embedfarm-bench-") as directory:
        report = measure(
            Path(directory), chosen.model, chosen.workers, chosen.clients, chosen.seconds
        )
    rows = to_rows(report)
    if chosen.report:
        chosen.report.write_text(to_document(rows, chosen.model, chosen.workers), encoding="utf-8")
    table = "".join(f"{name:20}{text}\n" for name, text in rows.items())
    sys.stdout.write(json.dumps(report.figures()) + "\n" if chosen.json else table)
    raise SystemExit(bool(report.errors) or report.growth > GROWTH_ALLOWED)


if __name__ == "__main__":
    main()
