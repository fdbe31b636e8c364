"""Parts of a finished output that a new one takes as they are: as links to the same files.

Both outputs are whole in themselves, whatever becomes of the other one, since a file is there as
long as one of its names is, and no part is ever changed in place.
"""

import errno
import logging
import os
from bisect import bisect_right
from pathlib import Path
from typing import Final

from embedfarm.collector.column_rows import same_rows
from embedfarm.collector.manifest import Layout, Manifest, OutputError, Part, Written, check_bytes
from embedfarm.collector.sinks import ColumnSink, PartRows, open_sink
from embedfarm.collector.source_check import names_sha256
from embedfarm.collector.text_digests import DIGEST_BYTES, DIGESTS_FILE
from embedfarm.contract.durable_files import sync_directory

LINKABLE: Final = ("parquet", "jsonl")
"""Formats with a file for each part."""

_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
)

log = logging.getLogger(__name__)


class LinkedParts:
    """Parts of a finished output that are taken where another one has the same rows.

    Args:
        directory: Directory of the finished output.
        manifest: Its manifest.
        format: Format of the output that takes them.

    Raises:
        OutputError: One of the two formats has no file for each part, or they are not the same.
    """

    def __init__(self, directory: Path, manifest: Manifest, format: str) -> None:  # noqa: A002 -- its name everywhere
        if format not in LINKABLE or manifest.format != format:
            raise OutputError(
                f"parts of {directory} ({manifest.format}) cannot be those of an output of "
                f"{format}: both have to be {' or both '.join(LINKABLE)}"
            )
        self._directory, self._manifest = directory, manifest
        self._sink = open_sink(format, directory)
        self._parts = {part.start: part for part in manifest.parts}
        self._refused = False
        self.ends = [part.end for part in manifest.parts]

    def ends_at(self, row: int) -> bool:
        """Tell whether one of the parts ends before a row."""
        place = bisect_right(self.ends, row)
        return place > 0 and self.ends[place - 1] == row

    def begins(self, start: int, digests: bytes, bytes_max: int) -> bool:
        """Tell whether a part begins with these texts, and has more.

        Args:
            start: Index of the first text.
            digests: The `text_digests` of the texts.
            bytes_max: Bytes of the largest part that is worth waiting for.
        """
        part = self._parts.get(start)
        if part is None or part.bytes > bytes_max:
            return False
        rows = len(digests) // DIGEST_BYTES
        return rows < part.count and self._digests(start, rows) == digests

    def take(self, rows: PartRows, layout: Layout, digests: bytes, out: Path) -> Written | None:
        """Link the file of a part that has just these rows into an output; None if there is none.

        Args:
            rows: The rows.
            layout: Their layout.
            digests: The `text_digests` of their texts, as far as they are known.
            out: Directory of the output.

        Raises:
            OutputError: The part has other bytes than were written.
            OSError: The disk refused.
        """
        part = self._parts.get(rows.start)
        if part is None or not self._is_same(part, rows, layout, digests):
            return None
        check_bytes(self._directory, part)
        try:
            _link(self._directory / part.file, out / part.file)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._refused:
                log.warning("parts of %s are copied, not linked: %s", self._directory, error)
            self._refused = True
            return None
        return Written(
            file=part.file, bytes=part.bytes, sha256=part.sha256, linked=str(self._directory)
        )

    def _is_same(self, part: Part, rows: PartRows, layout: Layout, digests: bytes) -> bool:
        """Tell whether a part has these rows, all of them, and nothing else."""
        if part.errors or not rows.good.all() or part.count != len(rows.good):
            return False
        if layout != self._manifest.layout or digests != self._digests(part.start, part.count):
            return False
        return names_sha256(rows.ids) == part.names_sha256 and self._has_columns(part, rows)

    def _has_columns(self, part: Part, rows: PartRows) -> bool:
        """Tell whether a part has just the columns of some rows beside its vectors."""
        sink, layout = self._sink, self._manifest.layout
        there = sink.read_columns(part, layout) if isinstance(sink, ColumnSink) else None
        if there is None or rows.columns is None:
            return there is None and rows.columns is None
        return same_rows(there.table, rows.columns)

    def _digests(self, start: int, count: int) -> bytes:
        """Return the digests of some texts of the finished output."""
        with (self._directory / DIGESTS_FILE).open("rb") as file:
            file.seek(start * DIGEST_BYTES)
            return file.read(count * DIGEST_BYTES)


def _link(path: Path, name: Path) -> None:
    """Give a file one more name, durably, in place of what has it."""
    with path.open("rb") as file:  # which somebody may have copied there a moment ago
        os.fsync(file.fileno())
    name.unlink(missing_ok=True)
    name.hardlink_to(path)
    sync_directory(name.parent)
