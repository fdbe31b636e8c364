"""Where the vectors of a run are stored past the server until they are collected."""

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embedfarm.collector.stored_vectors import StoredVectors, remove_stored
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job, identities
from embedfarm.contract.settings import Settings
from embedfarm.contract.stored_results import open_place, place_below
from embedfarm.runs.own_job import OwnJob

STORED_FILE: Final = ".embedfarm/stored"  # in an output directory, while it is unfinished
OWNER_CHARACTERS: Final = 16  # of a digest


@dataclass
class RunStorage:
    """The directory in which the vectors of one run are stored; nothing where it has no place.

    Attributes:
        out: The output directory, which remembers the directories of all runs.
        place: Directory or URL below which it is; "" where vectors go through the server.
        directory: The place of the directory, once it is known.
    """

    out: Path
    place: str
    directory: str = ""

    def rooted(self, settings: Settings) -> Settings:
        """Return settings for a private farm, which may store vectors where its command says."""
        if not self.place:
            return settings
        roots = (*settings.stored_roots, place_below(self.place, ""))
        return settings.model_copy(update={"stored_roots": roots})

    def find(self, farm: FarmClient, own: OwnJob) -> None:
        """Find out which directory a job has, which nobody else uses.

        Jobs of the same name on other farms may be stored in the same place, so that a digest of
        the owner's word is in its name. A job that came by HTTP had no owner when it was made, and
        a random id.

        Raises:
            StorageRefused: The place has secrets.
            redis.ConnectionError: The server is away.
        """
        if not self.place:
            return
        known = identities(farm.client, [own.name])
        there = known[own.name][0].stored if own.name in known else ""
        by_id = place_below(self.place, own.name)
        owner = hashlib.sha256(own.owner.encode()).hexdigest()[:OWNER_CHARACTERS]
        self.directory = there if there == by_id else f"{by_id}-{owner}"

    def make(self) -> None:
        """Make the directory, once the output remembers to delete it.

        Raises:
            StorageRefused: There is no library for its URL.
            OSError: The disk refuses.
        """
        if not self.directory:
            return
        known = _known(self.out)
        if self.directory not in known:
            with replacing(self.out / STORED_FILE) as file:
                file.writelines(f"{each}\n".encode() for each in (*known, self.directory))
        open_place(self.directory).make()

    def vectors(self, job: Job, stop: threading.Event) -> StoredVectors | None:
        """Return the stored vectors of a job, for the one who collects it; None for no place."""

        def say(reason: str) -> None:
            with contextlib.suppress(*UNAVAILABLE):
                job.note("reason", reason)

        return StoredVectors(open_place(self.directory), stop, say) if self.directory else None


def end_storing(out: Path) -> None:
    """Delete all vectors that were stored for an output whose job has ended."""
    for place in _known(out):
        remove_stored(open_place(place))


def _known(out: Path) -> list[str]:
    """Return the places where earlier runs of an output have stored vectors."""
    with contextlib.suppress(FileNotFoundError):
        return (out / STORED_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    return []
