"""The overview page: is the farm moving, when is it done, what is wrong."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, Request, Response

from embedfarm.contract.farm_client import FarmClient
from embedfarm.watch.overview import read_page
from embedfarm.watch.view import FarmReader, FarmView, Point, point
from embedfarm.web.auth.keys import Scope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.pages.periods import HOUR, PERIODS, Period
from embedfarm.web.services import Service, Services, need

JOBS_MAX: Final = 10  # jobs in work that are shown; the page of jobs has all
ENDED_MAX: Final = 5
EVENTS_MAX: Final = 12  # of the timeline
NEWEST_ENDED: Final = "-inf:"  # where the list of ended jobs begins
ROWS_MAX: Final = 12  # of the table beside the chart

router: Final = APIRouter(include_in_schema=False, dependencies=[*need(Scope.READ), LIVE])


class Headline(NamedTuple):
    """State of the farm in a word, and in a sentence.

    Attributes:
        kind: "moving", "held", "stopped" or "idle".
        words: Sentence for people.
    """

    kind: str
    words: str


@router.get("/")
def overview(
    request: Request, services: Service, reader: Reader, period: Period = HOUR
) -> Response:
    """Show the farm, its jobs and its workers."""
    return answer_live(request, "overview.html", partial(_read, services, reader, period))


def _read(services: Services, reader: FarmReader, period: Period) -> dict[str, Any]:
    view = reader.read()
    points = read_points(services.farm, view, period)
    # Jobs that fail or are late come first where not all are shown; else the oldest do.
    jobs = sorted(view.jobs, key=lambda job: -job.late_seconds)
    return {
        "view": view,
        "jobs": jobs[:JOBS_MAX],
        "jobs_more": view.jobs_total - min(JOBS_MAX, len(jobs)),
        "headline": headline(view),
        "names": {job.job: job.name or job.job for job in view.jobs},
        "failing": [job for job in view.jobs if job.chunks_failed],
        "ended": read_page(services.farm, NEWEST_ENDED, ENDED_MAX).jobs,
        "timeline": services.farm.timeline.newest(EVENTS_MAX),
        "rows": thin(points, ROWS_MAX),
        "peak": max((each.tokens_per_second for each in points), default=0.0),
        "chart_at": int(time.time() // 10),
        "period": period,
    }


def read_points(farm: FarmClient, view: FarmView, period: Period) -> Sequence[Point]:
    """Return the curves of the farm over a period, oldest first; the view has those of an hour."""
    if period == HOUR:
        return view.rates
    return [point(*each) for each in farm.statistics.samples(PERIODS[period])]


def headline(view: FarmView) -> Headline:
    """Say what a person wants to know first: whether the farm moves, waits or has nothing to do."""
    wanted = [job for job in view.jobs if job.moving and not job.embedded]
    errors = [each for each in view.bottlenecks if each.severity == "error"]
    if not wanted:
        paused = sum(job.state == "paused" for job in view.jobs)
        if paused:
            return Headline("held", f"{_count(paused, 'job')} paused, nothing else to do")
        return Headline("idle", "Nothing to do")
    if view.tokens_per_second:
        kind = "held" if errors else "moving"
        return Headline(kind, f"Moving: {_count(len(wanted), 'job')} in work")
    if errors or not view.workers:
        return Headline("stopped", f"Standing still: {_count(len(wanted), 'job')} waiting")
    return Headline("held", f"About to move: {_count(len(wanted), 'job')} waiting")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Take at most `most` of the points, evenly spaced, newest first; the newest is among them."""
    step = max(1, -(-len(points) // most))
    return list(points[::-1][::step])
