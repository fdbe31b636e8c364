"""The whole farm in one look: the figures that the overview page and `embedfarm top` show."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from embedfarm.contract import wire
from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.outlook import chunk_rates, chunks_left, live_paces, outlook
from embedfarm.contract.pace import (
    AVERAGE_SECONDS,
    NOW_SECONDS,
    Pace,
    Range,
    TimedMicroBatch,
    WorkDone,
    averages,
    forecast_seconds,
    total,
    who_works,
)
from embedfarm.contract.records import Heartbeat, Sample
from embedfarm.contract.settings import Settings
from embedfarm.contract.unreadable_records import names_of, readable
from embedfarm.contract.window import ask_room, room_from
from embedfarm.watch.bottlenecks import Bottleneck, Situation, find_bottlenecks
from embedfarm.watch.overview import JobFacts, JobProgress, progress, read_jobs

JOBS_MAX: Final = 1000
ENDED_MAX: Final = 5
HOUR_SECONDS: Final = 3600.0


class Point(NamedTuple):
    """A point of the farm's curves.

    Attributes:
        time: Unix time, in seconds, of the end of the time that the point covers.
        seconds: Length of the time that the point covers.
        tokens_per_second: Mean of real tokens per second.
        chunks_per_second: Mean of chunks per second.
        backlog_tokens: Tokens that were sent and not done at the end.
        workers_alive: Number of live workers at the end.
    """

    time: float
    seconds: float
    tokens_per_second: float
    chunks_per_second: float
    backlog_tokens: int
    workers_alive: int


@dataclass(frozen=True, kw_only=True)
class JobView(JobProgress):
    """A job in a view of the whole farm.

    `chunks_left` is the number of chunks without a vector, None while the producer still adds
    chunks. `waiting_blocks` is the number of blocks that nobody has leased.
    """

    waiting_blocks: int
    chunks_left: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A live worker.

    Attributes:
        worker: Name of the worker.
        host: Name of its host.
        device: Name of its device, such as "cpu-0" or "cuda-GPU-6f8e…".
        state: State of the worker: "loading", "idle", "busy" or "draining".
        model: Key of the loaded model, "" when none is.
        job: The job of its current micro-batch, "" when idle.
        tokens_per_second: Real tokens per second over the last 15 seconds, as in `FarmView`.
        chunks_per_second: Chunks per second over the last 15 seconds, as in `FarmView`.
        share: Its share of the farm's tokens of the last five minutes, 0 to 1.
        tokens_done: Real tokens since its start.
        chunks_done: Chunks since its start.
        memory_used_bytes: Memory used on its GPU, else by its process; None if not known.
        memory_total_bytes: Memory of its GPU, else of its host; None if not known.
        temperature_celsius: Temperature of its GPU; None if not known.
        utilization_ratio: Utilization of its GPU, 0 to 1; None if not known.
        refused: Jobs that the worker could not embed a moment ago.
    """

    worker: str
    host: str
    device: str
    state: str
    model: str
    job: str
    tokens_per_second: float
    chunks_per_second: float
    share: float
    tokens_done: int
    chunks_done: int
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    temperature_celsius: float | None
    utilization_ratio: float | None
    refused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FarmView:
    """The farm at one moment.

    Rates "now" are over the last 15 seconds, from the micro-batches that live workers reported; of
    a busy worker up to the end of its last one. Interactive requests do not count.

    Attributes:
        time: Unix seconds by the server's clock.
        tokens_per_second: Real tokens per second now, of all workers.
        chunks_per_second: Chunks per second now, of all workers.
        rates: Averages of ten seconds over the last hour, oldest first; a scheduler notes them.
        backlog_chunks: Chunks sent and not embedded, of all of `jobs`.
        backlog_tokens: Tokens sent and not embedded, as producers count them, of all of `jobs`.
        backlog_seconds: Time for what was sent of the jobs that are not paused, by the slowest and
            the fastest of the rates now, of the last minute and of five; None while unknown.
        reading: Number of jobs whose producers still add chunks, beyond the backlog.
        chunks_failed: Failed chunks of all of `jobs`.
        jobs: The newest 1,000 jobs, oldest first.
        jobs_total: Number of all jobs.
        ended: The last five jobs that have ended, newest first.
        workers: Live workers, by name.
        lost_seconds: Time since workers that died in the last hour were last seen, by name.
        scheduler_active: Whether a scheduler is active.
        memory_used_bytes: Memory that the server uses.
        memory_bytes_max: Memory that the server may use, 0 for no limit.
        bottlenecks: What holds the farm back, worst first.
    """

    time: float
    tokens_per_second: float
    chunks_per_second: float
    rates: tuple[Point, ...]
    backlog_chunks: int
    backlog_tokens: int
    backlog_seconds: Range | None
    reading: int
    chunks_failed: int
    jobs: tuple[JobView, ...]
    jobs_total: int
    ended: tuple[JobFacts, ...]
    workers: tuple[WorkerView, ...]
    lost_seconds: Mapping[str, float]
    scheduler_active: bool
    memory_used_bytes: int
    memory_bytes_max: int
    bottlenecks: tuple[Bottleneck, ...]


