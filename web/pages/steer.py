"""Actions on jobs from the pages: asked first, then done as by the API, then shown."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Path, Query, Request, Response
from pydantic import BaseModel, Field

from embedfarm.contract.formatting import counted
from embedfarm.contract.scheduling_terms import PRIORITIES
from embedfarm.ingest.job_directories import directory_of
from embedfarm.watch.job_actions import MANY_MAX, MAY, PRIORITY_OF, Verb, choose_jobs
from embedfarm.watch.overview import JobFacts, read_job, read_jobs
from embedfarm.web.auth.keys import Scope
from embedfarm.web.http.rendering import PATH_CHARACTERS_MAX, local_path, render, segment
from embedfarm.web.jobs.bulk import DO, act_on_all, foresee
from embedfarm.web.jobs.routes import JobId
from embedfarm.web.pages.jobs import JobFilter
from embedfarm.web.pages.sign_in import leave_for
from embedfarm.web.services import Caller, Service, Services, need

NAMED_MAX: Final = 10
ASKED_MAX: Final = MANY_MAX - 2  # jobs of one form, which has fields for two things more


class Action(NamedTuple):
    """Something that may be done to jobs.

    Attributes:
        question: Question that is asked first, with a place for the job or the number of jobs.
        consequence: Sentence that says what happens then.
        yes: Label of the button that does it, with the same place.
        no: Label of the button that does not.
        dangerous: Whether the action cannot be undone.
    """

    question: str
    consequence: str
    yes: str
    no: str = "Leave as it is"
    dangerous: bool = False


ACTIONS: Final[dict[str, Action]] = {
    "pause": Action(
        "Pause {}?",
        "Workers get no more of it until it is resumed. What they hold is still embedded.",
        "Pause {}",
    ),
    "resume": Action(
        "Resume {}?",
        "Workers go on where they stopped.",
        "Resume {}",
    ),
    "cancel": Action(
        "Cancel {}?",
        "This is for good. What is embedded already stays with its output.",
        "Cancel {}",
        "Let it go on",
        dangerous=True,
    ),
    "retry": Action(
        "Try again what failed in {}?",
        "The chunks that failed are embedded again, and put into the output where they belong.",
        "Try again",
    ),
    "delete": Action(
        "Delete {}?",
        "The farm forgets what it knows, the failed chunks included.",
        "Delete {}",
        "Keep it",
        dangerous=True,
    ),
    **{
        verb: Action(
            f"Set {{}} to {name} priority?",
            "The next plan follows it.",
            f"Set {{}} to {name}",
        )
        for verb, name in zip(PRIORITY_OF, PRIORITIES, strict=True)
    },
}

router: Final = APIRouter(include_in_schema=False, dependencies=need(Scope.SUBMIT))


class Selection(JobFilter):
    """Jobs that were marked, or with `every` all that the filter finds."""

    verb: Verb
    job: Annotated[list[str], Field(max_length=MANY_MAX, default_factory=list)]
    every: bool = False

    def place(self) -> str:
        """Return the path of the page that shows what the filter finds."""
        chosen = self.filtering()
        return f"/jobs?{urlencode(chosen)}" if chosen else "/jobs"


@router.get("/jobs/{job}/{verb}")
def ask(request: Request, services: Service, job: JobId, verb: Annotated[Verb, Path()]) -> Response:
    """Ask whether an action on a job is meant."""
    facts, action = read_job(services.farm, job), _action(services, verb, [job])
    told = _question(action, "this job") | {
        "subjects": [facts.name or job],
        "possible": True,
        "back": f"/jobs/{segment(job)}",
        "fields": [],
    }
    return render(request, "confirm.html", told)


@router.post("/jobs/{job}/{verb}")
def act(services: Service, key: Caller, job: JobId, verb: Annotated[Verb, Path()]) -> Response:
    """Do an action, and show the job, or the farm after the job was deleted."""
    DO[verb](services, key, job)
    return leave_for("/" if verb == "delete" else f"/jobs/{segment(job)}")


@router.get("/steer")
def ask_many(
    request: Request, services: Service, selection: Annotated[Selection, Query()]
) -> Response:
    """Ask whether an action on many jobs is meant, and say on how many of them it can be done."""
    if selection.every:
        some, possible, found, _ = choose_jobs(services.farm, selection.query(), selection.verb)
    else:
        marked = read_jobs(services.farm, selection.job)
        some = [job for job in marked if MAY[selection.verb](job)]
        possible, found = len(some), len(selection.job)
    refused = foresee(services, selection.verb, [job.job for job in some])
    some = [job for job in some if job.job not in refused]
    possible -= len(refused)
    some = some[:ASKED_MAX]
    why = next(iter(refused.values()), "")
    action = _action(services, selection.verb, [job.job for job in some])
    told = _question(action, counted(len(some), "job")) | {
        "subjects": _subjects(some),
        "consequence": _consequence(action, len(some), possible, found, why),
        "no": "Leave them as they are",
        "back": selection.place(),
        "fields": [("verb", selection.verb), ("back", selection.place())]
        + [("job", job.job) for job in some],
        "possible": bool(some),
    }
    return render(request, "confirm.html", told)


def _action(services: Services, verb: Verb, jobs: Sequence[str]) -> Action:
    """Return an action on some jobs; who deletes them is told what becomes of their files."""
    action = ACTIONS[verb]
    if verb != "delete":
        return action
    here = sum(directory_of(services.settings, job) is not None for job in jobs)
    files = "Files of an output stay."
    if here == len(jobs):
        files = "Output and upload are removed from the disk as well."
    elif here:
        files = f"Output and upload of {here:,} of them are removed from the disk as well. "
        files += "Files of the others stay."
    return action._replace(consequence=f"{action.consequence} {files}")


def _consequence(action: Action, some: int, chosen: int, names: int, why: str) -> str:
    """Say what an action on some jobs does, out of those it can be done to and those marked.

    One of the reasons why it cannot be done to others, beyond their state, is told.
    """
    because = f" One of them: {why}." if why else ""
    if not names:
        return "No job is marked."
    if not chosen:
        return f"Of {counted(names, 'job')} none is in a state for that.{because}"
    parts = [action.consequence]
    if chosen < names:
        left = f"{names - chosen:,} of {names:,}"
        parts.append(f"Left out, since it cannot be done to them now: {left}.{because}")
    if some < chosen:
        parts.append(f"These are the first {some:,} of {chosen:,}.")
    return " ".join(parts)


def _subjects(some: Sequence[JobFacts]) -> list[str]:
    named = [job.name or job.job for job in some[:NAMED_MAX]]
    return named + ([f"and {len(some) - len(named):,} more"] if len(some) > len(named) else [])


def _question(action: Action, subject: str) -> dict[str, Any]:
    """Return an action's words for a job, or for a number of jobs."""
    said = action._asdict()
    return said | {name: said[name].format(subject) for name in ("question", "yes")}


class ManyJobs(BaseModel):
    """Jobs that an action is done to, and the page that is shown then."""

    verb: Verb
    job: Annotated[list[str], Field(max_length=MANY_MAX)]
    back: Annotated[str, Field(max_length=PATH_CHARACTERS_MAX)] = "/jobs"


@router.post("/steer")
def act_on_many(
    request: Request, services: Service, key: Caller, asked: Annotated[ManyJobs, Form()]
) -> Response:
    """Do an action to jobs one after the other, and show them, or those that it was not done to."""
    refused = act_on_all(services, key, asked.verb, asked.job)
    if not refused:
        return leave_for(asked.back)
    told = {
        "done": len(asked.job) - len(refused),
        "of": len(asked.job),
        "refused": refused,
        "back": local_path(asked.back),
    }
    return render(request, "refused.html", told)
