"""Route of the advice: how many workers of each kind there should be; KEDA's scalers ask for it."""

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query

from embedfarm.watch.advice_reader import read_advice
from embedfarm.watch.advised_workers import Advice
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.services import Service, need

router: Final = APIRouter(prefix="/v1", tags=["operations"])

Model = Annotated[str, Query(description="Only what concerns this model, as jobs name it.")]
Kind = Annotated[str, Query(description="Only workers of this kind.")]


@router.get(
    "/advice",
    response_model=Advice,
    responses=problems(),
    dependencies=need(Scope.READ, whole_farm=True),
)
def show_advice(services: Service, model: Model = "", kind: Kind = "") -> dict[str, Any]:
    """Say how many workers of each kind end the backlog in time at least cost, and why.

    At the top `workers_advised`, `workers_live`, `backlog_tokens` and `backlog_seconds` are those
    of the model and the kind that are asked for. What the farm has never seen has zeros. It goes by
    the settings `advice_within_seconds`, `advice_start_seconds` and `advice_workers_max`.
    """
    return asdict(read_advice(services.farm, services.settings).about(model, kind))
