"""A week in fast-forward: many small jobs through one farm, and a count of what they leave.

    python -m benchmarks.week [--jobs 10000] [--json] [--report FILE]

The farm is as `embedfarm up --port` runs it. Jobs come by every door, and end in every way; what
ended leaves by the setting `ended_jobs_max`, which is 100 here, and what was cancelled by the task
`cleanup`. At up to twenty moments nothing is in work, and memory, keys, open files and threads
are counted. Status 1 if a job went wrong, a key is left, or memory grew.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import psutil
import redis
from rich.console import Console
from rq import Queue
from rq.results import Result

from benchmarks.marked import write_marked
from embedfarm.cli.progress import View
from embedfarm.collector.feed_results import acknowledge, take
from embedfarm.contract import wire
from embedfarm.contract.broker import connect
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.producer.submitter import Submitter
from embedfarm.readers import CorpusOptions
from embedfarm.runs.place import Place
from embedfarm.runs.private_farm import run_local_farm
from embedfarm.runs.request import Request
from embedfarm.runs.run import Run
from embedfarm.workers.cores import available_cores

MODEL: Final = "null:16"
SPEC: Final = JobSpec(model=MODEL)
CHUNKS: Final = 20  # of one job
AT_ONCE: Final = 8
MOMENTS: Final = 20
MOMENTS_MIN: Final = 3
MOMENT_JOBS: Final = 100  # fewer, of a short run
WARM: Final = 2  # moments after which everything has been used once
GROWTH_ALLOWED: Final = 0.05  # of memory, over the second half
NOISE_BYTES: Final = 1 << 20  # memory that comes and goes, however small a process is
FILES_ALLOWED: Final = 8  # connections come and go
SECONDS_MAX: Final = 120.0  # for one job, and for the farm to come to rest
LOOK_SECONDS: Final = 0.02
DRIVER: Final = "driver"  # no role of the farm: its memory is shown, not judged
BYTES_MAX: Final = 1 << 20


class WentWrong(RuntimeError):
    """Raised when a job does not end as it should."""


class Process(NamedTuple):
    """Resources of a process at a moment: resident bytes, open files and sockets, threads."""

    rss_bytes: int
    files: int
    threads: int


@dataclass
class Moment:
    """Figures of the farm at rest.

    Attributes:
        jobs: Jobs done so far.
        seconds: Time since the first job began.
        server_bytes: The server's `used_memory`, less its news and its hour of samples, which
            settings bound by number and time.
        keys: Keys on the server by kind, records of ended jobs left out.
        processes: Processes by role.
    """

    jobs: int
    seconds: float
    server_bytes: int
    keys: Counter[str]
    processes: dict[str, Process]


@dataclass
class Week:
    """Figures of one run.

    Attributes:
        ended: Jobs by what became of them.
        moments: Moments in the order of time.
        load: Load average of the minute before the run: processes that wanted a core.
    """

    ended: Counter[str] = field(default_factory=Counter)
    moments: list[Moment] = field(default_factory=list)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def first(self) -> Moment:
        """The first moment that counts, after the warm-up."""
        return self.moments[min(WARM, len(self.moments)) - 1]

    @property
    def last(self) -> Moment:
        """The last moment of the run."""
        return self.moments[-1]

    @property
    def left(self) -> dict[str, int]:
        """Number of keys that were added on the server since the first moment, by kind."""
        return dict(self.last.keys - self.first.keys)

    def growth(self, of: Callable[[Moment], int]) -> float:
        """Return how much a figure grows over the second half by least squares, over its mean.

        The divisor is at least `NOISE_BYTES / GROWTH_ALLOWED`, so that the noise of a small figure
        stays within what is allowed.
        """
        half = self.moments[len(self.moments) // 2 :]
        values = np.array([of(each) for each in half], dtype=np.float64)
        if len(values) < 2:  # noqa: PLR2004 -- a line needs two points
            return 0.0
        slope = np.polyfit(np.arange(len(values)), values, 1)[0]
        return float(slope * (len(values) - 1) / max(values.mean(), NOISE_BYTES / GROWTH_ALLOWED))

    @property
    def growths(self) -> dict[str, float]:
        """Relative growth of the server's memory and of each process, over the second half."""
        roles = self.last.processes
        found = {"what the server holds": self.growth(lambda each: each.server_bytes)}
        for role in roles:
            found[role] = self.growth(lambda each, role=role: each.processes[role].rss_bytes)  # type: ignore[misc] # a default binds it
        return found

    @property
    def faults(self) -> list[str]:
        """Descriptions of all that is not as it should be."""
        faults = [f"{count} more keys {kind}" for kind, count in self.left.items()]
        faults += [
            f"memory of {name} grew by {growth:.1%}"
            for name, growth in self.growths.items()
            if growth > GROWTH_ALLOWED and name != DRIVER
        ]
        for role, now in self.last.processes.items():
            before = self.first.processes[role]
            if now.files > before.files + FILES_ALLOWED or now.threads > before.threads:
                faults.append(f"{role}: {before} has become {now}")
        return faults


