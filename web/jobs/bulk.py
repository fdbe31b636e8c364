"""Actions on many jobs in one request: those that are named, or that a search finds."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.redaction import CORPUS_CHARACTERS_MAX
from embedfarm.contract.scheduling_terms import LABEL_CHARACTERS_MAX, TENANT_CHARACTERS_MAX
from embedfarm.contract.status import JobGone
from embedfarm.watch.job_actions import MANY_MAX, MAY, PRIORITY_OF, Verb, choose_jobs
from embedfarm.watch.job_search import Age, JobQuery, State
from embedfarm.watch.overview import read_jobs
from embedfarm.web.auth.keys import Key, Scope
from embedfarm.web.http.bodies import BoundedRoute
from embedfarm.web.http.problems import problems
from embedfarm.web.http.schemas import Many
from embedfarm.web.jobs import retries
from embedfarm.web.jobs import routes as jobs
from embedfarm.web.services import Caller, Service, Services, need

MANY_SECONDS: Final = 20.0  # for the jobs of a request; those that are left then are named
GONE: Final = "there is no such job any more"
LOGGER: Final = logging.getLogger(__name__)

router: Final = APIRouter(prefix="/v1", tags=["jobs"], route_class=BoundedRoute)

Do = Callable[[Services, Key, str], Any]


def _set_priority(priority: int) -> Do:
    change = jobs.TermsChange(priority=priority)
    return lambda services, key, job: jobs.set_terms(services, key, job, change)


DO: Final[Mapping[Verb, Do]] = {
    "pause": jobs.pause_job,
    "resume": jobs.resume_job,
    "cancel": jobs.cancel_job,
    "retry": retries.retry_job,
    "delete": jobs.delete_job,
    "priority-normal": _set_priority(PRIORITY_OF["priority-normal"]),
    "priority-high": _set_priority(PRIORITY_OF["priority-high"]),
    "priority-urgent": _set_priority(PRIORITY_OF["priority-urgent"]),
}
"""What each verb does to a job: the function of its route."""


class BulkAction(BaseModel):
    """An action on the jobs that are named, or else on all that the other fields find."""

    model_config = ConfigDict(extra="forbid", strict=True)

    verb: Verb
    jobs: Many[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=list, max_length=MANY_MAX, description="Ids; none: those that are found."
    )
    words: str = Field(default="", max_length=200, description="In name, id or model.")
    state: State = ""
    tenant: str = Field(default="", max_length=TENANT_CHARACTERS_MAX)
    label: str = Field(default="", max_length=LABEL_CHARACTERS_MAX)
    corpus: str = Field(default="", max_length=CORPUS_CHARACTERS_MAX)
    age: Age = ""
    dry_run: bool = Field(default=False, description="Say which jobs it would be done to.")

    def query(self) -> JobQuery:
        """Return what the farm is searched for."""
        fields = {"words", "state", "tenant", "label", "corpus", "age"}
        return JobQuery(**self.model_dump(include=fields))


class BulkAnswer(BaseModel):
    """What became of an action on many jobs.

    Attributes:
        verb: The action.
        dry_run: Whether nothing was done.
        found: Number of jobs that were named or found, in whatever state.
        possible: Number of those that it can be done to; at most 1,000 are acted on.
        jobs: Ids of those that it was done to, or would be.
        refused: Reasons why it was not, or would not be, done to others, by id.
    """

    verb: Verb
    dry_run: bool
    found: int
    possible: int
    jobs: list[str]
    refused: dict[str, str]


@router.post("/job-actions", responses=problems(), dependencies=need(Scope.SUBMIT))
def act_on_jobs(services: Service, key: Caller, action: BulkAction) -> BulkAnswer:
    """Do something to many jobs, at most 1,000: pause, resume, cancel, retry, delete, priority.

    With `dry_run` it says to which. Jobs may change meanwhile: an action on the ids that a dry run
    has named is done to these and no others, and each that it cannot be done to any more is named.
    """
    if action.jobs:
        names, found, possible = action.jobs, len(action.jobs), len(action.jobs)
    else:
        chosen = choose_jobs(services.farm, action.query(), action.verb)
        names = [each.job for each in chosen.jobs]
        found, possible = chosen.found, chosen.possible
    if action.dry_run:
        refused = foresee(services, action.verb, names)
        possible -= len(refused)
    else:
        refused = act_on_all(services, key, action.verb, names)
        LOGGER.info("%s does %r to %d jobs", key.name, action.verb, len(names) - len(refused))
    return BulkAnswer(
        verb=action.verb,
        dry_run=action.dry_run,
        found=found,
        possible=possible,
        jobs=[name for name in names if name not in refused],
        refused=refused,
    )


def foresee(services: Services, verb: Verb, names: Sequence[str]) -> dict[str, str]:
    """Return why something could not be done to some of the jobs now, by job; nothing is done.

    Whether what failed can be tried again is looked up on the disk, for as long as the action
    itself may take.
    """
    refused = dict[str, str]()
    found = {each.job: each for each in read_jobs(services.farm, names)}
    end = time.monotonic() + MANY_SECONDS
    for job in names:
        facts = found.get(job)
        if facts is None:
            refused[job] = GONE
        elif not MAY[verb](facts):
            refused[job] = f"job {job} is {facts.state}: {verb} is not for it now"
        elif verb == "retry" and time.monotonic() < end:
            try:
                retries.prepare_retry(services, facts)
            except HTTPException as error:
                refused[job] = error.detail
    return refused


def act_on_all(services: Services, key: Key, verb: Verb, names: Sequence[str]) -> dict[str, str]:
    """Do something to one job after the other; return why it was not done, by job."""
    refused = dict[str, str]()
    end = time.monotonic() + MANY_SECONDS
    for job in names:
        if time.monotonic() > end:
            refused[job] = "there was no time left for it, do it again"
            continue
        try:
            services.find_job(job)
            DO[verb](services, key, job)
        except HTTPException as error:
            refused[job] = error.detail
        except JobGone:
            refused[job] = GONE
        except EmbedfarmError as error:  # the job has ended, or the farm is full
            refused[job] = str(error)
    return refused
