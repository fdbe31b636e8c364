"""Functions by which programs change files, with a simulated disk in the system's place.

The functions of `os` and `io` are replaced in this process, since `pathlib`, `shutil` and the farm
all end there. Files that are not on the disk, and files that are read, are left to the system.
"""

import functools
import io
import os
import types
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from tests.simulation.disk import Disk

mounted: Final[list["Disk"]] = []
"""The disk of the run, if it has one."""
REAL: Final = types.SimpleNamespace(
    open=os.open, close=os.close, fsync=os.fsync, replace=os.replace, unlink=os.unlink,
    rmdir=os.rmdir, mkdir=os.mkdir, open_file=io.open,
)  # fmt: skip


class DiskFile(io.FileIO):
    """An unbuffered file on the simulated disk, open for writing."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the simulated disk, perhaps only some of the bytes; return how many."""
        if not mounted:
            return super().write(data)
        return mounted[0].write(self.fileno(), bytes(data), super().write)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the file's size, its position by default."""
        size = self.tell() if size is None else size
        mounted[0].truncate(self.fileno(), size)
        return size

    def close(self) -> None:
        """Close the file, and let the disk forget its descriptor."""
        if mounted and not self.closed:
            mounted[0].forget(self.fileno())
        super().close()


def _open_file(file: object, mode: str = "r", *arguments: Any, **named: Any) -> IO[Any]:  # noqa: ANN401 # as `open`
    if mode.strip("bt") == "r" or not _is_on_disk(file):
        found: IO[Any] = REAL.open_file(file, mode, *arguments, **named)
        return found
    raw = DiskFile(file, mode.replace("b", ""), opener=_open_to_write)  # type: ignore[arg-type] # a path, or a number
    if arguments[:1] == (0,) or named.get("buffering") == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments[1:], **named)


def _open_to_write(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666)


def _is_on_disk(file: object) -> bool:
    if not mounted:
        return False
    if isinstance(file, int):
        return mounted[0].node(file) is not None
    return mounted[0].path(file) is not None


def _on_disk(name: str) -> Callable[..., Any]:
    """Return a function that the disk does for its own paths, and the system for others."""
    real = getattr(REAL, name)

    @functools.wraps(real)
    def call(path: object, *arguments: Any, dir_fd: int | None = None, **named: Any) -> Any:  # noqa: ANN401 # the system's
        place = mounted[0].path(path, dir_fd) if mounted else None
        if place is None:
            return real(path, *arguments, **named, **({} if dir_fd is None else {"dir_fd": dir_fd}))
        return getattr(mounted[0], name)(place, *arguments, **named)

    return call


def _replace(path: object, other: object) -> None:
    place = mounted[0].path(path) if mounted else None
    if place is None:
        REAL.replace(path, other)
    else:
        mounted[0].replace(place, str(other))


def _fsync(descriptor: int | IO[Any]) -> None:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if mounted and mounted[0].node(number) is not None:
        mounted[0].sync(number)
    else:
        REAL.fsync(number)


def _close(descriptor: int) -> None:
    if mounted:
        mounted[0].forget(descriptor)
    REAL.close(descriptor)


@functools.cache
def take_over() -> None:
    """Route all changes of files by this process through this module."""
    for name in ("open", "unlink", "rmdir", "mkdir"):
        setattr(os, name, _on_disk(name))
    for name, function in {"replace": _replace, "rename": _replace, "remove": os.unlink,
                           "fsync": _fsync, "close": _close}.items():  # fmt: skip
        setattr(os, name, function)
    setattr(io, "open", _open_file)  # noqa: B010 # the type checker may know of the real one alone
