"""The scene that all users of a run share: the world, the server, and the state of its jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from embedfarm.collector.manifest import MANIFEST_FILE, Manifest, read_manifest
from embedfarm.contract.settings import Settings
from tests.simulation.judge import Stored, read_output
from tests.simulation.link import Host
from tests.simulation.shelf import Shelf
from tests.simulation.storage import ROOT, Storage
from tests.simulation.world import World

STORED_SHARE: Final = 0.8  # of jobs, in runs with a storage
REFERRING_SHARE: Final = 0.8  # of jobs, in runs whose workers read texts


class FinishedOutput(NamedTuple):
    """An output that was finished.

    Attributes:
        directory: Its directory.
        model: Name of the model that made it.
        texts: Texts that it has, with those that failed.
        deadly: Texts among them that nobody can embed.
    """

    directory: Path
    model: str
    texts: Sequence[str]
    deadly: frozenset[str]


@dataclass
class Scene:
    """A run as its users know it.

    Attributes:
        directory: The directory of the corpora.
        outputs: A directory on the simulated disk, for outputs.
        say: Called with each line of the log.
        speed: Tokens per second of a device.
        lively: Whether users do more than run one command after the other.
        shelf: The models that jobs are for, None where there is only one.
        storage: Where jobs may have their vectors stored, None where they go through the server.
        refers: Decides which jobs have their texts read by workers, None where blocks have them.
        ids: Ids of all jobs that there ever were.
        steered: Jobs that somebody has cancelled or deleted.
        finished: Outputs that were finished, for others to take their vectors.
        listed: Manifests of finished outputs that list what the storage has, by directory.
        reacted_at: Virtual seconds at which a user did last what the end of a command asked for.
        errors: Errors that should not have happened.
        chunks: Chunks in the jobs that were finished.
        failed: Chunks of finished jobs that were given up on.
        harmless: Chunks that were given up on though their texts do no harm.
    """

    world: World
    host: Host
    settings: Settings
    directory: Path
    outputs: Path
    say: Callable[[str], None]
    speed: int
    lively: bool
    shelf: Shelf | None = None
    storage: Storage | None = None
    refers: Random | None = None
    ids: list[str] = field(default_factory=list)
    steered: set[str] = field(default_factory=set)
    finished: list[FinishedOutput] = field(default_factory=list)
    listed: dict[Path, Manifest] = field(default_factory=dict)
    reacted_at: float = 0.0
    errors: list[BaseException] = field(default_factory=list)
    chunks: int = 0
    failed: int = 0
    harmless: int = 0

    def choose_place(self) -> str:
        """Choose where the vectors of a job are stored, "" for the server."""
        if self.storage is None or self.storage.random.random() > STORED_SHARE:
            return ""
        return ROOT

    def read(self, out: Path, manifest: Manifest) -> Stored:
        """Read all of a finished output; what it lists has to be there as long as it is."""
        if self.storage is None:
            return read_output(out, manifest)
        if manifest.format == "stored":
            self.listed[out] = manifest
        return read_output(out, manifest, self.storage.objects)

    def read_listed(self) -> None:
        """Read once more what outputs list that are there as they were.

        Raises:
            Failure: It is gone, or has changed.
        """
        for out, manifest in self.listed.items():
            if (out / MANIFEST_FILE).exists() and read_manifest(out) == manifest:
                self.read(out, manifest)

    def choose_texts(self) -> str:
        """Choose where workers take the texts of a job from."""
        refers = self.refers is not None and self.refers.random() < REFERRING_SHARE
        return "source" if refers else "blocks"

    def fail(self, error: BaseException) -> None:
        """Note an error that should not have happened; the run ends by it."""
        self.errors.append(error)
        self.world.stirred = True