@dataclass
class Driver:
    """Client that gives the farm jobs, and takes what comes of them.

    Attributes:
        url: URL of the farm's server.
        home: Directory for the corpora and outputs of its jobs.
        settings: The farm's settings.
    """

    url: str
    home: Path
    settings: Settings

    @cached_property
    def client(self) -> redis.Redis:
        """Redis client for all threads."""
        return connect(self.url)

    @cached_property
    def farm(self) -> FarmClient:
        """The farm on the server."""
        return FarmClient(self.client)

    def do(self, number: int) -> str:
        """Do a whole job, and return its kind."""
        kind = kind_of(number)
        KINDS[kind](self, f"job-{number}")
        return kind

    # The kinds of jobs.

    def feed(self, name: str) -> None:
        """Do a job whose texts a program submits, and whose vectors a program takes."""
        self._submit(name, SPEC)
        self._take(name, failed=0)

    def embed(self, name: str) -> None:
        """Do a job by `embedfarm embed`, in this process."""
        corpus, out = self._corpus(name)
        request = Request((str(corpus),), CorpusOptions(), False, SPEC, "npy")
        place = Place(out, self.settings, "cpu", 0, name)
        with (self.home / "progress").open("a") as file:
            view = View(Console(file=file), lines=True)
            manifest = Run(request, place, view.show, threading.Event()).embed()
        _check(manifest.count == CHUNKS and not manifest.failed, f"{name}: {manifest}")
        shutil.rmtree(out.parent)

    def ingest(self, name: str) -> None:
        """Do a job by the task `embed_corpus`."""
        corpus, out = self._corpus(name)
        report = self.task("embed_corpus", str(corpus), str(out), model=MODEL, job_id=name)
        _check(report["count"] == CHUNKS, f"{name}: {report}")
        shutil.rmtree(out.parent)

    def with_bad_chunks(self, name: str) -> None:
        """Do a job of two blocks, of which one cannot be read."""
        job = self.farm.job(name)
        self.farm.admit(name, self.settings.jobs_max)
        job.create(SPEC, 0)
        texts = _texts(name)
        half = CHUNKS // 2
        good, bad = (Block(start=at, texts=texts[at : at + half]) for at in (0, half))
        job.push([(good, encode(good)), (bad, b"\x01" + b"no block")])
        job.close(CHUNKS)
        self._take(name, failed=half)

    def refused(self, name: str) -> None:
        """Do a job of a model that no worker can load."""
        self._submit(name, JobSpec(model="null:nothing"))
        _wait(lambda: self.farm.reports.refusals(name), f"{name} is refused")
        (reason,) = set(self.farm.reports.refusals(name).values())
        self.farm.end(name, "failed", reason, self.settings)

    def cancelled(self, name: str) -> None:
        """Cancel a job while it is in work, and leave it to `cleanup`."""
        self._submit(name, SPEC).cancel()

    def deleted(self, name: str) -> None:
        """Delete a job while it is in work."""
        self._submit(name, SPEC).delete()

    def _submit(self, name: str, spec: JobSpec) -> Job:
        submitter = Submitter(self.farm, name, spec, 0, self.settings, threading.Event())
        submitter.submit([Rows(_texts(name), None)])
        return self.farm.job(name)

    def _take(self, name: str, *, failed: int) -> None:
        """Read all results of a job, and end it."""
        job, start, errors = self.farm.job(name), 0, 0
        deadline = time.monotonic() + SECONDS_MAX
        while start < CHUNKS:
            chunks = take(job, start, CHUNKS, BYTES_MAX)
            if chunks is None:
                _check(time.monotonic() < deadline, f"{name} stands still at chunk {start}")
                job.wait(job.keys.result_wakeup, 1.0)
                continue
            start += len(chunks.batch.good)
            errors += len(chunks.failures)
            acknowledge(job, start)
        _check(errors == failed, f"{name}: {errors} chunks failed")
        self.farm.end(name, "finished", "", self.settings, drained_upto=CHUNKS)

    def _corpus(self, name: str) -> tuple[Path, Path]:
        """Write a corpus in the job's own directory; return its path and that for its vectors."""
        place = self.home / name
        place.mkdir()
        corpus = place / "corpus.txt"
        corpus.write_text("".join(f"{text}\n" for text in _texts(name)))
        return corpus, place / "out"

    # Between the jobs.

    def task(self, name: str, *words: object, **options: object) -> Any:  # noqa: ANN401 -- its report
        """Run a task of RQ, and return its report."""
        queue = Queue("embedfarm", self.client, serializer="json")
        task = queue.enqueue(
            f"producer.tasks.{name}", *words, **options, result_ttl=int(SECONDS_MAX)
        )
        _wait(lambda: task.get_status() in {"finished", "failed"}, f"{name} ends")
        _check(task.get_status() == "finished", f"{name} failed")
        report = task.return_value()
        task.delete()
        Result.delete_all(task)
        return report

    def rest(self) -> None:
        """Wait until nothing is in work, and remove what has ended.

        Raises:
            WentWrong: Something is still there after `SECONDS_MAX`.
        """
        self.task("cleanup", 0)
        for name in self.farm.ended_ids(self.settings.ended_jobs_max + AT_ONCE):
            self.farm.job(name).delete()
        _wait(lambda: not self.farm.statuses(), "no job is left")
        _wait(lambda: not list(self.client.scan_iter("rq:job:*", 1000)), "RQ has forgotten")


