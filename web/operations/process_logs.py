"""Routes of what the farm's processes have logged."""

from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Path, Query
from pydantic import BaseModel

from embedfarm.contract.process_log import LINES_MAX, LogLine
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.problems import problems
from embedfarm.web.services import Service, need

NAME_CHARACTERS_MAX: Final = 512
Process = Annotated[str, Path(max_length=NAME_CHARACTERS_MAX, pattern=r"^[^\x00]+$")]

router: Final = APIRouter(
    prefix="/v1/logs", tags=["operations"], dependencies=need(Scope.READ, whole_farm=True)
)


class LoggingProcess(BaseModel):
    """A process that has logged something within a day, and when it did so last."""

    process: str
    last_ms: int


@router.get("", responses=problems())
def list_logs(services: Service) -> list[LoggingProcess]:
    """List the processes whose logs are kept, by name; each has its last 200 lines for a day."""
    found = services.farm.logs.processes()
    return [
        LoggingProcess(process=name, last_ms=int(1000 * at)) for name, at in sorted(found.items())
    ]


@router.get("/{process}", responses=problems(404))
def show_log(
    services: Service,
    process: Process,
    limit: Annotated[int, Query(ge=1, le=2 * LINES_MAX, description="Most lines.")] = LINES_MAX,
) -> list[LogLine]:
    """Show the last lines that a process has logged, oldest first."""
    lines = services.farm.logs.tail(process, limit)
    if not lines:
        raise HTTPException(404, f"no log of {process} is kept")
    return lines
