"""Failures that end a run for good, and what a job's record says of them."""

from collections.abc import Mapping, Sequence
from typing import Final

from embedfarm.collector.manifest import OutputError
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.job_reports import NOT_NOW, ModelRefused
from embedfarm.contract.jobs import Job, JobTaken
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.scheduling_terms import LIMITS, Terms
from embedfarm.contract.status import Cause, JobStatus
from embedfarm.producer.readers import CorpusError
from embedfarm.workers.devices import DeviceError


class LimitReached(EmbedfarmError, RuntimeError):
    """Raised when a job on a private farm has taken as much as it may; it can go on with more."""

    exit_status = 4


# The same command would fail again.
FOR_GOOD: Final = (CorpusError, DeviceError, ModelRefused, JobTaken)
CAUSES: Final[Mapping[type[EmbedfarmError], Cause]] = {
    CorpusError: "corpus",
    DeviceError: "device",
    ModelRefused: "model",
    JobTaken: "job id",
    OutputError: "output",
}


def cause_of(failure: BaseException | None) -> Cause:
    """Return what a run's failure is about, as metrics count it."""
    for kind, cause in CAUSES.items():
        if isinstance(failure, kind):
            return cause
    return ""


def set_limits(handle: Job, terms: Terms) -> None:
    """Give a job the limits of the command that runs it, which may be others than those before."""
    status = handle.status()
    if any(getattr(status, name) != getattr(terms, name) for name in LIMITS):
        handle.set_terms(max_hours=terms.max_hours, max_cost=terms.max_cost)


def check_limits(handle: Job, status: JobStatus) -> None:
    """Give up when a job has paused itself, and what was in work then is embedded.

    Only who runs a private farm needs this: on a shared one somebody else may raise the limits.
    """
    if status.braked and not handle.stream.backlog()[1]:
        raise LimitReached(
            f"the job {status.braked} ({status.spent.words} so far); the same command with a "
            "higher limit, or without one, goes on from here"
        )


def check_refusals(job: str, reasons: Mapping[str, str], workers: Sequence[Heartbeat]) -> None:
    """Give up when every live worker refuses the job, and no reason is one that passes."""
    found = {reasons.get(beat.worker, "") if job in beat.refused else "" for beat in workers}
    if found and all(reason and not reason.startswith(NOT_NOW) for reason in found):
        raise ModelRefused("; ".join(sorted(found)))
