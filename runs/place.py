"""Place of a run: where and by whom the work is done."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embedfarm.collector.output import Output
from embedfarm.contract.jobs import Job
from embedfarm.contract.settings import Settings


@dataclass(frozen=True)
class Place:
    """Where and by whom the work is done.

    Attributes:
        out: The output directory.
        settings: The farm's limits; an empty `redis_url` means a private farm.
        devices: Devices of a private farm, as the flag `--devices` names them.
        workers: CPU workers of a private farm, 0 for the default.
        job_id: Id of the job on the farm; "" for a new one.
        embed_changed: Whether to drop what is on disk from the first part on of which the corpus
            has other rows now.
        by_reference: Whether parts of the first output that is reused are taken as links to their
            files, where the corpus has the same rows.
        command: The command line, for people who want to do the same.
        after_part: Called when a part is on the disk, and holds the job back until it returns.
    """

    out: Path
    settings: Settings
    devices: str
    workers: int
    job_id: str = ""
    command: str = ""
    embed_changed: bool = False
    after_part: Callable[[Output, Job], object] = lambda _output, _job: None
    by_reference: bool = False
