"""Vectors of a job on shared storage: read by their receipts, and deleted when nobody needs them.

An output that lists them leaves them where they are; any other takes them to its own disk.
"""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from embedfarm.collector.manifest import OutputError
from embedfarm.contract.broker import FIRST_PAUSE_SECONDS
from embedfarm.contract.records import Receipt, Result
from embedfarm.contract.stored_results import StoredFiles, checksum_of, is_left_over, is_name

READ_BYTES: Final = 8 << 20  # read at a time: those of the next results lie behind one another
LOOKS_MAX: Final = 5  # at a file that is not there, which another host may have seen already
LOOK_SECONDS: Final = 0.5
REMOVALS_MAX: Final = 10  # tries to delete what is left of a job, `LOOK_SECONDS` apart
PAUSE_SECONDS_MAX: Final = 5.0  # between two tries to read what a storage does not give

STORED_FILE: Final = ".embedfarm/stored"  # in an output directory, while it is unfinished

T = TypeVar("T")
log = logging.getLogger(__name__)


class RunPlace(msgspec.Struct, frozen=True):
    """Where a run of an output has stored vectors: a line of `STORED_FILE`.

    Attributes:
        place: Directory or URL.
        output: Absolute path that the output had then; "" in lines of earlier versions.
    """

    place: str
    output: str = ""


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
    _size: tuple[str, int] = ("", 0)  # of the file that was looked at last, in bytes
    _seen: set[str] = field(default_factory=set)  # files that a listing may not have yet
    _swept: int = -1

    def fill(self, result: Result) -> Result:
        """Return a result with its vectors beside the receipt, which says what they must be.

        A storage that gives no answer is waited for.

        Raises:
            VectorsLost: They are not there, or are others.
            OSError: The storage gives no answer, and `stop` was set.
        """
        receipt = self._note(result)
        if receipt is None:
            return result
        vectors = self._bytes(receipt)
        if len(vectors) != receipt.bytes or checksum_of(vectors) != receipt.checksum:
            self._read = "", 0, b""
            raise VectorsLost(f"{receipt.file} has other bytes than were stored")
        return msgspec.structs.replace(result, vectors=vectors)

    def take(self, result: Result) -> Result:
        """Return a result as it is, once its vectors are seen to be there; they are not read.

        A storage that gives no answer is waited for.

        Raises:
            VectorsLost: They are not there.
            OSError: The storage gives no answer, and `stop` was set.
        """
        receipt = self._note(result)
        if receipt is None or not receipt.bytes:
            return result
        if self._size[0] != receipt.file:
            size = self._wait_for(receipt.file, partial(self.files.size, receipt.file))
            self._size = receipt.file, size
        if self._size[1] < receipt.offset + receipt.bytes:
            self._size = "", 0
            raise VectorsLost(f"{receipt.file} is shorter than what was stored")
        return result

    def _note(self, result: Result) -> Receipt | None:
        """Return the receipt of a result, if it has one, and remember its file."""
        receipt = result.receipt
        if receipt is not None:
            if not is_name(receipt.file):
                raise VectorsLost(f"{receipt.file!r} is no name of stored vectors")
            self._seen.add(receipt.file)
        return receipt

    def _bytes(self, receipt: Receipt) -> bytes:
        """Return the bytes that a receipt names, from what was read ahead if they are there."""
        name, offset, data = self._read
        first = receipt.offset - offset
        if name != receipt.file or first < 0 or first + receipt.bytes > len(data):
            count = max(receipt.bytes, READ_BYTES)
            read = partial(self.files.read, receipt.file, receipt.offset, count)
            data = self._wait_for(receipt.file, read)
            self._read = receipt.file, receipt.offset, data
            first = 0
        return data[first : first + receipt.bytes]

    def _wait_for(self, name: str, ask: Callable[[], T]) -> T:
        """Return what a storage answers about a file, which it may take a while to do."""
        looks, pause, said = 0, FIRST_PAUSE_SECONDS, False
        while True:
            try:
                answer = ask()
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
                if self.stop.wait(pause):
                    raise OSError(f"{name} cannot be read: {error}") from error
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
            else:
                if said:
                    self.say("")
                return answer

    def sweep(self, upto: int, generation: Callable[[], str], listed: Collection[str] = ()) -> None:
        """Delete the files that nobody needs once all chunks below `upto` are on disk.

        Those of an earlier generation of the job go as well, but for what was collected of it and
        is not on disk. What cannot be deleted is tried again with the next part, and at the end.

        Args:
            upto: Index of the first chunk that is not on disk.
            generation: Returns the generation that the job has now.
            listed: Files that the output lists, which stay.
        """
        if upto <= self._swept:
            return
        try:
            found = {*self.files.names(), *self._seen}
        except Exception as error:  # noqa: BLE001 -- of a library; nothing is lost by it
            log.warning("stored vectors cannot be listed: %s", error)
            return
        of = generation()  # after the listing: what was found is of no later one
        gone = sorted(
            name
            for name in found.difference(listed)
            if is_left_over(name, upto, "" if name in self._seen else of)
        )
        try:
            self.files.delete(gone)
        except Exception as error:  # noqa: BLE001 -- as above
            log.warning("stored vectors that are on disk cannot be deleted: %s", error)
            return
        self._swept = upto
        self._seen.difference_update([name for name in found if is_left_over(name, upto, "")])


def known_places(out: Path) -> list[str]:
    """Return where the runs of an unfinished output have stored vectors, the last run last.

    Raises:
        OutputError: The file that says so is damaged.
    """
    return [each.place for each in run_places(out)]


def run_places(out: Path) -> list[RunPlace]:
    """Return where the runs of an unfinished output have stored vectors, the last run last.

    Raises:
        OutputError: The file that says so is damaged.
    """
    lines = list[bytes]()
    with suppress(FileNotFoundError, NotADirectoryError):
        lines = (out / STORED_FILE).read_bytes().splitlines()
    try:
        return [
            msgspec.json.decode(line, type=RunPlace)
            if line.startswith(b"{")
            else RunPlace(line.decode())  # an absolute path or a URL
            for line in lines
        ]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OutputError(f"{out / STORED_FILE} is damaged: {error}") from error


def remove_stored(files: StoredFiles, kept: Collection[str] = ()) -> bool:
    """Delete what is stored of a job that has ended, and tell whether that is done.

    Where the storage refuses for long, it stays.

    Args:
        files: The job's place.
        kept: Files that stay.
    """
    for tries_left in reversed(range(REMOVALS_MAX)):
        try:
            files.remove(kept)
        except Exception as error:  # noqa: BLE001 -- of a library; nothing is lost by it
            log.warning("stored vectors of a job that has ended cannot be deleted: %s", error)
            if tries_left and files.may_pass(error):
                threading.Event().wait(LOOK_SECONDS)
        else:
            return True
    return False