# Parts of the view.


def point(time: float, sample: Sample) -> Point:
    """Return a sample as a point of the farm's curves."""
    seconds = max(1e-6, sample.seconds)
    tokens = sum(tokens for tokens, _ in sample.jobs.values())
    chunks = sum(chunks for _, chunks in sample.jobs.values())
    return Point(
        time,
        seconds,
        tokens / seconds,
        chunks / seconds,
        sample.backlog_tokens,
        sample.workers_alive,
    )


def view_job(facts: JobFacts, waiting_blocks: int, pace: Pace, rates: Sequence[float]) -> JobView:
    """Return the view of a job, from its facts, its pace now, and its chunk rates lately."""
    return JobView(
        **vars(facts),
        waiting_blocks=waiting_blocks,
        chunks_left=chunks_left(facts),
        **progress(facts, outlook(facts, pace, rates)),
    )


def view_worker(beat: Heartbeat, pace: Pace, share: float) -> WorkerView:
    """Return the view of a worker, from its heartbeat, its pace now and its share."""
    known = beat.device_facts
    return WorkerView(
        worker=beat.worker,
        host=beat.host,
        device=beat.device,
        state=beat.state,
        model=beat.model,
        job=beat.job,
        tokens_per_second=pace.tokens_per_second,
        chunks_per_second=pace.chunks_per_second,
        share=share,
        tokens_done=beat.tokens_done,
        chunks_done=beat.chunks_done,
        memory_used_bytes=known.get("memory_used_bytes", known.get("rss_bytes")),
        memory_total_bytes=known.get("memory_total_bytes"),
        temperature_celsius=known.get("temperature_celsius"),
        utilization_ratio=known.get("utilization_ratio"),
        refused=tuple(beat.refused),
    )


