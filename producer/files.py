"""Files of OpenAI's protocol: a directory each, so that no name of a user becomes a path."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from embedfarm.settings import Settings
from producer.directories import OUTPUT, new_id, remove_directory

CONTENT: Final = "content"
ABOUT: Final = "about.json"

BATCH_INPUT: Final = "input.jsonl"  # in the directory of a batch
COMPLETED: Final = "completed.json"

_NAME: Final = re.compile(r"file-[0-9a-f]{32}(-output|-errors)?")


class FileFacts(msgspec.Struct, kw_only=True):
    """A file, as OpenAI's protocol has it; times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


def new_file_id() -> str:
    """A new name of a file."""
    return f"file-{new_id()}"


def keep_file(settings: Settings, content: Path, facts: FileFacts) -> None:
    """Move a file to where it is found by its id; one that is there already is replaced."""
    directory = settings.jobs_path / "files" / facts.id
    directory.mkdir(parents=True, exist_ok=True)
    content.replace(directory / CONTENT)
    (directory / ABOUT).write_bytes(msgspec.json.encode(facts))


def content_of(settings: Settings, file: str) -> Path | None:
    """Where the content of a file is, None if there is no such file."""
    path = settings.jobs_path / "files" / file / CONTENT
    return path if _NAME.fullmatch(file) and path.with_name(ABOUT).exists() else None


def facts_of(content: Path) -> FileFacts:
    """What is known of a file."""
    return msgspec.json.decode(content.with_name(ABOUT).read_bytes(), type=FileFacts)


def list_files(settings: Settings, after: str, *, newest_first: bool) -> Iterator[FileFacts]:
    """All files after one, or after none, by the time of their making."""
    names = [path.parent.name for path in (settings.jobs_path / "files").glob(f"*/{ABOUT}")]
    for name in sorted(names, reverse=newest_first):
        content = content_of(settings, name)
        passed = not after or (name < after if newest_first else name > after)
        if passed and content is not None:
            yield facts_of(content)


def remove_file(content: Path) -> None:
    """Remove a file."""
    remove_directory(content.parent)


def complete_batch(settings: Settings, batch: str, report: Mapping[str, Any]) -> None:
    """Keep what came of a batch, and say at last that it is complete.

    Done again after a crash it keeps the same files under the same ids.
    """
    directory = settings.jobs_path / batch
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
        )
        keep_file(settings, path, facts)
        completed[field] = facts.id
    temporary = directory / f"{COMPLETED}.partial"
    temporary.write_bytes(msgspec.json.encode(completed))
    temporary.replace(directory / COMPLETED)
