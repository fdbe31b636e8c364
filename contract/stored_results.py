"""Vectors of results on shared storage: files that workers write, and whoever collects reads.

A job whose specification names a place in `stored` has that directory for itself. A worker writes
the vectors of one job in a micro-batch as one file, durably, and commits for each block a receipt
that says where in that file its vectors are. A file has a name that no other attempt has. The name
says up to which chunk anybody may need it, so that those that are left over are known by a listing.

A place is a directory that workers and collectors have mounted under the same path, or a URL that
fsspec opens, whose credentials each process has from its own environment.
"""

import errno
import re
import uuid
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from embedfarm.contract.durable_files import (
    TEMPORARY_SUFFIX,
    make_directories,
    replacing,
    sync_directory,
)
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.redaction import hide_in_word

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

REMOVALS_MAX: Final = 3  # of a directory into which somebody still writes

_NAME: Final = re.compile(
    r"(?P<generation>[0-9]{0,20}\+*)\.(?P<start>[0-9]{1,16})-(?P<end>[0-9]{1,16})\.[0-9a-f]{32}"
    rf"(?:{re.escape(TEMPORARY_SUFFIX)})?"
)
_LOCAL: Final = "file://"


class StorageRefused(EmbedfarmError, ValueError):
    """Raised when results may not be stored in a place, or cannot be; waiting changes nothing."""

    exit_status = 2


def make_name(generation: str, start: int, end: int) -> str:
    """Return a name, which no other file has, for vectors of chunks `start` to `end - 1`."""
    return f"{generation}.{start}-{end}.{uuid.uuid4().hex}"


def is_name(name: str) -> bool:
    """Tell whether a name is one that `make_name` may have made; it leads nowhere else."""
    return _NAME.fullmatch(name) is not None and not name.endswith(TEMPORARY_SUFFIX)


def removable(names: Iterable[str], kept: Collection[str]) -> list[str]:
    """Return the names of vectors, whole or half written, but for those that are kept."""
    return [name for name in names if _NAME.fullmatch(name) and name not in kept]


