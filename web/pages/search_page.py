"""The page that searches in a job's output."""

from functools import partial
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool

from embedfarm.watch.overview import read_job
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import render
from embedfarm.web.interactive import Interactive
from embedfarm.web.jobs.nearest_chunks import QueryText, find_chunks
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.services import Service, need

SHOWN: Final = 10

router: Final = APIRouter(include_in_schema=False, dependencies=need(Scope.READ))


@router.get("/jobs/{job}/search")
async def show_found(
    request: Request, services: Service, interactive: Interactive, job: JobId, query: QueryText
) -> Response:
    """Show the chunks of a job nearest to a text, or why there are none."""
    facts = await run_in_threadpool(read_job, services.farm, job)
    context = {"job": facts, "query": query, "chunks": [], "problem": ""}
    try:
        find = partial(find_chunks, services, interactive, job, query, SHOWN)
        context["chunks"] = await interactive.run(find)
    except HTTPException as error:
        context["problem"] = error.detail
        return render(request, "search.html", context, error.status_code)
    return render(request, "search.html", context)
