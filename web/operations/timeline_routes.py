"""Routes of the timeline: what happened to a job, and on the whole farm."""

from typing import Annotated, Final

from fastapi import APIRouter, Query

from embedfarm.contract.farm_timeline import TIMELINE_MAX, TimedEvent
from embedfarm.watch.overview import read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, need

Limit = Annotated[int, Query(ge=1, le=TIMELINE_MAX, description="Most events.")]

router: Final = APIRouter(prefix="/v1")


@router.get(
    "/timeline",
    tags=["operations"],
    responses=problems(),
    dependencies=need(Scope.READ, whole_farm=True),
)
def show_timeline(services: Service, limit: Limit = 100) -> list[TimedEvent]:
    """Show what happened on the farm, newest first, and who did it; the last 2,000 are kept."""
    return services.farm.timeline.newest(limit)


@router.get(
    "/jobs/{job}/timeline", tags=["jobs"], responses=problems(404), dependencies=need(Scope.READ)
)
def show_job_timeline(services: Service, job: JobId, limit: Limit = 100) -> list[TimedEvent]:
    """Show what happened to a job, newest first, and who did it."""
    read_job(services.farm, job)
    return services.farm.timeline.newest(limit, job)