def is_left_over(name: str, upto: int, generation: str) -> bool:
    """Tell whether nobody needs a file any more, or what is left of one that was not finished.

    Args:
        name: Name of the file.
        upto: Index of the first chunk that is not on disk.
        generation: Generation of the job, read after the file was found; "" where it is not known.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return False
    return int(found["end"]) <= upto or generation not in {"", found["generation"]}


def checksum_of(data: "ReadableBuffer") -> int:
    """Return the CRC-32 of the bytes of vectors."""
    return zlib.crc32(data)


def check_place(place: str, roots: Sequence[str], what: str = "stored") -> None:
    """Refuse a place that is not below one of the roots, or that could lead elsewhere.

    Args:
        place: Path or URL of a directory or file.
        roots: Directories and URLs.
        what: What is there, for the message; the setting with the roots is named after it.

    Raises:
        StorageRefused: It is such a place; the message names it without its secrets.
    """
    shown = hide_in_word(place)
    if shown != place or "::" in place or not {"..", "."}.isdisjoint(place.split("/")):
        raise StorageRefused(f"{what}: {shown!r} has secrets, or leads elsewhere")
    if not any(_is_below(place, root) for root in roots):
        names = ", ".join(map(hide_in_word, roots)) or "empty"
        raise StorageRefused(f"{what}: {shown!r} is not below one of {what}_roots ({names})")


def _is_below(place: str, root: str) -> bool:
    if _is_url(place) != _is_url(root):
        return False
    if not _is_url(place):
        return _path(place).resolve().is_relative_to(_path(root).expanduser().resolve())
    return f"{place}/".startswith(f"{root.rstrip('/')}/")


def _is_url(place: str) -> bool:
    return "://" in place and not place.startswith(_LOCAL)


def _path(place: str) -> Path:
    return Path(place.removeprefix(_LOCAL))


def place_below(place: str, name: str) -> str:
    """Return the place of a directory of that name in another place, absolute.

    Raises:
        StorageRefused: The place has secrets, which no record may have.
    """
    if not _is_url(place):
        return str(_path(place).expanduser().resolve() / name)
    below = f"{place.rstrip('/')}/{name}"
    check_place(below, [below])
    return below


def open_place(place: str) -> "StoredFiles":
    """Return the files of a place.

    Raises:
        StorageRefused: There is no library for its URL.
    """
    return UrlFiles.open(place) if _is_url(place) else LocalFiles(_path(place))


@dataclass(frozen=True)
class LocalFiles:
    """Files in a directory of this host, or in one that it has mounted.

    Attributes:
        directory: The directory; only `make` makes it, so that a worker that has not mounted it
            finds out.
    """

    directory: Path

    def may_pass(self, error: Exception) -> bool:
        """Tell whether an error may pass by waiting."""
        lasting = (FileNotFoundError, NotADirectoryError, PermissionError)
        return isinstance(error, OSError) and not isinstance(error, lasting)

    def make(self) -> None:
        """Make the directory; it is on the disk then."""
        make_directories(self.directory)

    def put(self, name: str, data: "ReadableBuffer") -> None:
        """Write a file; when this returns it is on the disk, and before nobody sees it."""
        with replacing(self.directory / name) as file:
            file.write(data)

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; fewer where it ends before."""
        with (self.directory / name).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return (self.directory / name).stat().st_size

    def names(self) -> list[str]:
        """Return the names of all files; none where there is no such directory."""
        with suppress(FileNotFoundError):
            return [path.name for path in self.directory.iterdir()]
        return []

    def delete(self, names: Sequence[str]) -> None:
        """Delete files that may be gone already."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def remove(self, kept: Collection[str] = ()) -> None:
        """Delete all files of vectors but those that are kept, and the directory if it is empty.

        What is still written into it may stay, and what has another name does.
        """
        for _ in range(REMOVALS_MAX):
            self.delete(removable(self.names(), kept))
            if kept:
                return
            try:
                self.directory.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                continue  # a worker that has not heard of the end has begun another one
            sync_directory(self.directory.parent)
            return


@dataclass(frozen=True)
class UrlFiles:
    """Files below a URL that fsspec opens: objects, which are whole or absent.

    Attributes:
        filesystem: The fsspec file system.
        root: Path on it.
    """

    filesystem: Any
    root: str

    @classmethod
    def open(cls, url: str) -> "UrlFiles":
        """Open the file system of a URL, of which nothing is cached.

        Raises:
            StorageRefused: The library that it needs is not installed, or it is no URL.
        """
        import fsspec  # noqa: PLC0415 -- few jobs need it

        try:
            filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageRefused(f"stored: {hide_in_word(url)!r}: {error}") from error
        return cls(filesystem, root.rstrip("/"))

    def may_pass(self, error: Exception) -> bool:
        """Tell whether an error may pass by waiting; that of a library may be of any type."""
        lasting = (FileNotFoundError, NotADirectoryError, PermissionError, NotImplementedError)
        return not isinstance(error, lasting)

    def make(self) -> None:
        """Do nothing: objects need no directory."""

    def put(self, name: str, data: "ReadableBuffer") -> None:
        """Write an object with one call; who repeats it writes the same once more."""
        self.filesystem.pipe_file(f"{self.root}/{name}", bytes(data))

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of an object; fewer where it ends before."""
        path = f"{self.root}/{name}"
        try:
            data: bytes = self.filesystem.cat_file(path, start=offset, end=offset + count)
        except Exception:
            if self.filesystem.size(path) > offset:
                raise
            return b""  # some stores refuse to read behind the end
        return data

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        return int(self.filesystem.size(f"{self.root}/{name}"))

    def names(self) -> list[str]:
        """Return the names of all objects that the listing has."""
        with suppress(FileNotFoundError):
            self.filesystem.invalidate_cache(self.root)
            found = self.filesystem.ls(self.root, detail=False)
            return [each.rpartition("/")[2] for each in found]
        return []

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects that may be gone already."""
        for name in names:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(f"{self.root}/{name}")

    def remove(self, kept: Collection[str] = ()) -> None:
        """Delete all objects of vectors that the listing has, but those that are kept."""
        self.delete(removable(self.names(), kept))


StoredFiles: TypeAlias = LocalFiles | UrlFiles
