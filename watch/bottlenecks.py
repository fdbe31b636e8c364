"""Bottlenecks of a farm, in plain words. Each rule is pure, and looks at one cause."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Final, Literal, NamedTuple

from embedfarm.contract.formatting import format_seconds, one_line
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import ROOMY, FarmRoom, has_room, used_bytes
from embedfarm.watch.overview import JobFacts

SEVERITIES: Final = ("error", "warning", "info")
FULL_RATIO: Final = 0.9  # of the server's memory: the next windows of a few jobs fill the rest
FULL_WINDOW_RATIO: Final = 15 / 16  # a producer sends a sixteenth at a time
FEW: Final = 3  # bottlenecks of the same cause that are said one by one
NAME_CHARACTERS_MAX: Final = 40
REASON_CHARACTERS_MAX: Final = 200


class Bottleneck(NamedTuple):
    """One thing that holds the farm back.

    Attributes:
        severity: "error" (nothing goes on by itself), "warning" (it could be faster, or will be
            late) or "info" (as it should be).
        text: A sentence, with words in it that users chose: escape them.
        jobs: Ids of the jobs that the sentence is about; empty if it is about none.
        cause: Name of the rule that found it, such as "no_workers".
    """

    severity: Literal["error", "warning", "info"]
    text: str
    jobs: tuple[str, ...] = ()
    cause: str = ""


@dataclass(frozen=True)
class Situation:
    """Situation of a farm: all that the rules look at.

    Attributes:
        jobs: The newest jobs.
        jobs_total: Number of all jobs.
        waiting_blocks: Blocks that nobody has leased, by job; jobs without any are left out.
        workers: Heartbeats of the live workers.
        lost_seconds: Time since workers that died lately were last seen, by name.
        scheduler_active: Whether a scheduler is active.
        memory_used_bytes: Memory that the server uses.
        memory_bytes_max: Memory that the server may use, 0 for no limit.
        settings: Settings of the farm.
        room: Usage of the farm's window.
        unreadable: Reasons why records on the server cannot be read, by place.
        sees_all: Whether the jobs of all tenants are seen, not only those of one.
    """

    jobs: Sequence[JobFacts]
    jobs_total: int
    waiting_blocks: Mapping[str, int]
    workers: Sequence[Heartbeat]
    lost_seconds: Mapping[str, float]
    scheduler_active: bool
    memory_used_bytes: int
    memory_bytes_max: int
    settings: Settings
    unreadable: Mapping[str, str] = field(default_factory=dict)
    room: FarmRoom = ROOMY
    sees_all: bool = True

    @cached_property
    def unfinished(self) -> list[JobFacts]:
        """Jobs that are not embedded yet, paused ones included."""
        wanted = [job for job in self.jobs if job.moving or job.state == "paused"]
        return [job for job in wanted if not job.embedded]

    def has_room(self, job: JobFacts) -> bool:
        """Tell whether results of a job are collected fast enough for more work to be leased."""
        return has_room(job, self.settings, self.room)

    def leasable(self, job: JobFacts) -> bool:
        """Tell whether a worker may lease blocks of a job now."""
        allowed = job.moving and self.has_room(job)
        return allowed and self.waiting_blocks.get(job.job, 0) > 0


Rule = Callable[[Situation], Iterator[Bottleneck]]


def find_bottlenecks(situation: Situation) -> list[Bottleneck]:
    """Return the bottlenecks that all rules find, worst first."""
    found = [each._replace(cause=rule.__name__) for rule in RULES for each in rule(situation)]
    return sorted(found, key=lambda each: SEVERITIES.index(each.severity))


def no_workers(situation: Situation) -> Iterator[Bottleneck]:
    """Report that there are no workers to embed anything."""
    if not situation.workers:
        yield Bottleneck("error" if situation.unfinished else "info", "no workers")


def lost_workers(situation: Situation) -> Iterator[Bottleneck]:
    """Report workers that died without a clean stop, the latest first."""
    latest = sorted(situation.lost_seconds.items(), key=lambda each: each[1])
    found = [
        Bottleneck(
            "warning",
            f"worker {one_line(worker, NAME_CHARACTERS_MAX)} is lost: not heard of for "
            f"{format_seconds(seconds)}; its work goes to others",
        )
        for worker, seconds in latest
    ]
    yield from _few(found, "workers are lost")


def unreadable_records(situation: Situation) -> Iterator[Bottleneck]:
    """Report records that are left out because this program cannot read them."""
    found = [
        Bottleneck("warning", f"{one_line(place, REASON_CHARACTERS_MAX)} is left out: {reason}")
        for place, reason in sorted(situation.unreadable.items())
    ]
    yield from _few(found, "records cannot be read")


def full_server(situation: Situation) -> Iterator[Bottleneck]:
    """Report that the server's memory is nearly full, after which it refuses to store anything."""
    used, most = situation.memory_used_bytes, situation.memory_bytes_max
    if most and used >= FULL_RATIO * most:
        yield Bottleneck(
            "error", f"server memory is nearly full: {used >> 20:,} of {most >> 20:,} MiB"
        )


