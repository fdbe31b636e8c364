"""Raising the limits of a job from its page, so that one that has paused itself goes on."""

from typing import Annotated, Final

from fastapi import APIRouter, Form, Response
from pydantic import BaseModel, Field, model_validator

from embedfarm.contract.scheduling_terms import LIMIT_MAX
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import segment
from embedfarm.web.jobs.routes import JobId, TermsChange, set_terms
from embedfarm.web.pages.sign_in import leave_for
from embedfarm.web.services import Caller, Service, need

router: Final = APIRouter(include_in_schema=False, dependencies=need(Scope.SUBMIT))

Limit = Annotated[float | None, Field(ge=0, le=LIMIT_MAX)]


class NewLimits(BaseModel):
    """Limits of a job, 0 for none; those that are left out stay."""

    max_hours: Limit = None
    max_cost: Limit = None

    @model_validator(mode="after")
    def _check(self) -> "NewLimits":
        """Refuse a form without any limit."""
        if self.max_hours is None and self.max_cost is None:
            raise ValueError("give max_hours or max_cost")
        return self


@router.post("/jobs/{job}/limits")
def set_limits(
    services: Service, key: Caller, job: JobId, asked: Annotated[NewLimits, Form()]
) -> Response:
    """Set limits of a job, and show it: it goes on if it may take more now."""
    set_terms(services, key, job, TermsChange(**asked.model_dump(exclude_none=True)))
    return leave_for(f"/jobs/{segment(job)}")
