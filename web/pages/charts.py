"""The charts of the pages, by addresses of their own, so that a page need not wait for them."""

from collections.abc import Sequence
from typing import Annotated, Final, cast

from fastapi import APIRouter, Depends, Request, Response

from embedfarm.scheduler.timeline_drawing import Bar
from embedfarm.watch.view import FarmReader
from embedfarm.web.auth.keys import Scope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.pages.chart_drawing import (
    COLOURS,
    END,
    NOW,
    ChartStyle,
    Curve,
    Gallery,
    Theme,
    TimeAxis,
    Width,
    draw_bars,
    draw_curves,
    draw_pairs,
)
from embedfarm.web.pages.job import LANE_SECONDS, curves_of_workers, read_speeds
from embedfarm.web.pages.overview import read_points
from embedfarm.web.pages.periods import HOUR, PERIODS, Period, gap_in
from embedfarm.web.pages.workers import read_pairs
from embedfarm.web.services import Caller, Service, need

HEADERS: Final = {"cache-control": "private, max-age=5"}
MINUTES_MIN: Final = 300.0  # seconds at least on the axis, for a job that has just begun

router: Final = APIRouter(prefix="/charts", include_in_schema=False, dependencies=need(Scope.READ))


def _look(theme: Theme = "light", width: Width = "wide") -> ChartStyle:
    return ChartStyle(theme, width)


async def _gallery(request: Request) -> Gallery:
    return cast("Gallery", request.app.state.gallery)


Drawn = Annotated[ChartStyle, Depends(_look)]
Charts = Annotated[Gallery, Depends(_gallery)]


@router.get("/farm.svg")
def farm_chart(
    reader: Reader, who: Caller, gallery: Charts, look: Drawn, period: Period = HOUR
) -> Response:
    """Draw tokens per second over a period, of all jobs that the caller may see."""

    def draw() -> bytes:
        view = reader.read()
        points = read_points(reader.farm, view, period)
        curve = Curve(
            "tokens per second",
            [each.time for each in points],
            [each.tokens_per_second for each in points],
        )
        since = view.time - PERIODS[period]
        axis = TimeAxis(since, view.time, gap_seconds=gap_in(period))
        return draw_curves([curve], axis, look)

    return _answer(gallery.show(("farm", who.tenant, look, period), draw))


@router.get("/jobs/{job}/speed.svg")
def job_chart(
    reader: Reader, gallery: Charts, look: Drawn, job: JobId, period: Period = HOUR
) -> Response:
    """Draw tokens and chunks per second of a job over a period."""

    def draw() -> bytes:
        speeds = read_speeds(reader.farm, job, period)
        times = [each.time for each in speeds]
        curves = [
            Curve("tokens per second", times, [each.tokens_per_second for each in speeds]),
            Curve("chunks per second", times, [each.chunks_per_second for each in speeds]),
        ]
        return draw_curves(curves, _axis(reader, job, times, period), look)

    return _answer(gallery.show(("speed", job, look, period), draw))


@router.get("/jobs/{job}/workers.svg")
def workers_chart(
    reader: Reader, gallery: Charts, look: Drawn, job: JobId, period: Period = HOUR
) -> Response:
    """Draw tokens per second of each worker for a job over a period."""

    def draw() -> bytes:
        speeds = read_speeds(reader.farm, job, period)
        times = [each.time for each in speeds]
        curves = [Curve(name, times, values) for name, values in curves_of_workers(speeds).items()]
        axis = _axis(reader, job, times, period)
        return draw_curves(curves or [Curve("no worker", [], [])], axis, look, alike=True)

    return _answer(gallery.show(("workers", job, look, period), draw))


@router.get("/jobs/{job}/lanes.svg")
def lanes_chart(
    services: Service, who: Caller, gallery: Charts, look: Drawn, job: JobId
) -> Response:
    """Draw the micro-batches of the last minute, those of one job in colour."""

    def draw() -> bytes:
        seconds, _ = services.client.time()
        batches = services.farm.statistics.recent_batches(LANE_SECONDS)
        colours = COLOURS[look.theme]
        bars = [
            Bar(
                worker,
                each.end - each.seconds - seconds,
                each.end - seconds,
                colours.accent if each.job == job else colours.faint,
            )
            for worker, done in batches.items()
            for each in done
        ]
        return draw_bars(bars, sorted(batches), LANE_SECONDS, look)

    return _answer(gallery.show(("lanes", job, who.tenant, look), draw))


@router.get("/predictions.svg", dependencies=need(Scope.READ, whole_farm=True))
def predictions_chart(services: Service, gallery: Charts, look: Drawn) -> Response:
    """Draw the seconds that micro-batches took over those that were predicted."""

    def draw() -> bytes:
        return draw_pairs([(each.predicted, each.took) for each in read_pairs(services.farm)], look)

    return _answer(gallery.show(("predictions", look), draw))


def _axis(reader: FarmReader, job: str, times: Sequence[float], period: Period) -> TimeAxis:
    """Return the axis of a job's curves, up to now or to the end of its work."""
    ended = bool(times) and reader.farm.job(job).status().ended
    until = times[-1] if ended else reader.read().time
    since = min([until - MINUTES_MIN, *times])
    return TimeAxis(since, until, END if ended else NOW, gap_in(period))


def _answer(data: bytes) -> Response:
    return Response(data, media_type="image/svg+xml", headers=HEADERS)
