"""Pages of an output as a client reads them, none of which may ever change."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from embedfarm.collector.journal import JournalLine
from embedfarm.collector.manifest import STATE_DIRECTORY
from embedfarm.collector.output_directory import JOURNAL_FILE
from embedfarm.collector.output_reader import NotBegun, OutputReader
from embedfarm.collector.sinks import PartRows


@dataclass
class Pages:
    """Digests of the pages read of one output, by their first chunk and their end."""

    seen: dict[tuple[int, int], str] = field(default_factory=dict)

    def read(self, out: Path) -> None:
        """Read all pages that the output has, and remember their digests.

        Raises:
            AssertionError: A page is not what it was.
        """
        self.check(out)
        try:
            with OutputReader(out) as reader:
                start = 0
                while (page := reader.read(start, 16)) is not None:
                    self.seen[start, page.end] = _digest(page.batch)
                    start = page.end
        except NotBegun:
            return

    def check(self, out: Path) -> None:
        """Read all pages again that were read before.

        After a loss of power they may be away until the next command gives their line its end.

        Raises:
            AssertionError: A page is not what it was.
        """
        if not self.seen:
            return
        try:
            reader = OutputReader(out)
        except NotBegun as error:
            raise AssertionError(f"all chunks are gone from {out.name}") from error
        with reader:
            # More pages may be read meanwhile: a simulated disk takes its time.
            for (start, end), digest in list(self.seen.items()):
                page = reader.read(start, end - start)
                if page is None or page.end < end:
                    if end <= _end_without_line_end(out):
                        continue
                    raise AssertionError(f"chunks {start} to {end - 1} are gone from {out.name}")
                if _digest(page.batch) != digest:
                    raise AssertionError(f"chunks {start} to {end - 1} of {out.name} have changed")


def _digest(batch: PartRows) -> str:
    """Return a digest of a batch's good vectors, and of which chunks have one."""
    vectors = np.ascontiguousarray(batch.matrix[batch.good])
    return hashlib.sha256(vectors.tobytes() + batch.good.tobytes()).hexdigest()


def _end_without_line_end(out: Path) -> int:
    """Return the index after the part of a whole last line that lacks its end; 0 without one."""
    with suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        with (out / STATE_DIRECTORY / JOURNAL_FILE).open("rb") as file:
            line = file.read().rpartition(b"\n")[2].rstrip(b"\0")  # perhaps zeros in its place
        return msgspec.json.decode(line, type=JournalLine).part.end
    return 0
