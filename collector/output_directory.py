"""A directory that is an output: how far it is, whose it is, and who writes to it."""

import fcntl
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from embedfarm.collector.manifest import (
    CHANGES_FILE,
    MANIFEST_FILE,
    SAMPLE_FILE,
    STATE_DIRECTORY,
    OutputError,
    find_listing,
)
from embedfarm.collector.request_comparison import compare_requests
from embedfarm.collector.sinks import UnknownSink, sink_kind, sink_names
from embedfarm.collector.text_digests import DIGESTS_FILE
from embedfarm.contract.durable_files import (
    TEMPORARY_SUFFIX,
    ByteRange,
    make_directories,
    replacing,
    sync_directory,
)

REQUEST_FILE: Final = "job.json"
JOURNAL_FILE: Final = "parts.jsonl"
LOCK_FILE: Final = "lock"
CHANGEABLE: Final = frozenset({"skip_bad_rows"})


class OutputBusy(OutputError):
    """Raised when another process writes to the directory."""


class State(StrEnum):
    """How far an output directory is."""

    NEW = "new"
    UNFINISHED = "unfinished"
    FINISHED = "finished"


def read_state(directory: Path) -> State:
    """Return how far the output in `directory` is; the directory need not exist."""
    if find_listing(directory, MANIFEST_FILE).exists():
        return State.FINISHED
    if (directory / STATE_DIRECTORY / REQUEST_FILE).exists():
        return State.UNFINISHED
    return State.NEW


def read_request(directory: Path) -> dict[str, Any]:
    """Return the request that the unfinished output in `directory` belongs to.

    Raises:
        OutputError: The request is absent or damaged.
    """
    path = directory / STATE_DIRECTORY / REQUEST_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} cannot be read: {error}") from error


def list_output_files(directory: Path) -> list[str]:
    """List the names of the files in `directory` that make up an output, but for the manifest."""
    ours = _file_names()
    return sorted(path.name for path in directory.glob("*") if ours.fullmatch(path.name))


@cache
def _file_names() -> re.Pattern[str]:
    """Return a pattern of the names of an output's files, whichever sink has written them."""
    lists = (DIGESTS_FILE, CHANGES_FILE, SAMPLE_FILE)
    names = [r"_?errors\.jsonl", *map(re.escape, lists)]
    for name in sink_names():
        with suppress(UnknownSink):  # one that does not load has written nothing here
            names.append(sink_kind(name).files)
    return re.compile(rf"({'|'.join(names)})(\.partial|{re.escape(TEMPORARY_SUFFIX)})?")


def check_sizes(directory: Path, spans: Iterable[ByteRange], listing: str = MANIFEST_FILE) -> None:
    """Check that files that were finished are there, and as large as they were written.

    Args:
        directory: Where they are.
        spans: Bytes that they had.
        listing: Name of the file that lists them.

    Raises:
        OutputError: One is not.
    """
    for span in spans:
        held = span.path.stat().st_size if span.path.is_file() else -1
        if held < span.offset + span.bytes:
            how = "is gone" if held < 0 else f"has {held:,} bytes only"
            name = span.path.relative_to(directory)
            raise OutputError(
                f"{directory} was finished, but {name} {how}: bring it back, or remove {listing} "
                "and what is left beside it, and the same command makes all of it again"
            )


def refuse_url(directory: Path) -> None:
    """Refuse an output directory that somebody meant to be a URL.

    Raises:
        OutputError: It would become a directory of that name here.
    """
    scheme = re.match(r"([a-z][a-z0-9+.-]+):/", str(directory))
    if scheme:
        raise OutputError(
            f"{directory}: an output is a directory of this machine, and not on {scheme[1]}: embed "
            "into a directory, and copy it when it is finished"
        )


@contextmanager
def locked(private: Path) -> Iterator[None]:
    """Keep other processes out of an output; the lock goes with the process, however it ends.

    Args:
        private: The output's state directory.

    Raises:
        OutputBusy: Another process holds the lock.
    """
    make_directories(private)
    with (private / LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputBusy(f"another process is writing to {private.parent}") from error
        yield


def claim(directory: Path, request: dict[str, Any]) -> None:
    """Make `directory` the output of `request`, unless it is something else already.

    Raises:
        OutputError: The output is finished, belongs to another request, or there are files of one.
    """
    match read_state(directory):
        case State.FINISHED:
            raise OutputError(f"{find_listing(directory, MANIFEST_FILE)}: the output is finished")
        case State.UNFINISHED:
            compare_requests(directory, read_request(directory) | _changes(request), request)
            _store(directory, request)
        case State.NEW:
            _begin(directory, request)


def _begin(directory: Path, request: dict[str, Any]) -> None:
    """Store the request of a new output."""
    if files := list_output_files(directory):
        raise OutputError(f"{directory} holds {files[0]} of another output")
    _store(directory, request)
    sync_directory(directory)


def _store(directory: Path, request: dict[str, Any]) -> None:
    with replacing(directory / STATE_DIRECTORY / REQUEST_FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(request)) + b"\n")


def _changes(request: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a request that a later run may change: it alters nothing finished."""
    return {name: request[name] for name in CHANGEABLE & request.keys()}
