"""The page of all jobs: looked for by words, state and age, and steered many at a time."""

import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from embedfarm.contract.redaction import CORPUS_CHARACTERS_MAX
from embedfarm.contract.scheduling_terms import LABEL_CHARACTERS_MAX, PRIORITIES
from embedfarm.ingest.job_queue import Submissions
from embedfarm.watch.job_search import Age, FoundJobs, JobQuery, Order, State, search_jobs
from embedfarm.watch.overview import QUEUED, JobFacts, read_jobs
from embedfarm.watch.view import FarmReader
from embedfarm.web.auth.keys import Scope
from embedfarm.web.farm_readers import Reader
from embedfarm.web.pages.page_events import LIVE, answer_live
from embedfarm.web.services import Service, Services, need

PAGE_JOBS: Final = 25
SEARCH_SECONDS: Final = 10.0  # between searches while somebody watches; what is shown is read anew

STATES: Final[dict[State, str]] = {
    "": "any state", "queued": "queued", "running": "running", "paused": "paused",
    "finished": "finished", "incomplete": "finished, with failures",
    "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
AGES: Final[dict[Age, str]] = {
    "": "any time", "hour": "the last hour", "day": "the last day", "week": "the last week",
    "before-day": "more than a day ago", "before-week": "more than a week ago",
}  # fmt: skip
ORDERS: Final[dict[Order, str]] = {
    "newest": "newest first", "oldest": "oldest first", "name": "by name",
    "chunks": "most chunks first", "failures": "most failures first",
}  # fmt: skip

router: Final = APIRouter(include_in_schema=False, dependencies=[*need(Scope.READ), LIVE])


class JobFilter(BaseModel):
    """Choice of jobs, by the names of the fields of the page's form."""

    words: str = Field("", max_length=200)
    state: State = ""
    tenant: str = Field("", max_length=64)
    label: str = Field("", max_length=LABEL_CHARACTERS_MAX)
    corpus: str = Field("", max_length=CORPUS_CHARACTERS_MAX)
    age: Age = ""
    order: Order = "newest"

    def filtering(self) -> dict[str, str]:
        """Return what is chosen, by the names of the form's fields."""
        return self.model_dump(include=set(JobFilter.model_fields), exclude_defaults=True)

    def query(self) -> JobQuery:
        """Return what the farm is searched for."""
        return JobQuery(**self.model_dump(include=set(JobFilter.model_fields)))


class JobPlace(JobFilter):
    """A page of what a person looks for, the first is 1."""

    page: int = Field(1, ge=1, le=1000)


class _Listing:
    """A page of jobs that is read again and again while somebody watches it."""

    def __init__(self, services: Services, reader: FarmReader, place: JobPlace) -> None:
        self._services = services
        self._reader = reader
        self._place = place
        self._found = FoundJobs([], 0, complete=True)
        self._searched = -SEARCH_SECONDS

    def read(self) -> dict[str, Any]:
        """Return what the page shows now."""
        farm, place = self._services.farm, self._place
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            self._found = search_jobs(farm, place.query())
            self._searched = time.monotonic()
        found = self._found.jobs
        pages = max(1, -(-len(found) // PAGE_JOBS))
        page = min(place.page, pages)
        jobs = read_jobs(farm, found[(page - 1) * PAGE_JOBS : page * PAGE_JOBS])
        return {
            "jobs": jobs,
            "found": self._found,
            "place": place,
            "page": page,
            "pages": pages,
            "chosen": place.filtering(),
            "states": STATES,
            "ages": AGES,
            "orders": ORDERS,
            "priorities": list(PRIORITIES),
            "moving": {each.job: each for each in self._reader.read().jobs},
            "queue": _places(self._services.submissions, jobs),
        }


def _places(submissions: Submissions, jobs: list[JobFacts]) -> dict[str, int]:
    """Return the places of jobs that wait for an ingest worker; the first of all has place 1."""
    if not any(job.state == QUEUED for job in jobs):
        return {}
    return {job: place for place, job in enumerate(submissions.waiting(), 1)}


@router.get("/jobs")
def list_jobs(
    request: Request, services: Service, reader: Reader, place: Annotated[JobPlace, Query()]
) -> Response:
    """Show the jobs that a person looks for, 25 on a page."""
    return answer_live(request, "jobs.html", _Listing(services, reader, place).read)
