"""Third stage, for jobs whose vectors are stored past the server: files first, then receipts."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.broker import FIRST_PAUSE_SECONDS, PAUSE_SECONDS_MAX
from embedfarm.contract.records import Receipt
from embedfarm.contract.stored_results import StoredFiles, checksum_of, make_name, open_place
from embedfarm.workers.leases import JobPart

PLACES_MAX: Final = 64  # that are kept open

log = logging.getLogger(__name__)


class StorageGone(Exception):
    """Raised when a place cannot be written in, which waiting does not change."""


class PartFile(NamedTuple):
    """A file with the vectors of one job in a micro-batch.

    Attributes:
        files: The place that it is in.
        name: Its name there.
        first: Row of the micro-batch that it begins with.
        vectors: Its vectors, shape (n, width).
    """

    files: StoredFiles
    name: str
    first: int
    vectors: NDArray[Any]

    def receipt(self, rows: slice) -> Receipt:
        """Return the receipt for some rows of the micro-batch."""
        own = self.vectors[rows.start - self.first : rows.stop - self.first]
        return Receipt(
            file=self.name,
            offset=(rows.start - self.first) * self.vectors.strides[0],
            bytes=own.nbytes,
            checksum=checksum_of(own.data if own.size else b""),
        )


@dataclass
class ResultStorage:
    """Stores the vectors of micro-batches, and takes back what came too late.

    Attributes:
        stop: Event that ends all waiting.
        say: Notes with a job why it waits; "" for nothing.
    """

    stop: threading.Event
    say: Callable[[str, str], object]
    _places: dict[str, StoredFiles] = field(default_factory=dict)

    def put(self, part: JobPart, vectors: NDArray[Any]) -> PartFile | None:
        """Store the vectors of a job in a micro-batch; they are on the storage then.

        What does not take them for a while is waited for: a full disk, a store that is away.

        Args:
            part: The job's part of the micro-batch, of which leases are held.
            vectors: Vectors of all texts of the micro-batch as they are stored, shape (n, width).

        Returns:
            The file; None where all leases were lost meanwhile, or `stop` was set.

        Raises:
            StorageGone: The place is not there, or refuses for good.
        """
        own = np.ascontiguousarray(vectors[part.texts])
        starts = min(lease.block.start for lease in part.leases)
        ends = max(lease.block.end for lease in part.leases)
        name = make_name(part.making[1], starts, ends)
        files = self._open(part.leases[0].stored)
        pause, waits = FIRST_PAUSE_SECONDS, False
        while not part.lost:
            try:
                files.put(name, own.data if own.size else b"")
            except Exception as error:
                if not files.may_pass(error):
                    raise StorageGone(f"{type(error).__name__}: {error}") from error
                log.warning("vectors of job %s not stored, trying again: %s", part.job, error)
                self.say(part.job, f"waits for its storage: {error}")
                waits = True
                if self.stop.wait(pause):
                    break
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            if waits:
                self.say(part.job, "")
            return PartFile(files, name, part.texts.start, own)
        return None

    def take_back(self, file: PartFile) -> None:
        """Delete a file of which no receipt was kept."""
        try:
            file.files.delete([file.name])
        except Exception as error:  # noqa: BLE001 -- of a library; whoever collects deletes it
            log.warning("a file of vectors that nobody needs stays for now: %s", error)

    def _open(self, place: str) -> StoredFiles:
        files = self._places.pop(place, None) or open_place(place)
        self._places[place] = files
        while len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]
        return files
