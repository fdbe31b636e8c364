"""Terms of a job as flags, and as people read them."""

import time
from typing import Annotated, Final, Literal

import typer

from embedfarm.cli.options import USAGE, fail
from embedfarm.contract.formatting import format_seconds, moment_of
from embedfarm.contract.scheduling_terms import PRIORITIES, WEIGHT_MAX, Terms, read_deadline

PASSED: Final = "passed"
TOO_LITTLE: Final = "too little"  # how much less time is left than the job needs

PriorityName = Literal["normal", "high", "urgent"]
Priority = Annotated[PriorityName, typer.Option(help="Priority over other jobs.")]
Tenant = Annotated[
    str,
    typer.Option(
        help="Tenant that the job is done for; tenants share the farm, equally or by weight."
    ),
]
Weight = Annotated[
    int, typer.Option(min=1, max=WEIGHT_MAX, help="Weight beside the tenant's other jobs.")
]
Deadline = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Deadline: ISO 8601, or a duration such as 2h or 90m; none for no deadline.",
    ),
]

Labels = Annotated[
    str,
    typer.Option(metavar="WORDS", help="Labels to find the job by, with commas between."),
]
MaxHours = Annotated[
    float,
    typer.Option(min=0, help="Device-hours after which the job pauses itself; 0: any number."),
]
MaxCost = Annotated[
    float,
    typer.Option(min=0, help="Cost at which it does, by workers' device_cost_per_hour; 0: any."),
]


def read_terms(  # noqa: PLR0913, PLR0917 -- each is a flag
    priority: PriorityName,
    tenant: str,
    weight: int,
    deadline: str,
    labels: str,
    max_hours: float = 0.0,
    max_cost: float = 0.0,
) -> Terms:
    """Read terms out of flags; wrong ones end the program."""
    try:
        at = read_deadline(deadline)
        return Terms(PRIORITIES[priority], tenant, weight, at, labels, max_hours, max_cost)
    except ValueError as error:
        fail(str(error), USAGE)


def describe_left(deadline_ms: int, late_seconds: float = 0.0) -> str:
    """Describe the time left until a deadline, and by how much it is too little.

    The answer is `PASSED` after the deadline, and "" where there is none.
    """
    if not deadline_ms:
        return ""
    left = deadline_ms / 1000 - time.time()
    if left <= 0:
        return PASSED
    late = f", {format_seconds(late_seconds)} {TOO_LITTLE}" if late_seconds >= 1 else ""
    return format_seconds(left) + late


def describe_deadline(deadline_ms: int, late_seconds: float = 0.0) -> str:
    """Describe a deadline on the local clock, and the time that is left."""
    moment = moment_of(deadline_ms / 1000).astimezone()
    left = describe_left(deadline_ms, late_seconds)
    return f"{moment.isoformat(sep=' ', timespec='seconds')} ({left})"