KINDS: Final[dict[str, Callable[[Driver, str], None]]] = {
    "feed": Driver.feed,
    "embed": Driver.embed,
    "ingest": Driver.ingest,
    "with bad chunks": Driver.with_bad_chunks,
    "refused": Driver.refused,
    "cancelled": Driver.cancelled,
    "deleted": Driver.deleted,
}
TURNS: Final = {3: "deleted", 7: "cancelled", 13: "refused", 17: "with bad chunks", 9: "embed"}


def kind_of(number: int) -> str:
    """Choose a job's kind: five of twenty in a row are special, and one of 500 comes by RQ."""
    return "ingest" if number % 500 == 100 else TURNS.get(number % 20, "feed")  # noqa: PLR2004 -- said above


def _texts(name: str) -> list[str]:
    return [f"text {index} of {name}" for index in range(CHUNKS)]


def _check(good: object, words: str) -> None:
    if not good:
        raise WentWrong(words)


def _wait(condition: Callable[[], object], words: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        _check(time.monotonic() < deadline, f"not in {SECONDS_MAX:g} s: {words}")
        threading.Event().wait(LOOK_SECONDS)


def count_keys(client: redis.Redis) -> Counter[str]:
    """Count keys by kind: parts that differ from one name to the next are left out.

    The stream of samples does not count either: it is one key and begins after some seconds. Nor do
    wake-ups, which expire within seconds of the last plan.
    """
    kinds = Counter[str]()
    for key in set(client.scan_iter(count=1000)) - {wire.SAMPLES.encode()}:
        name = key.decode()
        if name.startswith(wire.wake_key("")):
            continue
        tag, _, rest = name.removeprefix("ef:{").partition("}:")
        kinds[f"{'farm' if tag == 'farm' else 'job'}:{rest.split(':')[0]}" if rest else
              ":".join(name.split(":")[:2])] += 1  # fmt: skip
    return kinds


def look_at(pid: int) -> Process:
    """Measure a process now."""
    process = psutil.Process(pid)
    return Process(process.memory_info().rss, process.num_fds(), process.num_threads())


def look(driver: Driver, pids: dict[str, int], jobs: int, began: float) -> Moment:
    """Let the farm come to rest, and measure it."""
    driver.rest()
    streams = (wire.EVENTS, wire.SAMPLES)
    aside = sum(driver.client.memory_usage(key, samples=0) or 0 for key in streams)
    return Moment(
        jobs,
        time.monotonic() - began,
        int(driver.client.info("memory")["used_memory"]) - aside,
        count_keys(driver.client),
        {role: look_at(pid) for role, pid in pids.items()},
    )


@contextlib.contextmanager
def farm(home: Path) -> Iterator[tuple[Driver, dict[str, int], str]]:
    """Run a farm with every role; yield its driver, its processes' ids, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = Settings(ended_jobs_max=100, ingest_roots=[home], models=(MODEL,))
    with run_local_farm(home / "farm", settings, "cpu", 1, port) as local:
        driver = Driver(local.url, home, settings.model_copy(update={"redis_url": local.url}))
        _wait(driver.farm.workers, "a worker is there")
        pids = {**local.server.pids, **local.stations.pids, DRIVER: os.getpid()}
        yield driver, pids, f"http://127.0.0.1:{port}"
        driver.client.close()


def visit(url: str) -> None:
    """Ask for the pages and lists that are looked at all the time, and for vectors."""
    with httpx.Client(base_url=url, timeout=SECONDS_MAX) as client:
        for path in ("/", "/workers", "/scheduler", "/metrics", "/v1/jobs"):
            client.get(path, headers={"accept": "text/html"}).raise_for_status()
        body = {"model": MODEL, "input": ["a text"]}
        client.post("/v1/embeddings", json=body).raise_for_status()


def is_served(url: str) -> bool:
    """Tell whether the farm answers at a URL."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/livez").is_success
    return False


