"""Limits of a job on a private farm, which nobody but the command that runs it can raise."""

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.jobs import Job
from embedfarm.contract.scheduling_terms import LIMITS
from embedfarm.contract.status import JobStatus
from embedfarm.producer.submitter import Submitter


class LimitReached(EmbedfarmError, RuntimeError):
    """Raised when a job on a private farm has taken as much as it may; it can go on with more."""

    exit_status = 4


def take_limits(submitter: Submitter) -> None:
    """Give the job of a private farm the limits of the command that runs it now.

    Nobody else could raise those of the command before, at which it may have paused itself. On a
    shared farm somebody may have, and they stay as they are.
    """
    if submitter.settings.redis_url:
        return
    handle, terms = submitter.farm.job(submitter.job), submitter.terms
    status = handle.status()
    if any(getattr(status, name) != getattr(terms, name) for name in LIMITS):
        handle.set_terms(max_hours=terms.max_hours, max_cost=terms.max_cost)


def check_limits(handle: Job, status: JobStatus, *, private: bool) -> None:
    """Give up when a private farm's job has paused itself, and what was in work is embedded."""
    if private and status.braked and not handle.stream.backlog()[1]:
        raise LimitReached(
            f"the job {status.reason} ({status.spent.words} so far); the same command with a "
            "higher limit, or without one, goes on from here"
        )