def shares(recent: Sequence[tuple[float, Sample]], now: Mapping[str, Pace]) -> dict[str, float]:
    """Return each worker's share of the tokens in the samples, else of the tokens done now."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for _, sample in recent:
        for worker, (done, _) in sample.workers.items():
            tokens[worker] += done
    if not any(tokens.values()):
        tokens |= {worker: pace.tokens_per_second for worker, pace in now.items()}
    everything = sum(tokens.values())
    return {worker: done / everything for worker, done in tokens.items() if everything}


def real_tokens_left(job: JobFacts) -> float:
    """Return the tokens sent and not embedded, as the model counts them where that is known."""
    if job.chunks_embedded:
        return job.chunks_to_embed * job.real_tokens_done / job.chunks_embedded
    return float(job.tokens_in)


@dataclass(frozen=True)
class RecentHistory:
    """Recent history of a farm: points of the last hour, and samples of the last five minutes."""

    points: tuple[Point, ...] = ()
    recent: tuple[tuple[float, Sample], ...] = ()

    def follow(self, samples: Sequence[tuple[float, Sample]], now: float) -> "RecentHistory":
        """Return the history with new samples, and without samples that are too old."""
        points = (*self.points, *(point(*each) for each in samples))
        recent = (*self.recent, *samples)
        return RecentHistory(
            tuple(each for each in points if each.time > now - HOUR_SECONDS),
            tuple(each for each in recent if each[0] > now - max(AVERAGE_SECONDS)),
        )

    def token_rates(self, workers: Sequence[Heartbeat], at_work: WorkDone) -> list[float]:
        """Return the real tokens per second of live workers, over each of `AVERAGE_SECONDS`."""
        tokens = [(end, each, sum(n for n, _ in each.jobs.values())) for end, each in self.recent]
        done = [
            WorkDone(end, each.seconds, {"": n} if n else {}, {"": each.workers}, each.started)
            for end, each, n in tokens
        ]
        alive = {beat.worker for beat in workers}
        return averages([*done, at_work], at_work.end, alive=alive).get("", [])


@dataclass
class FarmReader:
    """Reader of the view of a farm, in about eight round trips; safe between threads.

    It keeps the curves of an hour, so that the next look reads only what is new: use one reader for
    many looks.
    """

    farm: FarmClient
    settings: Settings = field(default_factory=Settings)
    _history: RecentHistory = field(default_factory=RecentHistory)
    _after: str = "-"  # samples from there on are new
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> FarmView:
        """Return the view of the farm now.

        Raises:
            redis.ConnectionError, redis.TimeoutError: The server is away.
        """
        with self._lock:
            return self._read()

    def _read(self) -> FarmView:
        pipe = self.farm.client.pipeline(transaction=False)
        pipe.time()
        pipe.zcard(wire.JOBS)
        # Among the newest of all there may be none of one tenant.
        pipe.zrevrange(wire.JOBS, 0, JOBS_MAX - 1 if self.farm.tenant is None else -1)
        pipe.zrevrange(wire.ENDED, 0, ENDED_MAX - 1)
        pipe.exists(wire.SCHEDULER)
        pipe.info("memory")
        pipe.xrange(wire.SAMPLES, self._after, "+")
        ask_room(pipe)
        clock, jobs_total, newest, ended, active, memory, rows, *room = pipe.execute()
        seconds, microseconds = clock
        now = seconds + microseconds / 1e6
        if rows:
            self._after = f"({rows[-1][0].decode()}"
        self._history = self._history.follow(
            self.farm.own_samples(list(readable(Sample, b"sample", rows, wire.SAMPLES))), now
        )
        names = dict.fromkeys(self.farm.own(names_of([*reversed(newest), *ended])))
        unreadable: dict[str, str] = {}
        farm = replace(self.farm, on_unreadable=unreadable.__setitem__)
        found = read_jobs(farm, list(names))
        jobs = [each for each in found if not each.over]
        in_work = [each.job for each in jobs if each.blocks_in > each.blocks_done]
        backlogs = read_backlogs(farm.client, in_work, farm.on_unreadable) if in_work else []
        workers, lost_seconds = farm.call_roll()
        batches = farm.statistics.recent_batches(NOW_SECONDS)
        situation = Situation(
            jobs=jobs,
            jobs_total=jobs_total - len(newest) + len(jobs),
            waiting_blocks={each.job: each.waiting_blocks for each in backlogs},
            workers=workers,
            lost_seconds=lost_seconds,
            scheduler_active=bool(active),
            memory_used_bytes=memory["used_memory"],
            memory_bytes_max=memory["maxmemory"],
            settings=self.settings,
            unreadable=unreadable,
            room=room_from(*room),
            sees_all=self.farm.tenant is None,
        )
        ended_jobs = [each for each in found if each.over]
        return compose(now, situation, ended_jobs, batches, self._history)


def compose(
    now: float,
    situation: Situation,
    ended: Sequence[JobFacts],
    batches: Mapping[str, Sequence[TimedMicroBatch]],
    history: RecentHistory,
) -> FarmView:
    """Return the view of a farm, from its situation, recent work, and the last hour's curves.

    Args:
        now: Unix seconds.
        situation: Jobs, workers and server as they are now.
        ended: Jobs that have ended.
        batches: Micro-batches of the last `NOW_SECONDS`, by worker.
        history: History of the last hour.
    """
    begun = {job.job: job.begun_at for job in situation.jobs}
    by_worker, by_job = live_paces(batches, situation.workers, now, begun)
    pace = total(by_worker.values())
    parts = shares(history.recent, by_worker)
    at_work = who_works(batches, now)
    rates = chunk_rates(history.recent, now, begun, situation.workers, at_work)
    moving = [job for job in situation.jobs if job.moving]
    unfinished = [job for job in situation.jobs if job.moving or job.state == "paused"]
    return FarmView(
        time=now,
        tokens_per_second=pace.tokens_per_second,
        chunks_per_second=pace.chunks_per_second,
        rates=history.points,
        backlog_chunks=sum(job.chunks_to_embed for job in unfinished),
        backlog_tokens=sum(job.tokens_left for job in unfinished),
        backlog_seconds=forecast_seconds(
            sum(map(real_tokens_left, moving)),
            [pace.tokens_per_second, *history.token_rates(situation.workers, at_work)],
        )
        if moving or not unfinished
        else None,
        reading=sum(job.chunk_count < 0 for job in moving),
        chunks_failed=sum(job.chunks_failed for job in situation.jobs),
        jobs=tuple(
            view_job(
                job,
                situation.waiting_blocks.get(job.job, 0),
                by_job.get(job.job, Pace()),
                rates.get(job.job, []),
            )
            for job in situation.jobs
        ),
        jobs_total=situation.jobs_total,
        ended=tuple(ended),
        workers=tuple(
            view_worker(beat, by_worker.get(beat.worker, Pace()), parts.get(beat.worker, 0.0))
            for beat in situation.workers
        ),
        lost_seconds=situation.lost_seconds,
        scheduler_active=situation.scheduler_active,
        memory_used_bytes=situation.memory_used_bytes,
        memory_bytes_max=situation.memory_bytes_max,
        bottlenecks=tuple(find_bottlenecks(situation)),
    )
