"""The rows that were left out of an output."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from producer.readers import BadRow

SKIPPED_FILE: Final = "skipped.jsonl"


class SkippedFile:
    """skipped.jsonl: the rows that became no chunk, in the order they were met."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._file = path.with_suffix(".partial").open("w", encoding="utf-8")

    def add(self, bad_row: BadRow) -> None:
        """List a row."""
        self.count += 1
        self._file.write(json.dumps(asdict(bad_row)) + "\n")

    def close(self) -> None:
        """Put the file in its place, if there is anything in it."""
        self._file.close()
        partial = self._path.with_suffix(".partial")
        if self.count:
            partial.replace(self._path)
        else:
            partial.unlink()
