"""The page of one chunk that failed: why, and its text."""

from typing import Final

from fastapi import APIRouter, Request, Response

from embedfarm.watch.overview import read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import render
from embedfarm.web.jobs.failures import ChunkIndex, find_failure
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, need

router: Final = APIRouter(include_in_schema=False, dependencies=need(Scope.READ))


@router.get("/jobs/{job}/errors/{index}")
def show_failed(request: Request, services: Service, job: JobId, index: ChunkIndex) -> Response:
    """Show a chunk of a job that failed."""
    facts = read_job(services.farm, job)
    context = {"job": facts, "failed": find_failure(services, job, index)}
    return render(request, "failure.html", context)
