"""Directories of jobs by HTTP: each has a job's input and output, and the job's name.

<jobs_directory>/<job>/     call.json, input.<format>, output/
<jobs_directory>/uploads/   what is being received, or was when its receiver died
"""

import contextlib
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from embedfarm.contract.settings import Settings
from embedfarm.contract.unreadable_records import name_once
from embedfarm.runs.stored_place import discard_stored

Kept = TypeVar("Kept")

UPLOADS: Final = "uploads"
OUTPUT: Final = "output"
REMOVED: Final = "removed-"  # begins the name of what is being removed

CALL_FILE: Final = "call.json"
KEPT_BYTES_MAX: Final = 1 << 20  # of a file beside inputs and outputs; ours have a few thousand

_NAME: Final = re.compile(r"(batch_)?[0-9a-f]{32}")


def new_id() -> str:
    """Return a new name of 32 hexadecimal digits; names sort by the time of their making."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class Call(NamedTuple):
    """Arguments of `producer.tasks.embed_corpus`, kept to do the same again, and the tenant."""

    corpus: list[str]
    out: str
    options: dict[str, Any]
    tenant: str = ""


def put(path: Path, data: bytes) -> None:
    """Write a private file atomically: after a crash it has the new content or the old one."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.touch(0o600, exist_ok=False)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_kept(path: Path, kind: type[Kept]) -> Kept | None:
    """Read a record from a file; None if the file is missing, or damaged, which is logged."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(KEPT_BYTES_MAX), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        name_once(str(path), str(error))
        return None


def write_call(directory: Path, call: Call) -> None:
    """Keep a call in the directory of its job, for nobody else to read: its URLs have secrets."""
    put(directory / CALL_FILE, msgspec.json.encode(call))


def read_call(directory: Path) -> Call | None:
    """Return the call of a job by HTTP; None where it cannot be read."""
    return read_kept(directory / CALL_FILE, Call)


def is_submitted(job: str) -> bool:
    """Tell whether a job, by its name, may have come by HTTP."""
    return _NAME.fullmatch(job) is not None


def directory_of(settings: Settings, job: str) -> Path | None:
    """Return the directory of a job by HTTP; None for any other job, whatever its name."""
    path = settings.jobs_path / job
    return path if is_submitted(job) and path.is_dir() else None


def remove_directory(directory: Path) -> None:
    """Rename a directory away and remove it; processes that still write there get an error.

    Vectors that its output lists on a storage go first. Where the storage refuses that, the renamed
    directory stays, and `remove_old` tries again.
    """
    doomed = directory.with_name(f"{REMOVED}{uuid.uuid4().hex}")
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    if discard_stored(doomed / OUTPUT):
        shutil.rmtree(doomed, ignore_errors=True)  # `remove_old` finds what is left


def remove_old(settings: Settings, now: float, gone: Callable[[str], bool]) -> list[str]:
    """Remove files, uploads and directories of deleted jobs older than `jobs_directory_seconds`.

    Returns:
        Ids of the jobs whose directories are gone now.
    """
    top = settings.jobs_path
    before = now - settings.jobs_directory_seconds
    for path in [*top.glob(f"{UPLOADS}/*"), *top.glob("files/*"), *top.glob(f"{REMOVED}*")]:
        if _changed_before(path, before) and discard_stored(path / OUTPUT):
            _remove(path)
    old = [
        path
        for path in top.glob("*")
        if is_submitted(path.name) and _changed_before(path, before) and gone(path.name)
    ]
    for path in old:
        with _going_on(path):
            remove_directory(path)
    return [path.name for path in old if not path.exists()]


def _changed_before(path: Path, seconds: float) -> bool:
    """Tell whether something is there that was last changed before a Unix time."""
    with _going_on(path):
        return path.lstat().st_mtime < seconds
    return False


def _remove(path: Path) -> None:
    with _going_on(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def _going_on(path: Path) -> Iterator[None]:
    """Log what cannot be removed, and let it stay, so that the rest is still removed."""
    try:
        yield
    except FileNotFoundError:  # somebody else removed it
        return
    except OSError as error:
        name_once(str(path), f"it cannot be removed: {error.strerror}")
