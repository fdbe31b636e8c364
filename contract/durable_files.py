"""Files that survive a crash: whole or absent, and on the disk before anyone is told."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMPORARY_SUFFIX: Final = ".embedfarm.tmp"
_PIECE_BYTES: Final = 1 << 20


class ByteRange(NamedTuple):
    """Consecutive bytes of a file."""

    path: Path
    offset: int
    bytes: int


def whole(path: Path) -> ByteRange:
    """Return the span of all bytes of a file."""
    return ByteRange(path, 0, path.stat().st_size)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that takes the place of `path`, durably, when the block ends.

    A block that raises leaves `path` as it was, and a temporary file beside it that
    `remove_temporaries` finds.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)  # nothing of a file whose sync may have failed is used again
    with temporary.open("xb") as file:
        yield file
        sync(file)
    temporary.replace(path)
    sync_directory(path.parent)


def sync(file: BinaryIO) -> None:
    """Return when what was written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Return when the names in `directory` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path) -> None:
    """Make a directory, and those above it that are missing; their names are on the disk then.

    That holds for those that are there, too: who made them may have died before their sync.
    """
    if directory.is_dir():
        _sync_names(directory)
        return
    make_directories(directory.parent)
    directory.mkdir(exist_ok=True)
    try:
        sync_directory(directory.parent)
    except OSError:
        directory.rmdir()  # or the next attempt would find it, and believe that it lasts
        raise


def _sync_names(directory: Path) -> None:
    """Sync the names of a directory and of those above it, as far as this user can make any."""
    device = directory.stat().st_dev
    for above in directory.absolute().parents:
        if above.stat().st_dev != device or not os.access(above, os.R_OK | os.W_OK):
            return
        sync_directory(above)


def remove_temporaries(directory: Path) -> None:
    """Delete what `replacing` left in `directory` when it was interrupted."""
    for path in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink()


class HashingFile(io.RawIOBase):
    """Passes bytes on to a file, and hashes them on the way, while the processor still has them.

    Attributes:
        bytes: Number of bytes passed on so far.
    """

    def __init__(self, file: BinaryIO, digest: "hashlib._Hash") -> None:
        super().__init__()
        self.bytes = 0
        self._file = file
        self._digest = digest

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of `data`, a piece at a time."""
        view = memoryview(data).cast("B")
        for first in range(0, len(view), _PIECE_BYTES):
            piece = view[first : first + _PIECE_BYTES]
            self._digest.update(piece)
            self._file.write(piece)
        self.bytes += len(view)
        return len(view)

    def writable(self) -> bool:
        """Return True: the file can be written."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written, wherever in the file the first one is."""
        return self.bytes


def sha256_of(spans: Iterable[ByteRange]) -> str:
    """Return the hexadecimal SHA-256 over the bytes of the spans, one after the other.

    Raises:
        OSError: A file cannot be read. A file that ends early is no error: its digest differs.
    """
    digest = hashlib.sha256()
    for span in spans:
        for piece in read_pieces(span):
            digest.update(piece)
    return digest.hexdigest()


def read_pieces(span: ByteRange) -> Iterator[bytes]:
    """Yield the bytes of a span in pieces of bounded size."""
    with span.path.open("rb") as file:
        file.seek(span.offset)
        left = span.bytes
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece


def ordered_lines(file: BinaryIO, key: Callable[[bytes], int], wanted: int = 0) -> Iterator[bytes]:
    """Yield the lines from the first one with a key of at least `wanted` on.

    Keys ascend with the lines, so that few of the lines before it are read. A last line without an
    end is left out: somebody is writing it, or died doing so.
    """
    low, high = 0, _end_of_lines(file)
    end = high
    while low < high:
        middle = (low + high) // 2
        line = _line_from(file, middle)
        if file.tell() <= end and line and key(line) < wanted:
            low = file.tell()
        else:
            high = middle
    file.seek(low)
    while low < end and (line := file.readline()):
        low += len(line)
        yield line


def last_line(file: BinaryIO) -> bytes:
    """Return the last line that has an end; no bytes if there is none."""
    end = high = _end_of_lines(file)
    while high:
        high = max(0, high - _PIECE_BYTES)
        file.seek(high)
        before = file.read(end - high - 1)
        if b"\n" in before or not high:
            return before.rpartition(b"\n")[2] + b"\n"
    return b""


def _line_from(file: BinaryIO, place: int) -> bytes:
    """Return the first line that begins at a place in a file or behind it."""
    file.seek(max(0, place - 1))
    if place:
        file.readline()
    return file.readline()


def _end_of_lines(file: BinaryIO) -> int:
    """Return the offset behind the last line that has an end; 0 if there is none."""
    high = file.seek(0, os.SEEK_END)
    while high:
        low = max(0, high - _PIECE_BYTES)
        file.seek(low)
        found = file.read(high - low).rfind(b"\n")
        if found >= 0:
            return low + found + 1
        high = low
    return 0
