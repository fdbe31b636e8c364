"""The page of one job: how far it is, who works on it, what failed, and what to do about it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from embedfarm.contract.encoding import RecordError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.pace import Range, TimedMicroBatch
from embedfarm.contract.records import Sample
from embedfarm.contract.scheduling_terms import LIMIT_MAX
from embedfarm.contract.status import JobStatus
from embedfarm.contract.usage import describe
from embedfarm.ingest.job_directories import is_submitted
from embedfarm.watch.corpus_runs import CorpusRun, last_runs
from embedfarm.watch.job_actions import MAY, PRIORITY_OF
from embedfarm.watch.overview import JobFacts, read_job
from embedfarm.watch.view import FarmReader
from embedfarm.web.auth.keys import Scope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.jobs.failures import PLACE, read_failures
from embedfarm.web.jobs.routes import After, JobId
from embedfarm.web.pages.download import why_not
from embedfarm.web.pages.jobs import SEARCH_SECONDS
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.pages.periods import HOUR, PERIODS, Period
from embedfarm.web.services import Service, Services, need

FAILURES_MAX: Final = 20  # on a page
EVENTS_MAX: Final = 20  # of the timeline
LANE_SECONDS: Final = 60.0
ROWS_MAX: Final = 12
CHART_SECONDS: Final = 5  # between charts, where somebody watches
CURVES_MAX: Final = 6  # of workers, on one chart

router: Final = APIRouter(include_in_schema=False, dependencies=[*need(Scope.READ), LIVE])


class Moment(NamedTuple):
    """Speed of a job in the seconds before a Unix time; tokens per second of each worker, too."""

    time: float
    tokens_per_second: float
    chunks_per_second: float
    workers: Mapping[str, float]


class WorkerShare(NamedTuple):
    """Work of a worker for a job lately: micro-batches, their chunks, and mean seconds of each."""

    worker: str
    batches: int
    chunks: int
    seconds_mean: float


class Speed(NamedTuple):
    """Speed of a job now, and how long it will still take."""

    tokens_per_second: float = 0.0
    chunks_per_second: float = 0.0
    seconds_left: Range | None = None


@dataclass(frozen=True)
class Shown:
    """Part of a job's page that is asked for: failures after a place, and speeds over a period."""

    failures: Annotated[After, Query(pattern=PLACE)] = ""
    period: Period = HOUR


@router.get("/jobs/{job}")
def show_job(
    request: Request,
    services: Service,
    reader: Reader,
    job: JobId,
    shown: Annotated[Shown, Depends()],
) -> Response:
    """Show a job."""
    runs = _Runs(services)
    return answer_live(request, "job.html", partial(_read, services, reader, job, shown, runs))


