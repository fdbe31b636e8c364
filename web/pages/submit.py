"""The page for a new job: pasted texts or a file, in one form that the API reads as well."""

import contextlib
from typing import Annotated, Final, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from embedfarm.collector.sinks import holding_sinks, sink_kind, sink_names
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.job_spec import JOB_DEFAULTS, JOB_FIELDS, JOB_TYPES
from embedfarm.contract.scheduling_terms import PRIORITIES
from embedfarm.contract.status import JobGone
from embedfarm.ingest.job_queue import has_worker
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import render
from embedfarm.web.jobs.estimate_routes import EstimateOptions, estimate_order
from embedfarm.web.jobs.job_requests import (
    NOT_IN_BODIES,
    JobIds,
    Options,
    choices_in_bodies,
    reading,
)
from embedfarm.web.jobs.submissions import submit_job
from embedfarm.web.pages.sign_in import leave_for
from embedfarm.web.services import Caller, Service, Services, need

ASKED_ABOVE: Final = frozenset({"model", "name", "dimensions"})  # for which the page has words
KINDS: Final = {bool: "flag", int: "number", str: "text"}


class FormField(NamedTuple):
    """A field of a job as the form asks for it, as `embedfarm.contract.job_spec` declares it."""

    name: str
    label: str
    kind: str
    default: object
    choices: tuple[str, ...]
    least: int
    most: int
    step: int
    help: str


def _form_fields() -> list[FormField]:
    """Return the fields of a job that the page has no words of its own for."""
    return [
        FormField(
            name,
            name.replace("_", " ").capitalize(),
            KINDS[JOB_TYPES[name]],
            JOB_DEFAULTS[name],
            choices_in_bodies(name),
            field.least,
            field.most,
            field.step,
            field.sentence,
        )
        for name, field in JOB_FIELDS.items()
        if name not in ASKED_ABOVE | NOT_IN_BODIES
    ]


FIELDS: Final = _form_fields()

router: Final = APIRouter(
    prefix="/jobs/new", include_in_schema=False, dependencies=need(Scope.SUBMIT)
)


@router.get("")
def ask_corpus(
    request: Request,
    services: Service,
    of: Annotated[Literal["texts", "file"], Query()] = "texts",
    reuse: Annotated[JobIds, Query()] = "",
) -> Response:
    """Ask what to embed: texts, or a file with `?of=file`; `reuse` names jobs with some of it."""
    sinks = sink_names() if services.settings.stored_roots else holding_sinks()
    told = {
        "of": of,
        "reuse": reuse,
        "model": _model_of(services, reuse.partition(",")[0]) if reuse else "",
        "models": services.settings.models,
        "priorities": priorities_of(services),
        "sinks": {name: sink_kind(name).about for name in sinks},
        "attended": has_worker(services.rq),
        "fields": FIELDS,
        "stores": services.stores,
    }
    return render(request, "new.html", told)


def _model_of(services: Services, job: str) -> str:
    """Return the model of a job; nothing where it is not there for the caller any more."""
    with contextlib.suppress(JobGone, RecordError):
        services.find_job(job)
        return services.farm.job(job).spec().model
    return ""


def priorities_of(services: Services) -> dict[str, int]:
    """Return the priorities that the caller may ask for, by name."""
    tenant = services.caller.tenant
    highest = None if tenant is None else services.settings.limits_of(tenant).priority
    return {
        name: value for name, value in PRIORITIES.items() if highest is None or value <= highest
    }


@router.post("")
async def submit(services: Service, key: Caller, request: Request) -> Response:
    """Submit a job, and show it."""
    made = await submit_job(services, key, request, Options(), None)
    return leave_for(f"/jobs/{made.headers['location'].rpartition('/')[2]}")


@router.post("/estimate")
async def show_estimate(services: Service, request: Request) -> Response:
    """Show what the job that a form asks for would take; nothing is submitted."""
    async with reading(request, services, EstimateOptions()) as order:
        made = await run_in_threadpool(estimate_order, services, order)
    return render(request, "estimate.html", {"estimate": made})
