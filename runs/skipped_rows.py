"""The rows that were left out of an output."""

import json
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from embedfarm.collector.manifest import SKIPPED_FILE
from embedfarm.contract.durable_files import sync
from embedfarm.readers import BadRow
from embedfarm.runs.disk_room import with_room

if TYPE_CHECKING:
    from io import FileIO


class SkippedFile:
    """_skipped.jsonl: the rows that became no chunk, in the order they were met.

    Without a bad row nothing is written, so that a full disk is nothing to the reading of a corpus.
    With one, a full disk is waited for.
    """

    def __init__(self, path: Path, full_disk_seconds: float, stop: threading.Event) -> None:
        """Begin a list without rows.

        Args:
            path: Where the list takes its place when it is closed.
            full_disk_seconds: Time between two attempts to write on a full disk, in seconds.
            stop: Event that ends the waiting for room, by the error of the disk.
        """
        self.count = 0
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._file: FileIO | None = None
        self._bytes = 0
        self._full_disk_seconds = full_disk_seconds
        self._stop = stop

    def add(self, bad_row: BadRow) -> None:
        """List a row."""
        line = json.dumps(asdict(bad_row)).encode() + b"\n"
        with_room(
            partial(self._append, line), self._path.parent, self._full_disk_seconds, self._stop
        )
        self.count += 1
        self._bytes += len(line)

    def _append(self, line: bytes) -> None:
        """Write a line behind the last whole one, over what an earlier attempt may have left."""
        if self._file is None:
            self._file = self._partial.open("wb", buffering=0)
        self._file.seek(self._bytes)
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        """Put the file in its place and on the disk, if there is anything in it, or else none."""
        if self._file is None:
            self._partial.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            return
        with self._file:
            sync(self._file)
        self._partial.replace(self._path)


def describe_no_rows(skipped: int, out: Path) -> str:
    """Return why there is nothing to embed for an output, after so many rows were skipped."""
    if not skipped:
        return "the corpus is empty: there is nothing to embed"
    return (
        f"no row of the corpus can be embedded: {skipped:,} were left out, and "
        f"{out / SKIPPED_FILE} says why"
    )
