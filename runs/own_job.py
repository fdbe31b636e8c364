"""The job that fills an output: its name, and the word that shows the output to be its owner."""

import contextlib
import uuid
from pathlib import Path
from typing import Final, NamedTuple

from embedfarm.collector.manifest import OutputError
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobGone

JOB_ID_FILE: Final = ".embedfarm/job-id"  # in an output directory, while it is unfinished


class OwnJob(NamedTuple):
    """An output's record of its job: the job's id, and the word that proves the ownership.

    Attributes:
        name: Id of the job on the farm.
        owner: A random word, which the job is created with.
    """

    name: str
    owner: str


def read_own_job(out: Path) -> OwnJob | None:
    """Read the job that fills an output; None where there is none, or where its file was torn.

    An output that was begun by an older program has no owner's word yet.
    """
    with contextlib.suppress(FileNotFoundError):
        words = (out / JOB_ID_FILE).read_text(encoding="utf-8", errors="replace").split()
        if words:
            return OwnJob(words[0], words[1] if words[1:] else "")
    return None


def make_own_job(out: Path, name: str) -> OwnJob:
    """Return the job that fills an output, the same in every run; its file is on the disk then.

    Args:
        out: The output directory.
        name: Name of the job; "" for the one that fills the output, or else a random one.

    Raises:
        OutputError: A job of another name fills the output.
    """
    known = read_own_job(out)
    if known is not None and name not in {"", known.name}:
        raise OutputError(
            f"{out} is filled by job {known.name}, and not by {name}: leave --job-id away, or give "
            "it another directory"
        )
    if known is not None and known.owner:
        return known
    job = OwnJob(known.name if known else name or uuid.uuid4().hex, uuid.uuid4().hex)
    with replacing(out / JOB_ID_FILE) as file:
        file.write(f"{job.name} {job.owner}\n".encode())
    return job


def refuse_copy(farm: FarmClient, job: OwnJob, out: Path) -> None:
    """Refuse an output that is a copy of the one that the job fills.

    Raises:
        OutputError: The output is such a copy.
    """
    with contextlib.suppress(JobGone):
        original = Path(farm.job(job.name, job.owner).status().out or out)
        if not original.exists() or original.samefile(out) or read_own_job(original) != job:
            return
        raise OutputError(
            f"{out} is a copy of {original}, which job {job.name} fills; remove "
            f"{out / JOB_ID_FILE}, and the copy goes on with a job of its own"
        )
