"""A module that Python imports at its start: syncs and writes fail while a file exists.

The file is `CHAOS_DISK` in the directory `CHAOS_SWITCHES`. No shipped code knows of it: outputs,
journals and records all go through what `Path.open` gives for writing, and through `os.fsync`.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SWITCH: Final = Path(os.environ.get("CHAOS_SWITCHES", "/nowhere"), os.environ.get("CHAOS_DISK", ""))
MODES: Final = {"wb", "xb", "ab", "r+b"}

_open: Final = io.open
_fsync: Final = os.fsync


def check() -> None:
    """Raise EIO while the disk is to fail."""
    if SWITCH.is_file():
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class FailingFile(io.FileIO):
    """A file on a disk that may fail."""

    def write(self, data: Any) -> int:  # noqa: ANN401 # as its base
        """Write the bytes, or raise EIO while the disk is to fail."""
        check()
        return super().write(data)


def open_failing(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 # as `open`
    """Open a file like `open`; binary files that are written to may fail."""
    if isinstance(file, int) or mode not in MODES or buffering != -1:
        return _open(file, mode, buffering, *args, **kwargs)
    raw = FailingFile(file, mode.replace("b", ""))
    return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)


def sync_failing(descriptor: int) -> None:
    """Sync a file like `os.fsync`, or raise EIO while the disk is to fail."""
    check()
    _fsync(descriptor)


def put_in(module: Any, name: str, call: Callable[..., Any]) -> None:  # noqa: ANN401 # a module
    """Replace a function of a module."""
    vars(module)[name] = call


put_in(io, "open", open_failing)
put_in(os, "fsync", sync_failing)
