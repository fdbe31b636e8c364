"""Where the vectors of a run are stored past the server, and what becomes of them at its end."""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.collector.manifest import OutputError, Part, read_manifest
from embedfarm.collector.output_directory import State, read_request, read_state
from embedfarm.collector.output_reader import read_parts
from embedfarm.collector.sinks import lists_stored
from embedfarm.collector.sinks.stored_listing import listed_files
from embedfarm.collector.stored_vectors import (
    STORED_FILE,
    RunPlace,
    StoredVectors,
    known_places,
    remove_stored,
    run_places,
)
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.durable_files import replacing
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job, identities
from embedfarm.contract.settings import Settings
from embedfarm.contract.stored_results import StorageRefused, open_place, place_below
from embedfarm.runs.own_job import JOB_ID_FILE, OwnJob

OWNER_CHARACTERS: Final = 16  # of a digest

log = logging.getLogger(__name__)


@dataclass
class RunStorage:
    """The directory in which the vectors of one run are stored; nothing where it has no place.

    Attributes:
        out: The output directory, which remembers the directories of all runs.
        place: Directory or URL below which it is; "" where vectors go through the server.
        sink: Format of the output.
        directory: The place of the directory, once it is known.
    """

    out: Path
    place: str
    sink: str
    directory: str = ""

    def __post_init__(self) -> None:
        check_stored(self.sink, self.place)

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

        A copy of an output has the original's memory. What the original still needs, the copy
        forgets, and neither stores more there nor deletes it.

        Raises:
            StorageRefused: There is no library for its URL.
            OutputError: The output is a copy, and would go on with the original's directory, or
                lists what is there.
            OSError: The disk refuses.
        """
        if not self.directory:
            return
        known = run_places(self.out)
        originals = {each.place: found for each in known if (found := _original(each, self.out))}
        if self.directory in originals or (originals and lists_stored(self.sink)):
            place, original = next(iter(originals.items()))
            way = f"remove {self.out / JOB_ID_FILE}, and the copy goes on with a job of its own"
            if lists_stored(self.sink):
                way = "embed into another directory (--out)"
            raise OutputError(
                f"{self.out} is a copy of {original}, whose vectors are in {place}: {way}"
            )
        gone = {self.directory, *originals}
        here = RunPlace(self.directory, str(self.out.resolve()))
        wanted = [*(each for each in known if each.place not in gone), here]
        if known != wanted:
            with replacing(self.out / STORED_FILE) as file:
                file.writelines(msgspec.json.encode(each) + b"\n" for each in wanted)
        open_place(self.directory).make()

    def vectors(self, job: Job, stop: threading.Event) -> StoredVectors | None:
        """Return the stored vectors of a job, for the one who collects it; None for no place."""

        def say(reason: str) -> None:
            with contextlib.suppress(*UNAVAILABLE):
                job.note("reason", reason)

        return StoredVectors(open_place(self.directory), stop, say) if self.directory else None


def check_stored(sink: str, place: str) -> None:
    """Refuse a format that lists stored vectors for a job whose vectors are stored nowhere.

    Raises:
        StorageRefused: It is such a format.
    """
    if lists_stored(sink) and not place:
        raise StorageRefused(
            f"format {sink} lists where vectors are stored past the server: say where (--stored)"
        )


def _original(known: RunPlace, out: Path) -> Path | None:
    """Return the other output that had stored vectors in a place, and needs them still."""
    original = Path(known.output or out)
    if not original.exists() or original.samefile(out):
        return None
    try:
        needed = {*known_places(original), *_listed_by(original)}
    except (OutputError, OSError) as error:
        log.warning("%s: what it needs of stored vectors is not known: %s", original, error)
        return original
    return original if known.place in needed else None


def end_storing(out: Path) -> None:
    """Delete the vectors that were stored for an output whose job has ended, and it does not list.

    Where it cannot be known what it lists, nothing is deleted.
    """
    try:
        places = known_places(out)
        listed = _listed_by(out) if places else {}
    except (OutputError, OSError) as error:
        log.warning("%s: nothing that was stored for it is deleted: %s", out, error)
        return
    for place in places:
        _remove(place, listed.get(place, ()))


def discard_stored(out: Path) -> bool:
    """Delete all vectors that were stored for an output, also what it lists; tell if that is done.

    What a damaged output lists is not found, and stays.
    """
    places = dict[str, None]()
    try:
        places |= dict.fromkeys(known_places(out))
        places |= dict.fromkeys(_listed_by(out))
    except (OutputError, OSError) as error:
        log.warning("%s: what it lists of stored vectors stays: %s", out, error)
    left = [place for place in places if not _remove(place, ())]
    return not left


def _remove(place: str, kept: Collection[str]) -> bool:
    """Delete what is stored in a place, but for some files; tell whether that is done."""
    try:
        return remove_stored(open_place(place), kept)
    except StorageRefused as error:
        log.warning("stored vectors cannot be deleted: %s", error)
    return False


def _listed_by(out: Path) -> Mapping[str, Collection[str]]:
    """Return the names of the stored files that an output lists, by their place."""
    sink, parts = "", list[Part]()
    match read_state(out):
        case State.FINISHED:
            manifest = read_manifest(out)
            sink, parts = manifest.format, manifest.parts
        case State.UNFINISHED:
            sink, parts = str(read_request(out).get("format")), read_parts(out)
        case State.NEW:
            pass
    return listed_files(out, parts) if sink and lists_stored(sink) else {}
