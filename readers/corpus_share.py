"""How much of a corpus has been read, by which the number of its chunks is estimated."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from embedfarm.readers.corpus import CorpusOptions, format_of
from embedfarm.readers.directory import find, locate
from embedfarm.readers.items import CorpusError
from embedfarm.readers.recoded import UTF_8, canonical
from embedfarm.readers.source import Cursor, Location, split_compression

SHARE_MIN: Final = 0.005  # of a corpus, below which its beginning says little about the rest
BY_BYTES: Final = frozenset({"jsonl", "csv", "tsv", "txt"})  # what cursors in them count


@dataclass
class CorpusShare:
    """Knows of places in a corpus how much of it comes before.

    Files count by their bytes, or alike where not all of them are on this machine. Within a file it
    is known for lines of UTF-8 that are not compressed, and for Parquet; a directory of documents
    counts by their number, and any other file when it has been read.

    Attributes:
        locations: Files and directories, in the order in which they are read.
        options: How they are read.
    """

    locations: Sequence[Location]
    options: CorpusOptions
    _here: int = -1
    _size: float = 0.0  # of the location `_here`, in what cursors count there; 0 if unknown

    @classmethod
    def of(cls, sources: Sequence[str], options: CorpusOptions) -> "CorpusShare":
        """Return what knows the corpus of some sources.

        Raises:
            CorpusError: A source is missing.
        """
        return cls([each for source in sources for each in locate(source, options.glob)], options)

    def __post_init__(self) -> None:
        paths = [Path(each.path) for each in self.locations if _is_file(each)]
        if len(paths) == len(self.locations):
            weights = [_bytes_of(path) for path in paths]
        else:
            weights = [1] * len(self.locations)
        self._ends = list(accumulate(weights, initial=0))

    def before(self, cursor: Cursor) -> float:
        """Return the share of the corpus that comes before a place, from 0 to 1."""
        whole, here = self._ends[-1], cursor.location
        if not whole or here >= len(self.locations):
            return float(bool(self.locations))
        if here != self._here:
            self._here, self._size = here, self._measure(self.locations[here])
        within = min(1.0, cursor.offset / self._size) if self._size else 0.0
        weight = self._ends[here + 1] - self._ends[here]
        return (self._ends[here] + within * weight) / whole

    def chunks(self, count: int, cursor: Cursor) -> int:
        """Estimate the chunks of the corpus from those before a place; 0 where that says little."""
        share = self.before(cursor)
        return round(count / share) if share >= SHARE_MIN else 0

    def _measure(self, location: Location) -> float:
        """Return the size of a location in what cursors count in it; 0 where nobody knows.

        What is wrong with it its reader will say.
        """
        if location.is_directory:
            return len(find(location, self.options.glob))
        if not _is_file(location):
            return 0
        try:
            chosen = format_of(location, self.options)
            if chosen == "parquet":
                return int(pq.read_metadata(location.path).num_rows)
        except (OSError, CorpusError, pa.ArrowException):
            return 0
        is_plain = split_compression(location.path)[1] is None and (
            canonical(self.options.encoding) == UTF_8
        )
        return _bytes_of(Path(location.path)) if is_plain and chosen in BY_BYTES else 0


def _is_file(location: Location) -> bool:
    """Tell whether a location is a file of this machine."""
    return not location.is_directory and isinstance(location.filesystem, LocalFileSystem)


def _bytes_of(path: Path) -> int:
    """Return the bytes of a file; 0 of one that is gone, or that is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
