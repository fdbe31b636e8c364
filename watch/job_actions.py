"""Actions on many jobs: which verbs there are, and which of the jobs found each can be done to."""

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.scheduling_terms import PRIORITIES
from embedfarm.contract.status import JobStatus
from embedfarm.watch.job_search import JobQuery, search_jobs
from embedfarm.watch.overview import JobFacts, read_jobs

MANY_MAX: Final = 1000  # jobs that one request may act on

Verb: TypeAlias = Literal[
    "pause", "resume", "cancel", "retry", "delete",
    "priority-normal", "priority-high", "priority-urgent",
]  # fmt: skip

PRIORITY_OF: Final[Mapping[str, int]] = {f"priority-{name}": n for name, n in PRIORITIES.items()}


def _has_other_priority(priority: int) -> Callable[[JobStatus], bool]:
    return lambda job: not job.over and job.priority != priority


MAY: Final[Mapping[Verb, Callable[[JobStatus], bool]]] = {
    "pause": lambda job: job.moving and not job.embedded,
    "resume": lambda job: job.state == "paused" and not job.limited,
    "cancel": lambda job: job.moving or job.state == "paused",
    "retry": lambda job: (
        job.state == "failed" or (job.state == "finished" and job.chunks_failed > 0)
    ),
    "delete": lambda job: job.removable,
    "priority-normal": _has_other_priority(0),
    "priority-high": _has_other_priority(1),
    "priority-urgent": _has_other_priority(2),
}
"""Whether the state of a job allows a verb."""


class ChosenJobs(NamedTuple):
    """Jobs that an action can be done to.

    Attributes:
        jobs: The first of them, at most `MANY_MAX`.
        possible: Number of all of them.
        found: Number of jobs that were found, those in other states included.
        complete: Whether all jobs of the farm were looked at.
    """

    jobs: list[JobFacts]
    possible: int
    found: int
    complete: bool


def choose_jobs(farm: FarmClient, query: JobQuery, verb: Verb) -> ChosenJobs:
    """Choose, among the jobs that a query finds, those that an action can be done to now."""
    found = search_jobs(farm, query)
    possible = [job for job in read_jobs(farm, found.jobs) if MAY[verb](job)]
    return ChosenJobs(possible[:MANY_MAX], len(possible), len(found.jobs), found.complete)