class _Runs:
    """The last jobs of a corpus, which are looked for anew now and then while somebody watches."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._found: list[CorpusRun] = []
        self._look_at = 0.0

    def read(self, facts: JobFacts) -> list[CorpusRun]:
        """Return those of the corpus of a job; one by itself is none."""
        if time.monotonic() >= self._look_at:
            self._found = last_runs(self._services.farm, facts)
            self._look_at = time.monotonic() + SEARCH_SECONDS
        return self._found if len(self._found) > 1 else []


def _read(
    services: Services, reader: FarmReader, name: str, shown: Shown, runs: _Runs
) -> dict[str, Any]:
    after, period = shown.failures, shown.period
    farm, handle = services.farm, services.farm.job(name)
    facts = read_job(farm, name)
    failures, more = read_failures(services, name, FAILURES_MAX, after)
    speeds = read_speeds(farm, name, period)
    command = handle.noted("command")
    accounts = farm.reports.accounts(name)
    return {
        "job": facts,
        "speed": _speed(reader, name),
        "spec": _spec(handle),
        "command": command,
        "failures": failures,
        "failures_next": more,
        "failures_first": not after,
        "period": period,
        "rows": speeds[::-1][:: max(1, -(-len(speeds) // ROWS_MAX))],
        "workers": _mean_speeds(speeds),
        "peak": max((each.tokens_per_second for each in speeds), default=0.0),
        "lanes": lanes_of(farm.statistics.recent_batches(LANE_SECONDS), name),
        "accounts": {worker: describe(account) for worker, account in accounts.items()},
        "timeline": farm.timeline.newest(EVENTS_MAX, name),
        "actions": [verb for verb in actions_for(facts) if verb != "retry" or _may_retry(facts)],
        "limited": facts.state == "paused" and (facts.limited or bool(facts.braked)),
        "limit_max": int(LIMIT_MAX),
        "runs": runs.read(facts),
        "no_results": why_not(services.settings, facts),
        "reusable": facts.state == "finished" and is_submitted(name),
        "chart_at": int(time.time() // CHART_SECONDS) if facts.moving else 0,
    }


def _speed(reader: FarmReader, name: str) -> Speed:
    for each in reader.read().jobs:
        if each.job == name:
            return Speed(each.tokens_per_second, each.chunks_per_second, each.seconds_left)
    return Speed()


def _spec(handle: Job) -> dict[str, Any]:
    """Return what differs from the defaults in a job's spec; nothing where it cannot be read."""
    try:
        spec = msgspec.structs.asdict(handle.spec())
    except RecordError:
        return {}
    usual = msgspec.structs.asdict(JobSpec(model=""))
    others = {name: value for name, value in spec.items() if value != usual[name]}
    return others | ({"ranges": "from a sample"} if "ranges" in others else {})


def _may_retry(facts: JobFacts) -> bool:
    """Tell whether a job that has failed can be tried again from here: one that came by HTTP."""
    return facts.state == "finished" or is_submitted(facts.job)


def actions_for(job: JobStatus) -> list[str]:
    """List what may be done to a job in its state, but for its priority."""
    return [verb for verb, may in MAY.items() if verb not in PRIORITY_OF and may(job)]


def read_speeds(farm: FarmClient, job: str, period: Period) -> list[Moment]:
    """Read a job's speed over a period, from its first micro-batch to its last."""
    speeds = [_moment(end, sample, job) for end, sample in farm.statistics.samples(PERIODS[period])]
    working = [place for place, each in enumerate(speeds) if each.chunks_per_second]
    return speeds[working[0] : working[-1] + 2] if working else []


def _mean_speeds(speeds: Sequence[Moment]) -> dict[str, float]:
    """Return the mean of each of the workers' curves, by name."""
    return {name: sum(curve) / len(curve) for name, curve in curves_of_workers(speeds).items()}


def _moment(end: float, sample: Sample, job: str) -> Moment:
    seconds = max(1e-6, sample.seconds)
    tokens, chunks = sample.jobs.get(job, (0, 0))
    workers = {name: done / seconds for name, done in sample.job_workers.get(job, {}).items()}
    return Moment(end, tokens / seconds, chunks / seconds, workers)


def curves_of_workers(speeds: Sequence[Moment]) -> dict[str, list[float]]:
    """Return tokens per second at each moment by worker.

    The fastest come first; beyond `CURVES_MAX` the others are added up as "7 others".
    """
    totals = Counter[str]()
    for each in speeds:
        totals.update(each.workers)
    names = sorted(totals, key=lambda name: (-totals[name], name))
    shown = names if len(names) <= CURVES_MAX else names[: CURVES_MAX - 1]
    curves = {name: [each.workers.get(name, 0.0) for each in speeds] for name in shown}
    others = names[len(shown) :]
    if others:
        curves[f"{len(others)} others"] = [
            sum(each.workers.get(name, 0.0) for name in others) for each in speeds
        ]
    return curves


def lanes_of(batches: Mapping[str, Sequence[TimedMicroBatch]], job: str) -> list[WorkerShare]:
    """List which workers worked on a job lately, by name."""
    found = []
    for worker, bars in sorted(batches.items()):
        own = [bar for bar in bars if bar.job == job]
        if own:
            seconds = sum(bar.seconds for bar in own) / len(own)
            found.append(WorkerShare(worker, len(own), sum(bar.chunks for bar in own), seconds))
    return found
