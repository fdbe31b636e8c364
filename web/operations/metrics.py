"""`/metrics` for Prometheus: the farm as its server has it, and the requests of this program.

No label has more values than there are workers, routes and states; jobs are none.
"""

import threading
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, cast

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import Completion, Heartbeat, SchedulerStats
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from embedfarm.watch.advice_reader import read_advice
from embedfarm.watch.advised_workers import Advice
from embedfarm.watch.overview import JobFacts, read_jobs
from embedfarm.watch.view import FarmReader, FarmView
from embedfarm.web.auth.keys import Scope as KeyScope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.http.problems import problems
from embedfarm.web.operations.advice_metrics import advised_metrics, backlog_metric
from embedfarm.web.operations.metric_families import PREFIX, counter, gauge
from embedfarm.web.operations.model_metrics import count_metrics, resident_metrics
from embedfarm.web.operations.server_metrics import server_metrics
from embedfarm.web.services import Caller, Service, need

METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKENS: Final = (100, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
CHUNKS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
EVENTS_SECONDS: Final = 0.001  # the shortest time that a read of events can wait

router: Final = APIRouter(tags=["operations"])


@dataclass(eq=False)
class Figures(Collector):
    """All metrics that `/metrics` shows to the operator.

    Attributes:
        farm: The farm that is measured.
        settings: Settings of the farm.
        registry: Prometheus registry with this collector, and with what this program counts.
    """

    farm: FarmClient
    settings: Settings
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _after: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._reader = FarmReader(self.farm, self.settings)
        self.requests = Counter(
            f"{PREFIX}requests",
            "HTTP requests that were answered.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.latency = Histogram(
            f"{PREFIX}request_latency_seconds",
            "Seconds from an HTTP request to the end of its response.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge(
            f"{PREFIX}requests_running",
            "HTTP requests in work, those that wait for vectors included.",
            registry=self.registry,
        )
        self.waiting = Gauge(
            f"{PREFIX}requests_waiting",
            "HTTP requests that wait for vectors.",
            registry=self.registry,
        )
        self._durations = Histogram(
            f"{PREFIX}batch_duration_seconds",
            "Seconds that a micro-batch took, from its first block to its last commit.",
            ["worker"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._tokens = Histogram(
            f"{PREFIX}batch_tokens",
            "Tokens of a micro-batch, as its blocks count them.",
            buckets=TOKENS,
            registry=self.registry,
        )
        self._chunks = Histogram(
            f"{PREFIX}batch_chunks",
            "Chunks of a micro-batch.",
            buckets=CHUNKS,
            registry=self.registry,
        )
        self.registry.register(self)

    def render(self) -> bytes:
        """Return the text for a scrape; micro-batches since the last scrape are counted first."""
        with self._lock:
            try:
                self._follow()
            except UNAVAILABLE:
                self._after = ""  # `server_up` says so
            return generate_latest(self.registry)

    def _follow(self) -> None:
        if not self._after:
            seconds, microseconds = self.farm.client.time()
            self._after = f"{seconds * 1000 + microseconds // 1000}-0"
        before = ""
        while before != self._after:
            before = self._after
            self._after, done = self.farm.statistics.events(before, EVENTS_SECONDS)
            self._count(done)

    def _count(self, done: Iterable[Completion]) -> None:
        for each in done:
            self._durations.labels(each.worker).observe(each.seconds)
            self._tokens.observe(each.tokens)
            self._chunks.observe(each.chunks)

    def describe(self) -> Iterable[Metric]:
        """Describe no metric, so that registering does not ask the farm."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the farm's metrics now; without its server only that it is away."""
        yield gauge(
            "build_info",
            "The version of this program; always 1.",
            {(version("embedfarm"),): 1.0},
            "version",
        )
        try:
            found = list(self._look())
        except UNAVAILABLE:
            found = []
        up = {(): float(bool(found))}
        yield gauge("server_up", "Whether Redis answers: 1, or 0.", up)
        yield from found

    def _look(self) -> Iterator[Metric]:
        active = self.farm.plans.has_scheduler()
        yield gauge("scheduler_active", "Whether a scheduler plans: 1, or 0.", {(): float(active)})
        workers = self.farm.workers()
        ended = {of: float(count) for of, count in self.farm.endings().items()}
        words = "Jobs that have ended, by how, and what that was about: the count only grows."
        yield counter("jobs_ended", words, ended, "state", "cause")
        jobs = read_jobs(self.farm, self.farm.job_ids())
        view, advice = self._reader.read(), read_advice(self.farm, self.settings)
        yield from job_metrics(jobs, view, time.time(), advice)
        yield from advised_metrics(advice)
        yield from server_metrics(view, FarmWindow(self.farm.client, self.settings).seen())
        yield from worker_metrics(workers)
        yield from count_metrics(self.farm.model_counts.all())
        yield from scheduler_metrics(self.farm.plans.scheduler_stats())


def job_metrics(
    jobs: Sequence[JobFacts], view: FarmView, now: float, advice: Advice | None = None
) -> Iterator[Metric]:
    """Yield the metrics of all jobs: states, backlog, results, failed chunks, and what holds them.

    How long the backlog takes, and what holds it back, is what the pages say.
    """
    states = Tally(job.state for job in jobs)
    counts = {(name,): float(n) for name, n in states.items()}
    yield gauge("jobs", "Jobs that have not ended.", counts, "state")
    wanted = [job for job in jobs if not job.over]
    waiting = [job for job in wanted if job.blocks_in > job.blocks_done]
    tokens = sum(job.tokens_left for job in waiting)
    chunks = sum(job.chunks_to_embed for job in waiting)
    age = max((now - job.created_ms / 1000 for job in waiting), default=0)
    stored = sum(job.result_bytes for job in jobs)
    failed = sum(job.chunks_failed for job in wanted)
    yield gauge("backlog_chunks", "Chunks that are not embedded yet.", {(): float(chunks)})
    yield gauge("backlog_tokens", "Tokens that are not embedded yet.", {(): float(tokens)})
    yield gauge("backlog_age_seconds", "Age of the oldest job with such chunks.", {(): float(age)})
    yield gauge("results_bytes", "Bytes of results that wait in Redis.", {(): float(stored)})
    words = "Chunks that failed, of jobs in work."
    yield gauge("failed_chunks", words, {(): float(failed)})
    yield backlog_metric(view.backlog_seconds, advice)
    causes = Tally((each.cause, each.severity) for each in view.bottlenecks)
    found = {of: float(count) for of, count in causes.items()}
    words = "What holds the farm back, as its pages say it: sentences by cause and severity."
    yield gauge("bottlenecks", words, found, "cause", "severity")


def worker_metrics(workers: Iterable[Heartbeat]) -> Iterator[Metric]:
    """Yield each worker's speed, leases and time by activity; counters begin at its start."""
    beats = list(workers)
    yield _count_workers(beats)
    for name, attribute, words in (
        ("worker_rate_tokens_per_second", "tokens_per_second", "Speed of a worker while it works."),
        ("lease_size_tokens", "held_tokens", "Tokens of the blocks that a worker has leased."),
        ("worker_restarts", "restarts", "Times that a supervisor has started a worker again."),
        ("lease_age_seconds", "held_seconds", "Age of the oldest block that a worker has leased."),
    ):
        values = {(beat.worker,): float(getattr(beat, attribute)) for beat in beats}
        yield gauge(name, words, values, "worker")
    for name, attribute in (("chunks", "chunks_done"), ("tokens", "tokens_done")):
        values = {(beat.worker,): float(getattr(beat, attribute)) for beat in beats}
        words = f"{name.capitalize()} that a worker has embedded and committed since its start."
        yield counter(name, words, values, "worker")
    spent = {(b.worker, activity): s for b in beats for activity, s in b.where.items()}
    words = "Seconds of a worker since its start, by what it did in them."
    yield counter("worker_seconds", words, spent, "worker", "activity")
    for name in sorted({name for beat in beats for name in beat.lane}):
        values = {(beat.worker,): beat.lane[name] for beat in beats if name in beat.lane}
        words = f"{name.capitalize()} of interactive requests since the start of a worker."
        yield counter(f"lane_{name}", words, values, "worker")
    yield from resident_metrics(beats)
    yield from _device_metrics(beats)


def _count_workers(beats: Iterable[Heartbeat]) -> Metric:
    states = Tally(beat.state for beat in beats)
    values = {(name,): float(count) for name, count in states.items()}
    return gauge("workers", "Live workers.", values, "state")


def _device_metrics(beats: Iterable[Heartbeat]) -> Iterator[Metric]:
    facts: dict[str, dict[tuple[str, ...], float]] = {}
    for beat in beats:
        kind = "cpu" if beat.device.startswith(("cpu", "endpoint")) else "gpu"
        for name, value in beat.device_facts.items():
            facts.setdefault(f"{kind}_{name}", {})[beat.worker, beat.device] = value
    for name, values in sorted(facts.items()):
        words = f"{name.replace('_', ' ').capitalize()} of a worker's device, now."
        yield gauge(name, words, values, "worker", "device")


def scheduler_metrics(stats: SchedulerStats | None) -> Iterator[Metric]:
    """Yield the scheduler's metrics of the last minute; none if none was active lately."""
    if stats is None:
        return
    for name, value, words in (
        (
            "efficiency_ratio",
            stats.efficiency,
            "Share of the work that workers could do at their rates",
        ),
        ("padding_ratio", stats.padding, "Share of padding in the tokens of device batches"),
        (
            "prediction_error_ratio",
            stats.prediction_error,
            "Mean error of the predicted time of a micro-batch, as a share of that time",
        ),
        ("decision_mean_seconds", stats.decision_seconds_mean, "Mean time of a decision"),
        ("decision_p99_seconds", stats.decision_seconds_p99, "P99 of the time of a decision"),
        ("batch_p99_seconds", stats.micro_batch_seconds_p99, "P99 of the time of a micro-batch"),
    ):
        yield gauge(f"scheduler_{name}", f"{words}, over the last minute.", {(): value})
    words = "Decisions of the scheduler since its start."
    yield counter("scheduler_decisions", words, {(): float(stats.decisions)})


class Meter:
    """ASGI middleware that counts requests, the refused ones included."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through and note how it went."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        with self._figures.running.track_inprogress():
            try:
                await self._app(scope, receive, sending)
            finally:
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._figures.requests.labels(route, method, str(status)).inc()
                self._figures.latency.labels(route).observe(time.monotonic() - began)


@dataclass(frozen=True)
class TenantFigures(Collector):
    """The metrics that `/metrics` shows to a tenant: its own jobs, and the live workers."""

    farm: FarmClient
    reader: FarmReader

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the tenant's jobs and of the workers now."""
        jobs = read_jobs(self.farm, self.farm.job_ids())
        yield from job_metrics(jobs, self.reader.read(), time.time())
        yield _count_workers(self.farm.workers())


@router.get(
    "/metrics",
    response_class=Response,
    responses=problems()
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "OK"}},
    dependencies=need(KeyScope.READ),
)
def show_metrics(services: Service, who: Caller, request: Request, reader: Reader) -> Response:
    """Show the farm's figures for Prometheus; a tenant's key sees only its own jobs."""
    if who.tenant is None:
        text = cast("Figures", request.app.state.figures).render()
    else:
        text = generate_latest(cast("CollectorRegistry", TenantFigures(services.farm, reader)))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
