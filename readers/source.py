"""Sources by name, found and opened: paths, fsspec URLs, globs, compressed files, stdin."""

import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, cast

import fsspec
import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.redaction import hide_in_word, hide_secrets
from embedfarm.readers.items import CorpusError
from embedfarm.readers.limits import Unpacked

LINE_BYTES_MAX: Final = 64 << 20
"""A longer line is taken for a file of another format, before it fills the memory."""

TABLES: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""Formats of files of rows, by suffix."""

DATABASE: Final = "database"
DATABASE_URL: Final = re.compile(r"(sqlite|postgres|postgresql)://")

LANCE: Final = "lance"
LANCE_SOURCE: Final = re.compile(r"(?P<place>.*\.lance/?)(@v(?P<version>[0-9]+))?", re.DOTALL)
"""A directory of Lance's, on any store, and a version of it."""

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}

_BUFFER_BYTES: Final = 1 << 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass
class Cursor:
    """A place in a corpus; reading begins there, and moves it along.

    Attributes:
        location: Number of the file or directory, in the order in which they are read.
        offset: Bytes, rows or files of that location that come before the place, by its format.
        line: Lines that come before the place, or chunks of a directory's file.
    """

    location: int = 0
    offset: int = 0
    line: int = 0


class Location(NamedTuple):
    """A file or directory that exists, or standard input.

    Attributes:
        name: Name for people and ids, without secrets.
        filesystem: The fsspec file system it is on; None for standard input, `DATABASE` and
            `LANCE` for what other libraries read.
        path: Path on that file system; URL of a database; path or URL of a Lance dataset, which may
            have a version behind it.
        is_directory: Whether it is a directory.
    """

    name: str
    filesystem: Any
    path: str
    is_directory: bool

    @property
    def is_url(self) -> bool:
        """Whether the location is on another file system than this machine's."""
        return not (self.is_stdin or isinstance(self.filesystem, LocalFileSystem))

    @property
    def is_database(self) -> bool:
        """Whether the location is a database, whose rows a query gives."""
        return bool(self.filesystem == DATABASE)

    @property
    def is_lance(self) -> bool:
        """Whether the location is a Lance dataset."""
        return bool(self.filesystem == LANCE)

    @property
    def is_stdin(self) -> bool:
        """Whether the location is standard input."""
        return self.filesystem is None


def find_locations(source: str) -> list[Location]:
    """Find what `source` names: one file or directory, or a glob's matches in order of path.

    Raises:
        CorpusError: The source names nothing that exists, or a protocol that is not installed.
    """
    if source == "-":
        return [Location("<stdin>", None, "-", is_directory=False)]
    name = printable(hide_in_word(source))
    if DATABASE_URL.match(source):
        return [Location(name, DATABASE, source, is_directory=False)]
    if is_lance(source):
        return [Location(name, LANCE, source, is_directory=False)]
    with named_errors(name, is_url="://" in source):
        locations = list(_find(source, name))
    if not locations:
        raise CorpusError(f"{name or repr(name)}: no such file or directory")
    return locations


def is_lance(source: str) -> bool:
    """Tell whether `source` names a Lance dataset, or a version of one."""
    dataset = LANCE_SOURCE.fullmatch(source)
    return dataset is not None and ("://" in source or Path(dataset["place"]).is_dir())


@contextmanager
def named_errors(name: str, *, is_url: bool) -> Iterator[None]:
    """Turn what is wrong with all of a source into a `CorpusError` with its name.

    What the library of a store raises, when it cannot be reached, is of any type.
    """
    kinds = (Exception,) if is_url else (OSError, ValueError, ImportError, pa.ArrowException)
    try:
        yield
    except EmbedfarmError:
        raise
    except kinds as error:
        reason = str(error) or type(error).__name__
        raise CorpusError(f"{name}: {hide_secrets(reason)}") from error


def _find(source: str, name: str) -> Iterator[Location]:
    """Yield the path itself if it exists, so that a name with brackets works, else its matches."""
    if not source:  # It would be the working directory.
        return
    if "://" in source:
        filesystem, path = fsspec.core.url_to_fs(source)
    else:
        filesystem, path = fsspec.filesystem("file"), str(Path(source).absolute())
    if "://" not in source and Path(path).is_fifo():
        raise CorpusError(f"{name}: a pipe can be read once; give it on standard input, as -")
    if filesystem.exists(path):
        yield Location(name, filesystem, path, filesystem.isdir(path))
        return
    for match in sorted(filesystem.glob(path)):
        if LANCE_SOURCE.fullmatch(match) and filesystem.isdir(match):
            raise CorpusError(f"{name}: a Lance dataset is named by itself, and not by a glob")
        shown = filesystem.unstrip_protocol(match) if "://" in source else match
        yield Location(printable(hide_in_word(shown)), filesystem, match, filesystem.isdir(match))


def printable(name: str) -> str:
    """Return a file's name for people, with bytes escaped that are not Unicode."""
    return name.encode(errors="backslashreplace").decode()


def split_compression(path: str) -> tuple[str, str | None]:
    """Return the path without the suffix of its compression, and that compression or None."""
    suffix = PurePosixPath(path).suffix
    compression = COMPRESSIONS.get(suffix.lower())
    return (path.removesuffix(suffix) if compression else path), compression


@contextmanager
def open_binary(
    filesystem: AbstractFileSystem, path: str, bytes_max: int = 0
) -> Iterator[BinaryIO]:
    """Open a file, decompressed as its suffix says, to at most `bytes_max` if that is not 0.

    A damaged, truncated or larger archive raises `OSError` where the reading meets the damage.
    """
    _, compression = split_compression(path)
    with filesystem.open(path, "rb") as file:
        # Arrow notices a truncated file in both formats; the usual Python modules do in one.
        raw = (
            Unpacked(
                pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression), bytes_max
            )
            if compression
            else file
        )
        yield cast("BinaryIO", io.BufferedReader(raw, _BUFFER_BYTES))


def number_lines(
    file: BinaryIO, name: str, cursor: Cursor, read_bytes: int = 0
) -> Iterator[tuple[int, bytes]]:
    r"""Yield lines with their numbers from 1 and their b"\n"; the first without byte order mark.

    They begin at the cursor, and when one is yielded the cursor is behind it.

    Args:
        file: The file.
        name: The file's name, for people.
        cursor: Place where the reading begins.
        read_bytes: Bytes of the file that were read already.

    Raises:
        CorpusError: A line is longer than `LINE_BYTES_MAX`.
    """
    skip_bytes(file, cursor.offset - read_bytes)
    for number in itertools.count(cursor.line + 1):
        line = file.readline(LINE_BYTES_MAX + 1)
        cursor.offset += len(line)
        cursor.line = number
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            return
        if len(line) > LINE_BYTES_MAX:
            raise CorpusError(f"{name} line {number}: longer than {LINE_BYTES_MAX >> 20} MiB")
        yield number, line


def skip_bytes(file: BinaryIO, count: int) -> None:
    """Skip the next bytes of a file; those of an archive have to be unpacked."""
    if count and file.seekable():
        file.seek(count, io.SEEK_CUR)
        return
    while count and (piece := file.read(min(count, _BUFFER_BYTES))):
        count -= len(piece)