def full_results(situation: Situation) -> Iterator[Bottleneck]:
    """Report jobs that have so many uncollected results that no more work of them is leased."""
    full = [job for job in situation.unfinished if not situation.has_room(job)]
    if full:
        words = f"nothing more is leased: results of {_name(full)} are not collected"
        yield Bottleneck("error", words, _ids(full))


def full_windows(situation: Situation) -> Iterator[Bottleneck]:
    """Report jobs whose producers wait mostly for the collector, not for the workers."""
    settings = situation.settings
    full = [
        job
        for job in situation.unfinished
        if situation.has_room(job)
        and job.moving
        and job.chunk_count < 0
        and job.result_bytes > settings.window_bytes_max / 2
        and used_bytes(job, job.held_vector_bytes) > FULL_WINDOW_RATIO * settings.window_bytes_max
    ]
    if full:
        words = f"producers wait: results of {_name(full)} are not collected"
        yield Bottleneck("warning", words, _ids(full))


def full_farm_window(situation: Situation) -> Iterator[Bottleneck]:
    """Report that producers wait for room that jobs hold; name the job with the most results."""
    room = situation.room
    if not room.short:
        return
    words, results = "producers wait: jobs fill the farm's window", "of the tenant's results"
    if situation.sees_all:
        words += f", {room.used_bytes >> 20:,} of {room.bytes_max >> 20:,} MiB"
        results = "results"
    most = max(situation.unfinished, key=lambda job: job.result_bytes, default=None)
    if most is None or not most.result_bytes:
        yield Bottleneck("warning", words)
        return
    size = f"{most.result_bytes / (1 << 20):,.1f} MiB"
    words += f"; most {results} that nobody has collected are of {_name([most])}, {size}"
    yield Bottleneck("warning", words, _ids([most]))


def refusals(situation: Situation) -> Iterator[Bottleneck]:
    """Report workers that cannot embed a job; it is an error if no worker can."""
    refusing = defaultdict[str, list[str]](list)
    for beat in situation.workers:
        for name in beat.refused:
            refusing[name].append(beat.worker)
    found = [
        each
        for job in situation.unfinished
        if job.job in refusing
        for each in _refuse(job, refusing[job.job], len(situation.workers))
    ]
    found.sort(key=lambda each: SEVERITIES.index(each.severity))
    yield from _few(found, "refusals of jobs")


def _refuse(job: JobFacts, refusing: Sequence[str], workers: int) -> Iterator[Bottleneck]:
    """Yield a bottleneck for each reason why workers refuse a job."""
    by_reason = defaultdict[str, list[str]](list)
    for worker in refusing:
        by_reason[job.refused.get(worker) or "it is not said why"].append(worker)
    for reason, names in by_reason.items():
        who = f"worker {names[0]} refuses" if len(names) == 1 else f"{len(names)} workers refuse"
        yield Bottleneck(
            "error" if len(refusing) == workers else "warning",
            f"{who} {_name([job])}: {one_line(reason, REASON_CHARACTERS_MAX)}",
            (job.job,),
        )


def no_scheduler(situation: Situation) -> Iterator[Bottleneck]:
    """Report that no scheduler sizes micro-batches and shares the farm between jobs."""
    if not situation.scheduler_active:
        yield Bottleneck("warning", "no scheduler: workers go on by their own rates")


