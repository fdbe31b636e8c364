"""Files of OpenAI's protocol: a directory each, so that no name of a user becomes a path."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from embedfarm.contract.private_directories import make_private
from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_directories import OUTPUT, new_id, put, read_kept, remove_directory

CONTENT: Final = "content"
ABOUT: Final = "about.json"

ASKED: Final = "batch.json"  # in the directory of a batch: what is asked for, and by whom
BATCH_INPUT: Final = "input.jsonl"  # in the directory of a batch
COMPLETED: Final = "completed.json"

_NAME: Final = re.compile(r"file-[0-9a-f]{32}(-output|-errors)?")


class _Owned(msgspec.Struct):
    """A record of what has an owner: its tenant, "" if it is no tenant's."""

    tenant: str = ""


class FileFacts(_Owned, kw_only=True):
    """A file, as OpenAI's protocol has it; times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


def new_file_id() -> str:
    """Return a new name for a file."""
    return f"file-{new_id()}"


def keep_file(settings: Settings, content: Path, facts: FileFacts) -> None:
    """Move a file to where it is found by its id; one that is there already is replaced."""
    directory = settings.jobs_path / "files" / facts.id
    make_private(directory)
    content.replace(directory / CONTENT)
    put(directory / ABOUT, msgspec.json.encode(facts))


def content_of(settings: Settings, file: str) -> Path | None:
    """Return the path of a file's content, None if there is no such file."""
    path = settings.jobs_path / "files" / file / CONTENT
    return path if _NAME.fullmatch(file) and path.with_name(ABOUT).exists() else None


def facts_of(content: Path) -> FileFacts | None:
    """Return the facts of a file; None if its record is damaged, which is logged."""
    return read_kept(content.with_name(ABOUT), FileFacts)


def file_tenant(content: Path) -> str | None:
    """Return the tenant that owns a file, "" if none does; None where that cannot be read."""
    return _tenant_in(content.with_name(ABOUT))


def batch_tenant(directory: Path) -> str | None:
    """Return the tenant that owns a batch, "" if none does; None where that cannot be read."""
    return _tenant_in(directory / ASKED)


def _tenant_in(path: Path) -> str | None:
    found = read_kept(path, _Owned)
    return None if found is None else found.tenant


def list_files(settings: Settings, after: str, *, newest_first: bool) -> Iterator[FileFacts]:
    """Yield files by their age, those of a batch as old as it, after `after`; skip damaged ones."""
    names = [path.parent.name for path in (settings.jobs_path / "files").glob(f"*/{ABOUT}")]
    for name in sorted(names, reverse=newest_first):
        content = content_of(settings, name)
        passed = not after or (name < after if newest_first else name > after)
        facts = facts_of(content) if passed and content is not None else None
        if facts is not None:
            yield facts


def remove_file(content: Path) -> None:
    """Remove a file by the path of its content, with all that is known of it."""
    remove_directory(content.parent)


def complete_batch(
    settings: Settings, batch: str, report: Mapping[str, Any], tenant: str = ""
) -> None:
    """Keep what has come of a batch as files, and at last write that nothing more comes of it.

    Done again after a crash it keeps the same files under the same ids.

    Args:
        settings: Settings that say where batches have their directories.
        batch: Id of the batch.
        report: What `embedfarm batch --json` has printed.
        tenant: Tenant of the batch where its maker has not yet written, or never will, whose it is.
    """
    directory = settings.jobs_path / batch
    written = batch_tenant(directory)
    owner = tenant if written is None else written
    completed = {**report, "output_file_id": None, "error_file_id": None}
    kinds = (("output", "completed", "output_file_id"), ("errors", "failed", "error_file_id"))
    for kind, counted, field in kinds:
        path = directory / OUTPUT / f"{kind}.jsonl"
        if not report[counted]:
            continue
        facts = FileFacts(
            id=f"file-{batch.removeprefix('batch_')}-{kind}",
            bytes=path.stat().st_size,
            created_at=int(path.stat().st_mtime),
            filename=f"{batch}_{kind}.jsonl",
            purpose="batch_output",
            tenant=owner,
        )
        keep_file(settings, path, facts)
        completed[field] = facts.id
    put(directory / COMPLETED, msgspec.json.encode(completed))
