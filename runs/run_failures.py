"""Failures that end a run for good, and what a job's record says of them."""

from collections.abc import Mapping, Sequence
from typing import Final

from embedfarm.collector.collect import JobCancelled
from embedfarm.collector.manifest import OutputError
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.job_reports import NOT_NOW, ModelRefused
from embedfarm.contract.jobs import JobTaken
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.status import Cause, EndState
from embedfarm.readers import CorpusError
from embedfarm.workers.devices import DeviceError


class Interrupted(EmbedfarmError, RuntimeError):
    """Raised when the run was stopped; the output can be resumed."""

    exit_status = 130


# The same command would fail again.
FOR_GOOD: Final = (CorpusError, DeviceError, ModelRefused, JobTaken)
CAUSES: Final[Mapping[type[EmbedfarmError], Cause]] = {
    CorpusError: "corpus",
    DeviceError: "device",
    ModelRefused: "model",
    JobTaken: "job id",
    OutputError: "output",
}


def ends_as(failure: BaseException | None) -> EndState | None:
    """Return the state in which a run's failure leaves its job; None where a run may go on."""
    if isinstance(failure, (*FOR_GOOD, OutputError)):
        return "failed"
    return "cancelled" if isinstance(failure, JobCancelled) else None


def cause_of(failure: BaseException | None) -> Cause:
    """Return what a run's failure is about, as metrics count it."""
    for kind, cause in CAUSES.items():
        if isinstance(failure, kind):
            return cause
    return ""


def check_refusals(job: str, reasons: Mapping[str, str], workers: Sequence[Heartbeat]) -> None:
    """Give up when every live worker refuses the job, and no reason is one that passes."""
    found = {reasons.get(beat.worker, "") if job in beat.refused else "" for beat in workers}
    if found and all(reason and not reason.startswith(NOT_NOW) for reason in found):
        raise ModelRefused("; ".join(sorted(found)))
