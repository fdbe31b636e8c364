"""Vectors of a job that lie on shared storage: read by their receipts, and deleted when on disk."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from embedfarm.collector.manifest import OutputError
from embedfarm.contract.records import Receipt, Result
from embedfarm.contract.stored_results import StoredFiles, checksum_of, is_left_over, is_name

READ_BYTES: Final = 8 << 20  # read at a time: those of the next results lie behind one another
LOOKS_MAX: Final = 5  # at a file that is not there, which another host may have seen already
LOOK_SECONDS: Final = 0.5
REMOVALS_MAX: Final = 10  # tries to delete what is left of a job, `LOOK_SECONDS` apart
PAUSE_SECONDS: Final = 5.0  # between two tries to read what a storage does not give

log = logging.getLogger(__name__)


class VectorsLost(OutputError):
    """Raised when stored vectors are not there, or are others than were stored."""


@dataclass
class StoredVectors:
    """The stored vectors of one job, for the one who collects it.

    Attributes:
        files: The job's place.
        stop: Event that ends all waiting.
        say: Notes with the job what it waits for; "" for nothing.
    """

    files: StoredFiles
    stop: threading.Event
    say: Callable[[str], object]
    _read: tuple[str, int, bytes] = ("", 0, b"")  # file, offset and bytes that were read last
    _seen: set[str] = field(default_factory=set)  # files that a listing may not have yet
    _swept: int = -1

    def fill(self, result: Result) -> Result:
        """Return a result with its vectors beside the receipt, which says what they must be.

        A storage that gives no answer is waited for.

        Raises:
            VectorsLost: They are not there, or are others.
            OSError: The storage gives no answer, and `stop` was set.
        """
        receipt = result.receipt
        if receipt is None:
            return result
        if not is_name(receipt.file):
            raise VectorsLost(f"{receipt.file!r} is no name of stored vectors")
        self._seen.add(receipt.file)
        vectors = self._bytes(receipt)
        if len(vectors) != receipt.bytes or checksum_of(vectors) != receipt.checksum:
            self._read = "", 0, b""
            raise VectorsLost(f"{receipt.file} has other bytes than were stored")
        return msgspec.structs.replace(result, vectors=vectors)

    def _bytes(self, receipt: Receipt) -> bytes:
        """Return the bytes that a receipt names, from what was read ahead if they are there."""
        name, offset, data = self._read
        first = receipt.offset - offset
        if name != receipt.file or first < 0 or first + receipt.bytes > len(data):
            count = max(receipt.bytes, READ_BYTES)
            data = self._wait_for(receipt.file, receipt.offset, count)
            self._read = receipt.file, receipt.offset, data
            first = 0
        return data[first : first + receipt.bytes]

    def _wait_for(self, name: str, offset: int, count: int) -> bytes:
        """Read bytes of a file; wait for a storage that does not answer."""
        looks, said = 0, False
        while True:
            try:
                data = self.files.read(name, offset, count)
            except FileNotFoundError as error:
                looks += 1
                if looks >= LOOKS_MAX:
                    raise VectorsLost(f"{name} is not there") from error
                if self.stop.wait(LOOK_SECONDS):
                    raise
            except Exception as error:
                if not self.files.may_pass(error):
                    raise VectorsLost(f"{name} cannot be read: {error}") from error
                log.warning("stored vectors cannot be read, trying again: %s", error)
                self.say(f"waits for its storage: {error}")
                said = True
                if self.stop.wait(PAUSE_SECONDS):
                    raise OSError(f"{name} cannot be read: {error}") from error
            else:
                if said:
                    self.say("")
                return data

    def sweep(self, upto: int, generation: Callable[[], str]) -> None:
        """Delete the files that nobody needs once all chunks below `upto` are on disk.

        Those of an earlier generation of the job go as well: nothing of it is collected any more.
        What cannot be deleted is tried again with the next part, and at the end of the job.

        Args:
            upto: Index of the first chunk that is not on disk.
            generation: Returns the generation that the job has now.
        """
        if upto <= self._swept:
            return
        try:
            found = {*self.files.names(), *self._seen}
        except Exception as error:  # noqa: BLE001 -- of a library; nothing is lost by it
            log.warning("stored vectors cannot be listed: %s", error)
            return
        of = generation()  # after the listing: what was found is of no later one
        gone = sorted(name for name in found if is_left_over(name, upto, of))
        try:
            self.files.delete(gone)
        except Exception as error:  # noqa: BLE001 -- as above
            log.warning("stored vectors that are on disk cannot be deleted: %s", error)
            return
        self._swept = upto
        self._seen.difference_update(gone)


def remove_stored(files: StoredFiles) -> None:
    """Delete all that is stored of a job that has ended; give up where that is refused for long."""
    for tries_left in reversed(range(REMOVALS_MAX)):
        try:
            return files.remove()
        except Exception as error:  # noqa: BLE001 -- of a library; nothing is lost by it
            log.warning("stored vectors of a job that has ended cannot be deleted: %s", error)
            if tries_left and files.may_pass(error):
                threading.Event().wait(LOOK_SECONDS)
    return None
