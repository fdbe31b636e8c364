"""Where jobs by HTTP have their input and their output: a directory each, named as the job.

<jobs_directory>/<job>/     call.json, input.<format>, output/
<jobs_directory>/uploads/   what is on its way, or was when its receiver died
"""

import json
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from embedfarm.settings import Settings

UPLOADS: Final = "uploads"
OUTPUT: Final = "output"
REMOVED: Final = "removed-"  # begins the name of what is being removed

CALL_FILE: Final = "call.json"

_NAME: Final = re.compile(r"(batch_)?[0-9a-f]{32}")


def new_id() -> str:
    """A new name, 32 hexadecimal digits; names are in the order of their making."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class Call(NamedTuple):
    """Arguments of `producer.tasks.embed_corpus`, kept to do the same again."""

    corpus: list[str]
    out: str
    options: dict[str, Any]


def write_call(directory: Path, call: Call) -> None:
    """Keep a call in the directory of its job."""
    (directory / CALL_FILE).write_text(json.dumps(call), encoding="utf-8")


def read_call(directory: Path) -> Call:
    """The call of a job by HTTP.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    return Call(*json.loads((directory / CALL_FILE).read_text(encoding="utf-8")))


def is_submitted(job: str) -> bool:
    """Whether a job may have come by HTTP."""
    return _NAME.fullmatch(job) is not None


def directory_of(settings: Settings, job: str) -> Path | None:
    """The directory of a job by HTTP; None for any other job, whatever its name looks like."""
    path = settings.jobs_path / job
    return path if is_submitted(job) and path.is_dir() else None


def remove_directory(directory: Path) -> None:
    """Remove one at once for whoever looks for it; who still writes there meets an error."""
    doomed = directory.with_name(f"{REMOVED}{uuid.uuid4().hex}")
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)  # `remove_old` finds what is left


def remove_old(settings: Settings, now: float, gone: Callable[[str], bool]) -> list[str]:
    """Remove what is older than `jobs_directory_seconds`: files, uploads, and jobs that are gone.

    Returns:
        The jobs.
    """
    top = settings.jobs_path
    before = now - settings.jobs_directory_seconds
    for path in [*top.glob(f"{UPLOADS}/*"), *top.glob("files/*"), *top.glob(f"{REMOVED}*")]:
        if path.stat().st_mtime < before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    old = [
        path
        for path in top.glob("*")
        if is_submitted(path.name) and path.stat().st_mtime < before and gone(path.name)
    ]
    for path in old:
        remove_directory(path)
    return [path.name for path in old]
