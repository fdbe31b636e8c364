"""Disk usage of a tenant: inputs and outputs of its jobs by HTTP, its files, its uploads."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_directories import UPLOADS, is_submitted, read_call
from embedfarm.ingest.openai_files import ABOUT, ASKED, batch_tenant, file_tenant


def upload_suffix(tenant: str) -> str:
    """Return the end of an upload's name: a hash, with no word of the tenant's in it."""
    return f".{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"


def stored_bytes(settings: Settings, tenant: str) -> int:
    """Return a tenant's bytes below `jobs_directory`; a file with two names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in _places(settings.jobs_path, tenant):
        for file in _files(path):
            with contextlib.suppress(FileNotFoundError):  # a job ends, or is deleted
                found = file.stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or all files in a directory."""
    if not path.is_dir():
        yield path
    for directory, _, names in os.walk(path):
        yield from (Path(directory, name) for name in names)


def _places(top: Path, tenant: str) -> Iterator[Path]:
    """Yield the files and directories of a tenant."""
    yield from top.glob(f"{UPLOADS}/*{upload_suffix(tenant)}")
    yield from (path.parent for path in top.glob(f"files/*/{ABOUT}") if file_tenant(path) == tenant)
    for path in top.iterdir() if top.is_dir() else ():
        if is_submitted(path.name) and _tenant_of(path) == tenant:
            yield path


def _tenant_of(directory: Path) -> str | None:
    """Return the tenant of the job in a directory; None where that cannot be read."""
    if (directory / ASKED).exists():
        return batch_tenant(directory)
    call = read_call(directory)
    return None if call is None else call.tenant
