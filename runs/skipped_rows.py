"""The rows that were left out of an output."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

from embedfarm.collector.durable_files import sync
from embedfarm.producer.readers import BadRow

SKIPPED_FILE: Final = "skipped.jsonl"


class SkippedFile:
    """skipped.jsonl: the rows that became no chunk, in the order they were met.

    Without a bad row nothing is written, so that a full disk is nothing to the reading of a corpus.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._file: BinaryIO | None = None

    def add(self, bad_row: BadRow) -> None:
        """List a row."""
        if self._file is None:
            self._file = self._partial.open("wb")
        self.count += 1
        self._file.write(json.dumps(asdict(bad_row)).encode() + b"\n")

    def close(self) -> None:
        """Put the file in its place, if there is anything in it, and on the disk."""
        if self._file is None:
            self._partial.unlink(missing_ok=True)
            return
        with self._file:
            sync(self._file)
        self._partial.replace(self._path)
