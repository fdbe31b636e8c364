"""From what a user names to open files: paths, fsspec URLs, globs, compressed files, stdin."""

import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, cast

import fsspec
import pyarrow as pa
from fsspec import AbstractFileSystem

from producer.readers.items import CorpusError

LINE_BYTES_MAX: Final = 64 << 20
"""A longer line is taken for a file of another format, before it fills the memory."""

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}

_BUFFER_BYTES: Final = 1 << 20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_PASSWORD: Final = re.compile(r"(?<=://)[^/@:]*:[^/@]*@")


class Location(NamedTuple):
    """A file or directory that exists, or standard input.

    Attributes:
        name: For people and ids; carries no password.
        filesystem: The fsspec file system it is on; None for standard input.
        path: Its path there.
        is_directory: Whether it is a directory.
    """

    name: str
    filesystem: Any
    path: str
    is_directory: bool

    @property
    def is_stdin(self) -> bool:
        """Whether it is standard input."""
        return self.filesystem is None


def locate(source: str) -> list[Location]:
    """What `source` names: one file or directory, or, for a glob, its matches in order of path.

    Raises:
        CorpusError: It names nothing that exists, or a protocol that is not installed.
    """
    if source == "-":
        return [Location("<stdin>", None, "-", is_directory=False)]
    name = printable(_PASSWORD.sub("", source))
    try:
        locations = list(_find(source, name))
    except (OSError, ValueError, ImportError) as error:
        raise CorpusError(f"{name}: {error}") from error
    if not locations:
        raise CorpusError(f"{name or repr(name)}: no such file or directory")
    return locations


def _find(source: str, name: str) -> Iterator[Location]:
    """The path itself if it exists, so that a name with brackets works, else its matches."""
    if not source:  # It would be the working directory.
        return
    if "://" in source:
        filesystem, path = fsspec.core.url_to_fs(source)
    else:
        filesystem, path = fsspec.filesystem("file"), str(Path(source).absolute())
    if filesystem.exists(path):
        yield Location(name, filesystem, path, filesystem.isdir(path))
        return
    for match in sorted(filesystem.glob(path)):
        shown = filesystem.unstrip_protocol(match) if "://" in source else match
        yield Location(printable(shown), filesystem, match, filesystem.isdir(match))


def printable(name: str) -> str:
    """A file's name for people: what in it is not Unicode is escaped."""
    return name.encode(errors="backslashreplace").decode()


def split_compression(path: str) -> tuple[str, str | None]:
    """The path without the suffix of its compression, and that compression or None."""
    suffix = PurePosixPath(path).suffix
    compression = COMPRESSIONS.get(suffix.lower())
    return (path.removesuffix(suffix) if compression else path), compression


@contextmanager
def open_binary(filesystem: AbstractFileSystem, path: str) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed as its suffix says.

    A damaged or truncated archive raises `OSError` where the reading meets the damage.
    """
    _, compression = split_compression(path)
    with filesystem.open(path, "rb") as file:
        # Arrow notices a truncated file in both formats; the usual Python modules do in one.
        raw = (
            pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
            if compression
            else file
        )
        yield cast("BinaryIO", io.BufferedReader(raw, _BUFFER_BYTES))


def number_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    r"""Lines, each with its number from 1 and its b"\n"; a byte order mark is taken off the first.

    Raises:
        CorpusError: A line is longer than `LINE_BYTES_MAX`.
    """
    for number in itertools.count(1):
        line = file.readline(LINE_BYTES_MAX + 1)
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return
        if len(line) > LINE_BYTES_MAX:
            raise CorpusError(f"{name} line {number}: longer than {LINE_BYTES_MAX >> 20} MiB")
        yield number, line
