"""A new job: texts that were pasted, or a file, in one form that the API reads as well."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response

from embedfarm.terms import PRIORITIES
from producer.submissions import has_worker
from web.keys import Scope
from web.orders import Options
from web.pages.rendering import render
from web.pages.sign_in import leave_for
from web.services import Caller, Service, need
from web.submissions import submit_job

SINKS: Final = {
    "parquet": "Parquet: for most programs",
    "npy": "NumPy: a matrix, row by row",
    "jsonl": "JSON Lines: text that anything reads",
}

router: Final = APIRouter(
    prefix="/jobs/new", include_in_schema=False, dependencies=need(Scope.SUBMIT)
)


@router.get("")
def ask_corpus(
    request: Request,
    services: Service,
    of: Annotated[Literal["texts", "file"], Query()] = "texts",
) -> Response:
    """Asks what to embed: texts, or a file with `?of=file`."""
    told = {
        "of": of,
        "models": services.settings.models,
        "priorities": PRIORITIES,
        "sinks": SINKS,
        "attended": has_worker(services.client),
    }
    return render(request, "new.html", told)


@router.post("")
async def submit(services: Service, key: Caller, request: Request) -> Response:
    """Submits it, and shows the job."""
    made = await submit_job(services, key, request, Options(), None)
    return leave_for(f"/jobs/{made.headers['location'].rpartition('/')[2]}")
