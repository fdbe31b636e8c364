"""The model that an output is made with: kept with it, and known to every server it meets."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.collector.manifest import STATE_DIRECTORY, Manifest, OutputError
from embedfarm.contract import model_files
from embedfarm.contract.canaries import Canaries
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JOB_FIELDS, JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.runs.own_job import OwnJob

FINGERPRINT_FILE: Final = "fingerprint.json"
CANARIES_FILE: Final = "canaries.json"


@dataclass
class Fingerprint:
    """Fingerprint of the model that one output is made with.

    Attributes:
        out: The output directory.
        known: The fingerprint by component; empty while the workers have not agreed.
        canaries: The canaries that the workers agreed on; None while they have not.
    """

    out: Path
    known: Mapping[str, str] = field(default_factory=dict)
    canaries: Canaries | None = None

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

    def read_canaries(self) -> Canaries | None:
        """Return the canaries that earlier runs have kept; None before any has."""
        path = self.path.with_name(CANARIES_FILE)
        return msgspec.json.decode(path.read_bytes(), type=Canaries) if path.exists() else None

    def recall(self, farm: FarmClient, job: OwnJob, make_again: Callable[[], object]) -> None:
        """Hold the workers to the model that earlier runs of this output used.

        Args:
            farm: Farm of the workers.
            job: The job that they work on.
            make_again: Makes the job once more, if the server has lost it since it was made.

        Raises:
            ModelRefused: The workers use another model.
        """
        self.known, self.canaries = self.read(), self.read_canaries()
        while self.known:
            try:
                self._remind(farm, job)
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
                self._remind(farm, job)
        else:
            self.known = farm.reports.fingerprint(job.name, job.owner)
        if self.canaries is None:
            self.canaries = farm.reports.canaries(job.name, job.owner)
        return bool(self.known)

    def _remind(self, farm: FarmClient, job: OwnJob) -> None:
        """Tell the server again what is known.

        Raises:
            ModelRefused: The server has heard of another model.
            JobGone: It has no such job.
        """
        farm.reports.agree(job.name, self.known, job.owner)
        if self.canaries is not None:
            dtype = self.known.get("dtype", "")
            found = farm.reports.agree_on_canaries([(*job,)], self.canaries, dtype)
            for difference, _digest in found.values():
                if difference:
                    words = f"the workers make other vectors than before: {difference}"
                    raise ModelRefused(words)

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
        if self.learn(farm, job):
            hold_to(self.out, self.known, self.canaries)
        return bool(self.known)


def hold_to(out: Path, fingerprint: Mapping[str, str], canaries: Canaries | None) -> None:
    """Hold the workers of an output to the model that it, or another one, was made with."""
    path = Fingerprint(out).path
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {} if canaries is None else {CANARIES_FILE: msgspec.json.encode(canaries)}
    kept[FINGERPRINT_FILE] = json.dumps(dict(fingerprint)).encode()
    for name, data in kept.items():
        if not path.with_name(name).exists():
            with replacing(path.with_name(name)) as file:
                file.write(data)


def check_files(out: Path, manifest: Manifest, spec: JobSpec, settings: Settings) -> None:
    """Compare the files that a model has now with those that a finished output was made from.

    Nothing is compared where workers may read others: a farm's have a hub's model each for itself.
    What an earlier version did not count is "" in the manifest.

    Raises:
        OutputError: The files have changed since.
        ModelError: The files are not what they should be.
    """
    shared = not settings.redis_url or os.path.isdir(spec.model)  # noqa: PTH112 # Path raises
    own = spec.engine in JOB_FIELDS["engine"].choices  # others say themselves what they load
    files = model_files.find_local(spec.model, settings.model_cache) if shared and own else None
    known = manifest.fingerprint
    if files is None or not known.get("weights"):
        return
    differing = [
        name
        for name, digest in model_files.file_components(files).items()
        if known.get(name) and known[name] != digest
    ]
    if differing:
        raise OutputError(
            f"{out} is finished, and the files of {spec.model} have changed since "
            f"({', '.join(differing)}): embed with it into another directory (--out), or restore "
            "them"
        )