def measure(home: Path, jobs: int) -> Week:
    """Run so many jobs through a farm of its own.

    Raises:
        WentWrong: A job did not end as it should.
    """
    week, step = Week(), -(-jobs // min(MOMENTS, max(MOMENTS_MIN, jobs // MOMENT_JOBS)))
    with farm(home) as (driver, pids, url), ThreadPoolExecutor(AT_ONCE) as pool:
        _wait(partial(is_served, url), "HTTP is served")
        began = time.monotonic()
        for first in range(0, jobs, step):
            week.ended.update(pool.map(driver.do, range(first, min(first + step, jobs))))
            visit(url)
            week.moments.append(look(driver, pids, min(first + step, jobs), began))
    return week


def to_figures(week: Week) -> dict[str, Any]:
    """Return all that is reported, by name."""
    return {
        "jobs": week.last.jobs,
        "seconds": week.last.seconds,
        "ended": dict(week.ended),
        "keys": [week.first.keys.total(), week.last.keys.total()],
        "used_memory_bytes": [week.first.server_bytes, week.last.server_bytes],
        "growth": week.growths,
        "growth_allowed": GROWTH_ALLOWED,
        "faults": week.faults,
        "load_before": week.load,
    }


def to_table(week: Week) -> str:
    """Format the figures for people, in Markdown."""
    first, last, growths = week.first, week.last, week.growths
    ended = ", ".join(f"{count:,} {kind}" for kind, count in week.ended.most_common())
    rows: list[Sequence[str]] = [
        ("keys on the server", f"{first.keys.total()}", f"{last.keys.total()}", ""),
        _row(
            "what the server holds",
            first.server_bytes,
            last.server_bytes,
            growths["what the server holds"],
        ),
    ]
    for role, process in last.processes.items():
        before = first.processes[role]
        files = f"{before.files} and {before.threads}, {process.files} and {process.threads}"
        rows.append(_row(role, before.rss_bytes, process.rss_bytes, growths[role], files))
    table = "".join(f"| {' | '.join((*row, '')[:5])} |\n" for row in rows)
    return (
        f"{last.jobs:,} jobs of {CHUNKS} chunks in {last.seconds:,.0f} s, "
        f"{last.jobs / last.seconds:.1f}/s: {ended}.\n"
        f"{datetime.now(UTC):%Y-%m-%d}, {len(available_cores())} cores, load {week.load:.1f} "
        f"before the run. {'; '.join(week.faults) or 'No fault'}.\n\n"
        f"| | after {first.jobs:,} jobs | after {last.jobs:,} jobs | growth over the second half "
        f"(at most {GROWTH_ALLOWED:.0%}) | files and threads, before and after |\n"
        f"| --- | ---: | ---: | ---: | --- |\n{table}"
    )


def _row(name: str, before: int, after: int, growth: float, more: str = "") -> Sequence[str]:
    return name, f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB", f"{growth:+.1%}", more


def main() -> None:
    """Measure and print; status 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help="a document with the marks of this table")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embedfarm-week-") as directory:
        week = measure(Path(directory), chosen.jobs)
    if chosen.report:
        write_marked(chosen.report, "week", to_table(week))
    sys.stdout.write(json.dumps(to_figures(week)) + "\n" if chosen.json else to_table(week))
    raise SystemExit(bool(week.faults))


if __name__ == "__main__":
    main()
