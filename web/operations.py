"""Is it well, who works, and how is it decided: for people and for their tools."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel, ConfigDict

from embedfarm.broker import UNAVAILABLE
from embedfarm.farm import DECISIONS_MAX, Farm
from embedfarm.records import Decision, Heartbeat, SchedulerStats
from producer.submissions import has_worker
from web.keys import Scope
from web.problems import problems
from web.schemas import Body, many, schema_of
from web.services import Caller, Service, need

LOGGER: Final = logging.getLogger(__name__)
SERVER_AWAY: Final = "the server is not to be reached"
NO_SCHEDULER: Final = "no scheduler is active"
NO_WORKER: Final = "no worker is alive"
NO_INGEST: Final = "no ingest worker is alive: jobs by HTTP and RQ wait"

router: Final = APIRouter(tags=["operations"])
Worker = schema_of(Heartbeat)
Stats = schema_of(SchedulerStats)
Explained = schema_of(Decision)


class Alive(BaseModel):
    """The program answers."""

    alive: bool


class Ready(BaseModel):
    """Whether the farm answers requests, and all that is missing in it.

    Without a scheduler workers go on, and without ingest workers only jobs wait.
    """

    ready: bool
    reasons: list[str]


class PassesChange(Body):
    """The passes of a decision, in their order."""

    model_config = ConfigDict(extra="forbid")

    active: list[str]


class PassesInUse(BaseModel):
    """The passes of a decision in their order, and the others that there are."""

    active: list[str]
    others: list[str]


@router.get("/livez")
async def live() -> Alive:
    """Whether the program answers; it says nothing about the farm."""
    return Alive(alive=True)


@router.get("/health", responses={503: {"model": Ready}}, operation_id="health")
@router.get("/readyz", responses={503: {"model": Ready}}, operation_id="ready")
def ready(services: Service, response: Response) -> Ready:
    """Whether the farm answers requests: 503 if not; the reasons say all that is missing."""
    reasons = missing(services.farm)
    is_ready = not {SERVER_AWAY, NO_WORKER} & set(reasons)
    if not is_ready:
        response.status_code = 503
    return Ready(ready=is_ready, reasons=reasons)


def missing(farm: Farm) -> list[str]:
    """What a farm needs and has not."""
    try:
        found = {
            NO_SCHEDULER: farm.has_scheduler(),
            NO_WORKER: bool(farm.workers()),
            NO_INGEST: has_worker(farm.client),
        }
    except UNAVAILABLE:
        return [SERVER_AWAY]
    return [reason for reason, well in found.items() if not well]


@router.get(
    "/v1/workers",
    response_model=many(Worker),
    responses=problems(),
    dependencies=need(Scope.READ),
)
def list_workers(services: Service) -> list[dict[str, Any]]:
    """The workers that are alive."""
    return [msgspec.structs.asdict(beat) for beat in services.farm.workers()]


@router.get(
    "/v1/scheduler/stats",
    response_model=Stats,
    responses=problems(404),
    dependencies=need(Scope.READ),
)
def show_stats(services: Service) -> dict[str, Any]:
    """Figures of the active scheduler, over the last minute."""
    stats = services.farm.scheduler_stats()
    if stats is None:
        raise HTTPException(404, NO_SCHEDULER)
    return msgspec.structs.asdict(stats)


@router.get(
    "/v1/scheduler/explain",
    response_model=many(Explained),
    responses=problems(),
    dependencies=need(Scope.READ),
)
def explain(
    services: Service,
    worker: Annotated[str, Query(description="Only what concerns this one, or all.")] = "",
    last: Annotated[int, Query(ge=1, le=DECISIONS_MAX, description="Decisions.")] = 1,
) -> list[dict[str, Any]]:
    """The last decisions, newest first, of which one in a second is kept: what each pass did."""
    decisions = services.farm.decisions(last)
    return [msgspec.structs.asdict(each.about(worker)) for each in decisions]


@router.get("/v1/scheduler/passes", responses=problems(), dependencies=need(Scope.READ))
def list_passes(services: Service) -> PassesInUse:
    """The passes of a decision in their order, and the others that there are."""
    return _in_use(services, services.farm.policy() or services.passes.default)


@router.put("/v1/scheduler/passes", responses=problems(409), dependencies=need(Scope.ADMIN))
def choose_passes(services: Service, key: Caller, change: PassesChange) -> PassesInUse:
    """Choose the passes, from the next decision on; 409 for a list that no farm could work by."""
    try:
        services.passes.check(change.active)
    except ValueError as error:
        raise HTTPException(409, str(error)) from error
    LOGGER.info("%s chooses passes %r", key.name, change.active)
    services.farm.set_policy(change.active)
    return _in_use(services, change.active)


def _in_use(services: Service, active: Sequence[str]) -> PassesInUse:
    others = [name for name in services.passes.names if name not in active]
    return PassesInUse(active=list(active), others=others)