def all_paused(situation: Situation) -> Iterator[Bottleneck]:
    """Report that there are unfinished jobs, and people have paused all of them."""
    states = {job.state for job in situation.unfinished}
    if states == {"paused"}:
        yield Bottleneck("warning", "all jobs are paused", _ids(situation.unfinished))


def missed_deadlines(situation: Situation) -> Iterator[Bottleneck]:
    """Report jobs that will miss their deadlines as things are, the latest first."""
    late = [job for job in situation.unfinished if job.late_seconds >= 1]
    found = [
        Bottleneck(
            "warning",
            f"{_name([job])} misses its deadline by {format_seconds(job.late_seconds)}",
            (job.job,),
        )
        for job in sorted(late, key=lambda job: -job.late_seconds)
    ]
    yield from _few(found, "jobs miss their deadlines")


def idle_workers(situation: Situation) -> Iterator[Bottleneck]:
    """Report idle workers, unless there is work for them, or it is held back for another reason."""
    idle = sum(beat.state == "idle" for beat in situation.workers)
    jobs = situation.unfinished
    moving = [job for job in jobs if job.state != "paused"]
    held_back = jobs and not any(map(situation.has_room, moving))
    if not idle or held_back or any(map(situation.leasable, jobs)):
        return
    who = f"{_all_or_some(idle, len(situation.workers))} idle"
    if not jobs:
        yield Bottleneck("info", f"{who}: there are no jobs")
        return
    reading = [job for job in moving if job.chunk_count < 0]
    more = f", {_name(reading)} still being read" if reading else ""
    yield Bottleneck("warning", f"{who}: nothing to lease{more}", _ids(reading))


def loading_workers(situation: Situation) -> Iterator[Bottleneck]:
    """Report workers that still load a model."""
    loading = sum(beat.state == "loading" for beat in situation.workers)
    if loading:
        who = "1 worker loads" if loading == 1 else f"{loading} workers load"
        yield Bottleneck("info", f"{who} a model")


def busy_workers(situation: Situation) -> Iterator[Bottleneck]:
    """Report that all workers are busy, so that only more or faster devices would help."""
    count = len(situation.workers)
    if count and all(beat.state == "busy" for beat in situation.workers):
        yield Bottleneck("info", f"{_all_or_some(count, count)} busy: the devices are the limit")


def older_jobs(situation: Situation) -> Iterator[Bottleneck]:
    """Report that there are more jobs than are looked at."""
    seen = len(situation.jobs)
    if situation.jobs_total > seen:
        words = f"only the newest {seen:,} of {situation.jobs_total:,} jobs are looked at"
        yield Bottleneck("info", words)


RULES: Final[tuple[Rule, ...]] = (
    no_workers,
    lost_workers,
    unreadable_records,
    full_server,
    full_results,
    refusals,
    full_windows,
    full_farm_window,
    no_scheduler,
    all_paused,
    missed_deadlines,
    idle_workers,
    loading_workers,
    busy_workers,
    older_jobs,
)


def _name(jobs: Sequence[JobFacts]) -> str:
    """Name jobs in a sentence: one by its name or the beginning of its id, several by number."""
    if len(jobs) != 1:
        return f"{len(jobs):,} jobs"
    return f"job {one_line(jobs[0].name, NAME_CHARACTERS_MAX) or jobs[0].job[:8]}"


def _all_or_some(some: int, count: int) -> str:
    """Say how many of the workers are in a state, up to the name of the state."""
    if some < count:
        return f"{some} of {count} workers {'is' if some == 1 else 'are'}"
    return {1: "the worker is", 2: "both workers are"}.get(count, f"all {count} workers are")


def _ids(jobs: Sequence[JobFacts]) -> tuple[str, ...]:
    return tuple(job.job for job in jobs)


def _few(found: Sequence[Bottleneck], what: str) -> Iterator[Bottleneck]:
    """Yield the first bottlenecks of the same cause, and one that says how many more there are."""
    yield from islice(found, FEW)
    rest = found[FEW:]
    if rest:
        jobs = tuple(dict.fromkeys(job for each in rest for job in each.jobs))
        yield Bottleneck(rest[0].severity, f"{len(rest):,} more {what}", jobs)
