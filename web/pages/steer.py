"""Actions on jobs from the pages: asked first, then done as by the API, then shown."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Path, Request, Response

from embedfarm.watch.overview import read_job
from embedfarm.web.auth.keys import Key, Scope
from embedfarm.web.http.rendering import render, segment
from embedfarm.web.jobs import retries
from embedfarm.web.jobs import routes as jobs
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.pages.sign_in import leave_for
from embedfarm.web.services import Caller, Service, Services, need


class Action(NamedTuple):
    """Something that may be done to a job.

    Attributes:
        do: Function of the API route that does it.
        question: Question that is asked first.
        consequence: Sentence that says what happens then.
        yes: Label of the button that does it.
        no: Label of the button that does not.
        dangerous: Whether the action cannot be undone.
    """

    do: Callable[[Services, Key, str], Any]
    question: str
    consequence: str
    yes: str
    no: str = "Leave it as it is"
    dangerous: bool = False


ACTIONS: Final = {
    "pause": Action(
        jobs.pause_job,
        "Pause this job?",
        "No more of it is given to workers until it is resumed. What they hold is still embedded.",
        "Pause",
    ),
    "resume": Action(
        jobs.resume_job, "Resume this job?", "Workers go on where they stopped.", "Resume"
    ),
    "cancel": Action(
        jobs.cancel_job,
        "Cancel this job?",
        "It stops for good. What is embedded already stays with its output.",
        "Cancel the job",
        "Let it go on",
        dangerous=True,
    ),
    "retry": Action(
        retries.retry_job,
        "Try again what failed?",
        "The chunks that failed are embedded again, and put into the output where they belong.",
        "Try again",
    ),
    "delete": Action(
        jobs.delete_job,
        "Delete this job?",
        "The farm forgets it, its failed chunks included. Files of its output stay.",
        "Delete",
        "Keep it",
        dangerous=True,
    ),
}

Verb = Annotated[Literal["pause", "resume", "cancel", "retry", "delete"], Path()]

router: Final = APIRouter(include_in_schema=False, dependencies=need(Scope.SUBMIT))


@router.get("/jobs/{job}/{verb}")
def ask(request: Request, services: Service, job: JobId, verb: Verb) -> Response:
    """Ask whether an action on a job is meant."""
    facts, action = read_job(services.farm, job), ACTIONS[verb]
    told = {
        **action._asdict(),
        "subject": facts.name or job,
        "back": f"/jobs/{segment(job)}",
        "fields": [],
    }
    return render(request, "confirm.html", told)


@router.post("/jobs/{job}/{verb}")
def act(services: Service, key: Caller, job: JobId, verb: Verb) -> Response:
    """Do an action, and show the job, or the farm after the job was deleted."""
    ACTIONS[verb].do(services, key, job)
    return leave_for("/" if verb == "delete" else f"/jobs/{segment(job)}")
