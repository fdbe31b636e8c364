"""The page of logs: what the farm's processes have said lately."""

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from embedfarm.contract.process_log import LINES_MAX
from embedfarm.web.auth.keys import Scope
from embedfarm.web.operations.process_logs import NAME_CHARACTERS_MAX
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.services import Service, Services, need

router: Final = APIRouter(
    include_in_schema=False, dependencies=[*need(Scope.READ, whole_farm=True), LIVE]
)


@router.get("/logs")
def show_logs(
    request: Request,
    services: Service,
    process: Annotated[str, Query(max_length=NAME_CHARACTERS_MAX)] = "",
) -> Response:
    """Show the last lines of a process; of the one that has logged last if none is named."""
    return answer_live(request, "logs.html", partial(_read, services, process))


def _read(services: Services, process: str) -> dict[str, Any]:
    logs = services.farm.logs
    known = logs.processes()
    chosen = process or max(known, key=known.__getitem__, default="")
    return {
        "processes": sorted(known),
        "process": chosen,
        "lines": logs.tail(chosen, LINES_MAX)[::-1] if chosen else [],
    }
