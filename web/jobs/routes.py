"""Routes of jobs: list, show, pause, resume, cancel, change and delete them."""

import logging
from dataclasses import asdict
from typing import Annotated, Final, Literal, Self

from fastapi import APIRouter, Depends, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, model_validator

from embedfarm.watch.corpus_runs import RunFigures, figures_of, last_runs
from embedfarm.watch.overview import (
    JobChoice,
    JobDetails,
    JobFacts,
    read_details,
    read_job,
    read_page,
)
from embedfarm.web.auth.keys import Key, Scope
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import problems
from embedfarm.web.jobs.job_requests import Label, Tenant, TermsGiven
from embedfarm.web.services import Caller, Service, need

LOGGER: Final = logging.getLogger(__name__)

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=BoundedRoute)
JobId = Annotated[str, Path(max_length=256, pattern=r"^[^{}]+$", description="As in the list.")]
State = Literal["queued", "running", "paused", "finished", "failed", "cancelled"]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most in the answer.")]
After = Annotated[str, Query(max_length=300, description="`next` of the answer before.")]


class JobPage(BaseModel):
    """Jobs; with `next`, more may follow, even if fewer than asked for are here."""

    jobs: list[JobFacts]
    next: str | None


class TermsChange(TermsGiven):
    """New terms of a job; those that are left out stay."""

    model_config = ConfigDict(strict=True, json_schema_extra={"minProperties": 1})

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a change without any terms."""
        if not self.model_fields_set:
            raise ValueError(f"give one of {', '.join(TermsGiven.model_fields)}")
        return self


def _choose(
    state: State | None = None,
    tenant: Annotated[Tenant | None, Query()] = None,
    label: Annotated[Label | None, Query()] = None,
) -> JobChoice:
    return JobChoice(state, tenant, label)


@router.get("", responses=problems(), dependencies=need(Scope.READ))
def list_jobs(
    services: Service,
    choice: Annotated[JobChoice, Depends(_choose)],
    limit: Limit = 100,
    after: Annotated[After, Query(pattern=r"^(-?[0-9]+(\.[0-9]+)?:.+)?$")] = "",
) -> JobPage:
    """List jobs, those of a state, of a tenant and with a label if these are given.

    Unfinished ones come first, oldest first, then those that have ended, newest first.
    """
    page = read_page(services.farm, after, limit, choice)
    return JobPage(jobs=page.jobs, next=page.next)


@router.get("/{job}", responses=problems(404), dependencies=need(Scope.READ))
def show_job(services: Service, job: JobId) -> JobDetails:
    """Show a job: what it asks for, how far it is, how fast it goes, and who refused it."""
    return read_details(services.farm, job)


@router.get("/{job}/runs", responses=problems(404), dependencies=need(Scope.READ))
def list_runs(services: Service, job: JobId) -> list[RunFigures]:
    """List the last six jobs of the same corpus, newest first; none where nobody can tell.

    Of a corpus that was uploaded nobody knows the other jobs. A tenant's key is told of its own.
    """
    farm = services.farm
    return [figures_of(each) for each in last_runs(farm, read_job(farm, job))]


@router.post("/{job}/pause", responses=problems(404, 409), dependencies=need(Scope.SUBMIT))
def pause_job(services: Service, key: Caller, job: JobId) -> JobFacts:
    """Lease no more blocks of a job until it is resumed; what is leased is still embedded."""
    services.farm.job(job).pause()
    return _log("pauses", services, key, job)


@router.post("/{job}/resume", responses=problems(404, 409), dependencies=need(Scope.SUBMIT))
def resume_job(services: Service, key: Caller, job: JobId) -> JobFacts:
    """Go on with a paused job."""
    services.farm.job(job).resume()
    return _log("resumes", services, key, job)


@router.post("/{job}/cancel", responses=problems(404, 409), dependencies=need(Scope.SUBMIT))
def cancel_job(services: Service, key: Caller, job: JobId) -> JobFacts:
    """Stop a job for good; what is embedded in order, up to the first gap, can still be read."""
    services.farm.job(job).cancel()
    services.submissions.cancel(job)
    return _log("cancels", services, key, job)


@router.patch("/{job}", responses=problems(404), dependencies=need(Scope.SUBMIT))
def set_terms(services: Service, key: Caller, job: JobId, change: TermsChange) -> JobFacts:
    """Change terms of a job; the next plan follows them."""
    granted = asdict(services.grant(change.terms()))
    services.farm.job(job).set_terms(**{name: granted[name] for name in change.model_fields_set})
    return _log("changes the terms of", services, key, job)


@router.delete(
    "/{job}", status_code=204, responses=problems(404, 409), dependencies=need(Scope.SUBMIT)
)
def delete_job(services: Service, key: Caller, job: JobId) -> None:
    """Remove a job that was cancelled, or whose results are all on disk.

    What was uploaded for it, and its output, go with it if it came by HTTP; other outputs stay.
    """
    handle = services.farm.job(job)
    status = handle.status()
    if not status.removable:
        raise HTTPException(
            409, f"job {job} is {status.shown_state} and not finished: cancel it first"
        )
    LOGGER.info("%s deletes job %r", key.name, job)
    services.submissions.remove(job)
    handle.delete()


def _log(verb: str, services: Service, key: Key, job: str) -> JobFacts:
    """Log who did what to a job, and return the job as it is now."""
    LOGGER.info("%s %s job %r", key.name, verb, job)
    return read_job(services.farm, job)
