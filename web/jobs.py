"""Jobs: what there is, how it goes, what failed, and what is to become of it."""

import logging
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from fastapi import APIRouter, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from embedfarm.overview import JobFacts, read_job, read_page
from embedfarm.records import ChunkError
from embedfarm.terms import TENANT_CHARACTERS_MAX, WEIGHT_MAX, Terms
from web.keys import Key, Scope
from web.problems import problems
from web.schemas import WHOLE, Body, schema_of
from web.services import Caller, Service, need

LOGGER: Final = logging.getLogger(__name__)
DEADLINE_MS_MAX: Final = 2**53  # what every JSON reader can say exactly

router: Final = APIRouter(prefix="/v1/jobs", tags=["jobs"])
JobId = Annotated[str, Path(max_length=256, pattern=r"^[^{}]+$", description="As in the list.")]
State = Literal["open", "closed", "paused", "cancelled", "finished", "failed"]
Tenant = Annotated[str, StringConstraints(max_length=TENANT_CHARACTERS_MAX)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most in the answer.")]
After = Annotated[str, Query(max_length=300, description="`next` of the answer before.")]
Failure = schema_of(ChunkError)


class JobPage(BaseModel):
    """Jobs; with `next`, more may follow, even if these are fewer than asked for."""

    jobs: list[JobFacts]
    next: str | None


class FailurePage(BaseModel):
    """Chunks that failed, in that order, of the newest 10,000; with `next`, more may follow."""

    errors: list[Failure]  # type: ignore[valid-type] # it is made at run time
    next: str | None


class TermsChange(Body):
    """Terms of a job that are to be others from now on; what is left out stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    priority: Annotated[
        int, Field(ge=0, le=2, description="0 normal, 1 high, 2 urgent."), WHOLE
    ] = 0
    tenant: Tenant = Field(default="", description="For whom it is done.")
    weight: Annotated[
        int, Field(ge=1, le=WEIGHT_MAX, description="Beside the tenant's others."), WHOLE
    ] = 1
    deadline_ms: Annotated[
        int, Field(ge=0, le=DEADLINE_MS_MAX, description="Unix time in ms; 0: none."), WHOLE
    ] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse nothing at all, and what no scheduler could use."""
        if not self.model_fields_set:
            raise ValueError("give priority, tenant, weight or deadline_ms")
        Terms(**self.model_dump())
        return self


@router.get("", responses=problems(), dependencies=need(Scope.READ))
def list_jobs(
    services: Service,
    state: State | None = None,
    tenant: Annotated[Tenant | None, Query()] = None,
    limit: Limit = 100,
    after: Annotated[After, Query(pattern=r"^(-?\d+(\.\d+)?:.+)?$")] = "",
) -> JobPage:
    """Jobs, of a state and a tenant if these are given.

    Unfinished ones come first, oldest first, then those that have ended, newest first.
    """
    page = read_page(services.farm, after, limit, state, tenant)
    return JobPage(jobs=page.jobs, next=page.next)


@router.get("/{job}", responses=problems(404), dependencies=need(Scope.READ))
def show_job(services: Service, job: JobId) -> JobFacts:
    """One job: what it asks for, how far it is, and who refused it."""
    return read_job(services.farm, job)


@router.get(
    "/{job}/errors",
    response_model=FailurePage,
    responses=problems(404),
    dependencies=need(Scope.READ),
)
def list_failures(
    services: Service,
    job: JobId,
    limit: Limit = 100,
    after: Annotated[After, Query(pattern=r"^(\d{1,18}-\d{1,18})?$")] = "",
) -> dict[str, Any]:
    """The chunks of a job that failed so far, with the reason, in the order of their failing."""
    handle = services.farm.job(job)
    handle.status()
    last, failures = handle.failures(limit, after)
    return {
        "errors": [msgspec.structs.asdict(each) for each in failures],
        "next": last if len(failures) == limit else None,
    }


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
    """Stop a job for good; what is embedded already stays with its collector."""
    services.farm.job(job).cancel()
    return _log("cancels", services, key, job)


@router.patch("/{job}", responses=problems(404), dependencies=need(Scope.SUBMIT))
def set_terms(services: Service, key: Caller, job: JobId, change: TermsChange) -> JobFacts:
    """Change terms of a job; the next plan follows them."""
    services.farm.job(job).set_terms(**change.model_dump(exclude_unset=True))
    return _log("changes the terms of", services, key, job)


@router.delete(
    "/{job}", status_code=204, responses=problems(404, 409), dependencies=need(Scope.SUBMIT)
)
def delete_job(services: Service, key: Caller, job: JobId) -> None:
    """Remove a job that was cancelled, or of which everything is on disk."""
    handle = services.farm.job(job)
    status = handle.status()
    if not status.removable:
        raise HTTPException(409, f"job {job} is {status.state} and not finished: cancel it first")
    LOGGER.info("%s deletes job %r", key.name, job)
    handle.delete()


def _log(verb: str, services: Service, key: Key, job: str) -> JobFacts:
    """Note who did what, and say how the job is now."""
    LOGGER.info("%s %s job %r", key.name, verb, job)
    return read_job(services.farm, job)
