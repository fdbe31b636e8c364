"""The model that an output is made with: kept with it, and known to every server it meets."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from embedfarm.collector.durable_files import replacing
from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobGone
from embedfarm.runs.own_job import OwnJob

FINGERPRINT_FILE: Final = "fingerprint.json"


@dataclass
class Fingerprint:
    """Fingerprint of the model that one output is made with.

    Attributes:
        out: The output directory.
        known: The fingerprint by component; empty while the workers have not agreed.
    """

    out: Path
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file that keeps it, while the output is not finished."""
        return self.out / STATE_DIRECTORY / FINGERPRINT_FILE

    def read(self) -> Mapping[str, str]:
        """Return the fingerprint that earlier runs have kept; empty before any has."""
        if not self.path.exists():
            return {}
        kept: dict[str, str] = json.loads(self.path.read_text(encoding="utf-8"))
        return kept

    def recall(self, farm: FarmClient, job: OwnJob, make_again: Callable[[], object]) -> None:
        """Hold the workers to the model that earlier runs of this output used.

        Args:
            farm: Farm of the workers.
            job: The job that they work on.
            make_again: Makes the job once more, if the server has lost it since it was made.

        Raises:
            ModelRefused: The workers use another model.
        """
        self.known = self.read()
        while self.known:
            try:
                farm.reports.agree(job.name, self.known, job.owner)
            except JobGone:
                make_again()
            else:
                return

    def learn(self, farm: FarmClient, job: OwnJob) -> bool:
        """See which model the workers agreed on; remind a server that has lost it.

        Returns:
            Whether that is known.

        Raises:
            ModelRefused: The server has lost the model, and heard of another one since.
        """
        if self.known:
            with contextlib.suppress(JobGone):
                farm.reports.agree(job.name, self.known, job.owner)
        else:
            self.known = farm.reports.fingerprint(job.name, job.owner)
        return bool(self.known)

    def settle(self, farm: FarmClient, job: OwnJob) -> bool:
        """Learn the model, and keep it on the disk, durably, for runs that find another server.

        No vector may be there without: a run that finds all of them makes none, and so meets no
        worker that knows.

        Returns:
            Whether the model is known.

        Raises:
            ModelRefused: The server has lost the model, and heard of another one since.
            OSError: The disk refused.
        """
        if self.learn(farm, job) and not self.path.exists():
            hold_to(self.out, self.known)
        return bool(self.known)


def hold_to(out: Path, fingerprint: Mapping[str, str]) -> None:
    """Hold the workers of a new output to the model that others were made with."""
    path = Fingerprint(out).path
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(dict(fingerprint)).encode())
