"""Routes for operators: health, workers, and how the scheduler decides."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import redis
from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import as_dict
from embedfarm.contract.farm_client import FarmClient, loaded_models
from embedfarm.contract.plans import DECISIONS_MAX
from embedfarm.contract.records import Decision, Heartbeat, SchedulerStats
from embedfarm.contract.settings import Settings
from embedfarm.contract.window import FarmWindow
from embedfarm.ingest.job_queue import has_worker
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import Body, Many, many, schema_of
from embedfarm.web.services import Caller, Service, need

LOGGER: Final = logging.getLogger(__name__)
SERVER_AWAY: Final = "the server is not to be reached"
NO_SCHEDULER: Final = "no scheduler is active"
NO_WORKER: Final = "no worker is alive"
NO_ROOM: Final = "the farm's window is used up: producers wait until results are collected"
PASSES_MAX: Final = 1000
OLD_KEYS: Final = "the file of keys cannot be read: the keys of before go on counting"
NO_INGEST: Final = "no ingest worker is alive: jobs by HTTP and RQ wait"

router: Final = APIRouter(tags=["operations"], route_class=BoundedRoute)
Worker = schema_of(Heartbeat)
Stats = schema_of(SchedulerStats)
Explained = schema_of(Decision)


class Alive(BaseModel):
    """Sign that the program answers."""

    alive: bool


class Ready(BaseModel):
    """Whether the farm answers requests, and all that it lacks.

    Without a scheduler workers go on, without ingest workers only jobs wait, and where the farm's
    window is used up requests are answered, but texts of jobs and feeds wait: `takes_jobs` is false
    then. A request for a model that is none of `warm` waits until a worker has loaded it.
    """

    ready: bool
    takes_jobs: bool
    warm: Annotated[list[str], Field(description="Served models that a worker has loaded.")]
    reasons: list[str]


class PassesChange(Body):
    """A new list of the scheduler's passes, in their order."""

    model_config = ConfigDict(extra="forbid")

    active: Annotated[Many[str], Field(max_length=PASSES_MAX)]


class PassesInUse(BaseModel):
    """The scheduler's passes in their order, and the others that there are."""

    active: list[str]
    others: list[str]


READY: Final = problems(404) | {503: {"model": Ready}}


@router.get("/livez")
async def live() -> Alive:
    """Tell whether the program answers; this says nothing about the farm."""
    return Alive(alive=True)


@router.get("/health", responses=READY, operation_id="health")
@router.get("/readyz", responses=READY, operation_id="ready")
def ready(
    services: Service,
    request: Request,
    response: Response,
    model: Annotated[str, Query(description="Ready only if a worker has loaded this one.")] = "",
) -> Ready:
    """Tell whether the farm answers requests, with 503 if not; `reasons` has all that it lacks."""
    farm, settings = FarmClient(services.client), services.settings
    beats, reasons = _look(farm, services.rq, settings)
    loaded = loaded_models(beats)
    warm = [name for name in settings.models if name in loaded]
    reasons += [OLD_KEYS] * bool(request.app.state.keyring.problem)
    lacks = {SERVER_AWAY, NO_WORKER}
    if model and services.find_model(model) not in warm:
        reasons.append(f"no worker has loaded {model}")
        lacks.add(reasons[-1])
    is_ready = not lacks & set(reasons)
    if not is_ready:
        response.status_code = 503
    takes_jobs = not {SERVER_AWAY, NO_INGEST, NO_ROOM} & set(reasons)
    return Ready(ready=is_ready, takes_jobs=takes_jobs, warm=warm, reasons=reasons)


def _look(
    farm: FarmClient, rq: redis.Redis, settings: Settings
) -> tuple[list[Heartbeat], list[str]]:
    """Return the live workers, and why a farm is not whole: no server, scheduler, room or such."""
    try:
        beats = farm.workers()
        found = {
            NO_SCHEDULER: farm.plans.has_scheduler(),
            NO_WORKER: bool(beats),
            NO_INGEST: has_worker(rq),
            NO_ROOM: not FarmWindow(farm.client, settings).seen().short,
        }
    except UNAVAILABLE:
        return [], [SERVER_AWAY]
    return beats, [reason for reason, well in found.items() if not well]


@router.get(
    "/v1/workers",
    response_model=many(Worker),
    responses=problems(),
    dependencies=need(Scope.READ),
)
def list_workers(services: Service) -> list[dict[str, Any]]:
    """List the live workers; a tenant's key does not see jobs and models of others."""
    return [as_dict(beat) for beat in services.farm.workers()]


@router.get(
    "/v1/scheduler/stats",
    response_model=Stats,
    responses=problems(404),
    dependencies=need(Scope.READ, whole_farm=True),
)
def show_stats(services: Service) -> dict[str, Any]:
    """Show the active scheduler's figures of the last minute."""
    stats = services.farm.plans.scheduler_stats()
    if stats is None:
        raise HTTPException(404, NO_SCHEDULER)
    return msgspec.structs.asdict(stats)


@router.get(
    "/v1/scheduler/explain",
    response_model=many(Explained),
    responses=problems(),
    dependencies=need(Scope.READ, whole_farm=True),
)
def explain(
    services: Service,
    worker: Annotated[str, Query(description="Only what concerns this one, or all.")] = "",
    last: Annotated[int, Query(ge=1, le=DECISIONS_MAX, description="Decisions.")] = 1,
) -> list[dict[str, Any]]:
    """Show what each pass did in the last decisions, newest first; one in a second is kept."""
    decisions = services.farm.plans.decisions(last)
    return [msgspec.structs.asdict(each.about(worker)) for each in decisions]


@router.get(
    "/v1/scheduler/passes", responses=problems(), dependencies=need(Scope.READ, whole_farm=True)
)
def list_passes(services: Service) -> PassesInUse:
    """List the passes of a decision in their order, and the others that there are."""
    return _in_use(services, services.farm.plans.policy() or services.passes.default)


@router.put(
    "/v1/scheduler/passes", responses=problems(409), dependencies=need(Scope.ADMIN, whole_farm=True)
)
def choose_passes(services: Service, key: Caller, change: PassesChange) -> PassesInUse:
    """Choose the passes from the next decision on; 409 for a list that no farm could work by."""
    try:
        services.passes.check(change.active)
    except ValueError as error:
        raise HTTPException(409, str(error)) from error
    LOGGER.info("%s chooses passes %r", key.name, change.active)
    services.farm.plans.set_policy(change.active)
    return _in_use(services, change.active)


def _in_use(services: Service, active: Sequence[str]) -> PassesInUse:
    others = [name for name in services.passes.names if name not in active]
    return PassesInUse(active=list(active), others=others)
