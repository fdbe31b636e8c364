"""The page of the scheduler: its figures, plans, decisions and passes."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form, Query, Request, Response

from embedfarm.watch.overview import read_jobs
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import render
from embedfarm.web.operations import routes as operations
from embedfarm.web.operations.routes import PassesChange
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.pages.sign_in import leave_for
from embedfarm.web.services import Caller, Service, Services, need

DECISIONS_MAX: Final = 5
PASSES_CHARACTERS_MAX: Final = 2000
HERE: Final = "/scheduler"

router: Final = APIRouter(
    include_in_schema=False, dependencies=[*need(Scope.READ, whole_farm=True), LIVE]
)
steering: Final = APIRouter(
    include_in_schema=False, dependencies=need(Scope.ADMIN, whole_farm=True)
)


@router.get(HERE)
def show_scheduler(request: Request, services: Service) -> Response:
    """Show the scheduler."""
    return answer_live(request, "scheduler.html", partial(_read, services))


def _read(services: Services) -> dict[str, Any]:
    farm = services.farm
    plans = {beat.worker: farm.plans.plan(beat.worker) for beat in farm.workers()}
    jobs = {share.job for plan in plans.values() if plan for share in plan.shares}
    in_use = operations.list_passes(services)
    return {
        "stats": farm.plans.scheduler_stats(),
        "active": farm.plans.has_scheduler(),
        "plans": plans,
        "names": {each.job: each.name or each.job for each in read_jobs(farm, sorted(jobs))},
        "decisions": farm.plans.decisions(DECISIONS_MAX),
        "passes": in_use.active,
        "others": in_use.others,
        "chosen": bool(farm.plans.policy()),
        "changes": changes(in_use.active, in_use.others),
    }


def changes(active: Sequence[str], others: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the lists of passes that are one step away, by the pass that is moved and the step."""
    found: dict[str, dict[str, str]] = {}
    for place, name in enumerate(active):
        rest = [each for each in active if each != name]
        steps = {"leave out": rest}
        if place:
            steps["up"] = [*rest[: place - 1], name, *rest[place - 1 :]]
        if place + 1 < len(active):
            steps["down"] = [*rest[: place + 1], name, *rest[place + 1 :]]
        found[name] = {step: ",".join(names) for step, names in steps.items()}
    for name in others:
        found[name] = {"add": ",".join([*active, name])}
    return found


@steering.get("/scheduler/passes")
def ask_passes(
    request: Request, passes: Annotated[str, Query(max_length=PASSES_CHARACTERS_MAX)]
) -> Response:
    """Ask whether these passes are meant."""
    told = {
        "question": "Decide by these passes?",
        "consequence": "The next decision goes through them in this order. No work is dropped.",
        "subjects": [passes.replace(",", " → ")],
        "possible": True,
        "yes": "Use them",
        "no": "Leave it as it is",
        "dangerous": False,
        "back": HERE,
        "fields": [("passes", passes)],
    }
    return render(request, "confirm.html", told)


@steering.post("/scheduler/passes")
def use_passes(
    services: Service,
    key: Caller,
    passes: Annotated[str, Form(max_length=PASSES_CHARACTERS_MAX)] = "",
) -> Response:
    """Use the chosen passes, and show the scheduler."""
    chosen = [each for each in passes.split(",") if each]
    operations.choose_passes(services, key, PassesChange(active=chosen))
    return leave_for(HERE)
