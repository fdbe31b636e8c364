"""Lists of where the vectors of an output's parts are, on a storage from which none was copied."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Layout, Part
from embedfarm.collector.sinks.part_rows import PartError
from embedfarm.contract.stored_results import (
    StorageRefused,
    StoredFiles,
    check_place,
    checksum_of,
    is_name,
    open_place,
)

TRIES_MAX: Final = 6  # to ask a storage, `PAUSE_SECONDS` apart
PAUSE_SECONDS: Final = 0.5
READ_BYTES: Final = 8 << 20  # of pieces that lie behind one another, read at a time

T = TypeVar("T")
log = logging.getLogger(__name__)


class Piece(msgspec.Struct, frozen=True):
    """Vectors of consecutive chunks, one behind the other in a file on the storage.

    Attributes:
        start: Index of the first chunk.
        count: Number of chunks; the row of one that failed means nothing.
        file: Name of the file in the place.
        offset: Bytes of the file that come before them.
        checksum: CRC-32 of their bytes.
    """

    start: int
    count: int
    file: str
    offset: int
    checksum: int

    @property
    def end(self) -> int:
        """Index after the last chunk."""
        return self.start + self.count


class Listing(msgspec.Struct, frozen=True):
    """Where the vectors of a part are: the content of its file.

    Attributes:
        place: Directory or URL that the files are in.
        pieces: Where the vectors are, in the order of their chunks; a chunk that is in none failed.
        failed: Indices of the chunks that failed, in order.
        ids: The id of each chunk of the part, or None.
    """

    place: str
    pieces: list[Piece]
    failed: list[int]
    ids: list[str] | None = None


def read_listing(directory: Path, part: Part) -> Listing:
    """Read where the vectors of a part are.

    Raises:
        PartError: Its file is not one that `StoredParts` wrote.
        OSError: Its file cannot be read.
    """
    try:
        listing = msgspec.json.decode((directory / part.file).read_bytes(), type=Listing)
        check_place(listing.place, [listing.place])
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageRefused) as error:
        raise PartError(f"is no list of stored vectors as it was written: {error}") from error
    for piece in listing.pieces:
        if not is_name(piece.file):
            raise PartError(f"lists {piece.file!r}, which is no file of stored vectors")
    return listing


def listed_files(directory: Path, parts: Iterable[Part]) -> Mapping[str, set[str]]:
    """Return the names of the files that parts list, by the place that they are in.

    Raises:
        PartError, OSError: A part cannot be read.
    """
    names: defaultdict[str, set[str]] = defaultdict(set)
    for part in parts:
        listing = read_listing(directory, part)
        names[listing.place].update(piece.file for piece in listing.pieces)
    return names


def read_vectors(listing: Listing, start: int, end: int, layout: Layout) -> NDArray[Any]:
    """Read the vectors of chunks `start` to `end - 1` of a part from where they are stored.

    Returns:
        Vectors, shape (end - start, dimensions); the rows of failed chunks mean nothing.

    Raises:
        PartError: A file is gone, or has other bytes than were stored.
        OSError: The storage gives no answer.
    """
    matrix = np.zeros((end - start, layout.dimensions), layout.dtype)
    wanted = [piece for piece in listing.pieces if piece.end > start and piece.start < end]
    for run in _runs(wanted, layout.row_bytes):
        data = memoryview(_read_run(listing.place, run, layout.row_bytes))
        for piece in run:
            first = piece.offset - run[0].offset
            own = data[first : first + piece.count * layout.row_bytes]
            if checksum_of(own) != piece.checksum:
                raise PartError(
                    f"{piece.file} in {listing.place} has other bytes for chunks {piece.start} to "
                    f"{piece.end - 1} than were stored"
                )
            rows = np.frombuffer(own, layout.dtype).reshape(piece.count, layout.dimensions)
            low, high = max(piece.start, start), min(piece.end, end)
            matrix[low - start : high - start] = rows[low - piece.start : high - piece.start]
    return matrix


def _read_run(place: str, run: Sequence[Piece], row_bytes: int) -> bytes:
    """Return the bytes of pieces that lie behind one another in a file."""
    size = sum(piece.count for piece in run) * row_bytes
    first = run[0]
    data = ask(place, lambda files: files.read(first.file, first.offset, size))
    if len(data) != size:
        raise PartError(f"{first.file} in {place} is shorter than what was stored")
    return data


def _runs(pieces: Iterable[Piece], row_bytes: int) -> Iterator[list[Piece]]:
    """Yield pieces that lie behind one another in a file, about `READ_BYTES` of them at a time."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        follows = run and (piece.file, piece.offset) == (run[0].file, run[0].offset + size)
        if run and not (follows and size < READ_BYTES):
            yield run
            run, size = [], 0
        run.append(piece)
        size += piece.count * row_bytes
    if run:
        yield run


def ask(place: str, question: Callable[[StoredFiles], T]) -> T:
    """Return what the files of a place say to a question, which may be asked a few times.

    Raises:
        PartError: A file is gone, or there is no library for the place.
        OSError: The storage refuses, or gives no answer.
    """
    try:
        files = open_place(place)
    except StorageRefused as error:
        raise PartError(str(error)) from error
    tries_left = TRIES_MAX
    while True:
        tries_left -= 1
        try:
            return question(files)
        except FileNotFoundError as error:
            raise PartError(f"vectors that are stored in {place} are gone: {error}") from error
        except Exception as error:  # of a library, of any type
            if not (tries_left and files.may_pass(error)):
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{place}: {error}") from error
            log.warning("%s gives no answer, trying again: %s", place, error)
        threading.Event().wait(PAUSE_SECONDS)
