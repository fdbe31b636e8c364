"""What a job may take, and what it was estimated to take, as the command that runs it knows it."""

from pathlib import Path
from typing import Any, Final

import msgspec

from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.jobs import Job
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.scheduling_terms import LIMITS
from embedfarm.contract.spending import Estimate
from embedfarm.contract.status import JobStatus
from embedfarm.producer.submitter import Submitter
from embedfarm.runs.request import Request

ESTIMATE_FILE: Final = "estimate.json"


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


class KeptEstimate(msgspec.Struct):
    """What `embed --plan` leaves beside an output for the run: the estimate, and of what it is."""

    of: dict[str, Any]
    estimate: Estimate


def keep_estimate(out: Path, request: Request, estimate: Estimate) -> None:
    """Keep an estimate beside an output that is not finished, until it is."""
    make_private(out / STATE_DIRECTORY)
    with replacing(out / STATE_DIRECTORY / ESTIMATE_FILE) as file:
        file.write(msgspec.json.encode(KeptEstimate(request.identity(), estimate)))


def read_estimate(out: Path, request: Request) -> Estimate:
    """Return the estimate of a request that was kept; none of it for another request's."""
    try:
        data = (out / STATE_DIRECTORY / ESTIMATE_FILE).read_bytes()
        kept = msgspec.json.decode(data, type=KeptEstimate)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # it is for people only
        return Estimate()
    same = msgspec.json.decode(msgspec.json.encode(request.identity()))
    return kept.estimate if kept.of == same else Estimate()
