"""Sinks: the file formats that vectors are written in, behind one small protocol."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.jsonl import Jsonl
from embedfarm.collector.sinks.npy import Npy
from embedfarm.collector.sinks.parquet import Parquet
from embedfarm.collector.sinks.part_rows import KeptColumns, PartError, PartRows, Vectors
from embedfarm.collector.sinks.stored_parts import StoredParts
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.records import Result

__all__ = [
    "ENTRY_POINTS",
    "SINKS",
    "ColumnSink",
    "KeptColumns",
    "ListingSink",
    "PartError",
    "PartRows",
    "Sink",
    "SinkKind",
    "UnknownSink",
    "Vectors",
    "holding_sinks",
    "keeps_columns",
    "lists_stored",
    "open_sink",
    "sink_kind",
    "sink_names",
]  # fmt: skip


class Sink(Protocol):
    """One file format in one directory. A sink keeps no file open between calls.

    Writing is `resume`, then `write` for each part in order, then `finish`. The same parts make
    the same bytes, however often a crash interrupts; after an error a sink begins with `resume`.
    """

    def resume(self, parts: Sequence[Part]) -> None:
        """Continue after `parts`, the journalled ones; what was written behind them is undone.

        Raises:
            PartError: A journalled part is not there any more.
        """

    def write(self, batch: PartRows) -> Written:
        """Put the next part on the disk; it is there, durably, when this returns."""

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """Put a part of the finished output in `original` here, with other chunks that failed.

        All parts in a file of which one is replaced are then in the file here.
        """

    def finish(self, count: int, layout: Layout) -> None:
        """Make the files final, once all `count` chunks are written."""

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Return the rows of a part of a finished output.

        Raises:
            PartError: The files do not hold those rows.
            OSError: The files cannot be read.
        """

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Return all chunks of a part that is on the disk, also while others are not written yet.

        Args:
            part: A journalled part.
            layout: Layout of the output.
            failures: All chunks of the part that failed.

        Raises:
            PartError: The files do not hold the rows.
            OSError: The files cannot be read.
        """


@runtime_checkable
class ColumnSink(Sink, Protocol):
    """A sink that writes `PartRows.columns` beside the vectors."""

    def read_columns(self, part: Part, layout: Layout) -> KeptColumns | None:
        """Return the columns of the corpus that a part has beside its vectors; None for none.

        Raises:
            PartError: The files do not hold the part.
            OSError: The files cannot be read.
        """


@runtime_checkable
class ListingSink(Sink, Protocol):
    """A sink that leaves vectors where workers have stored them, and lists where that is."""

    @property
    def listed(self) -> AbstractSet[str]:
        """The names of the files that the parts on the disk list."""

    def write_results(self, results: Sequence[Result]) -> Written:
        """Put the next part on the disk, of consecutive results; it is there when this returns.

        Vectors of a result that has no receipt are stored first.
        """

    def read_some(self, part: Part, layout: Layout, start: int, limit: int) -> PartRows:
        """Return up to `limit` chunks of a part that is on the disk, from chunk `start` on.

        Raises:
            OutputError: The storage does not hold the rows.
            OSError: The files cannot be read.
        """


class UnknownSink(EmbedfarmError, ValueError):
    """Raised when there is no sink of a name, or the package that brings it does not load."""

    exit_status = 2


class SinkKind(Protocol):
    """One file format, which makes a sink of a directory.

    Attributes:
        about: What it is good for, in a few words for people.
        files: Regular expression of the names of its files, without `.partial`.
    """

    about: str
    files: str

    def __call__(self, directory: Path) -> Sink:
        """Make a sink; nothing on the disk changes yet."""


ENTRY_POINTS: Final = "embedfarm.sinks"
SINKS: Final[Mapping[str, SinkKind]] = {
    "parquet": Parquet, "npy": Npy, "jsonl": Jsonl, "stored": StoredParts,
}  # fmt: skip
"""Our own sinks by name; installed packages bring others by entry points."""


def sink_names() -> tuple[str, ...]:
    """Return the names of all sinks: our own, and those that installed packages bring."""
    others = sorted(each.name for each in entry_points(group=ENTRY_POINTS))
    return (*SINKS, *(name for name in others if name not in SINKS))


def holding_sinks() -> tuple[str, ...]:
    """Return the names of the sinks that have the vectors themselves."""
    return tuple(name for name in sink_names() if SINKS.get(name) is not StoredParts)


def sink_kind(name: str) -> SinkKind:
    """Return the kind of sink called `name`.

    Raises:
        UnknownSink: It cannot be had.
    """
    if name in SINKS:
        return SINKS[name]
    for each in entry_points(group=ENTRY_POINTS, name=name):
        try:
            found: SinkKind = each.load()
        except Exception as error:
            raise UnknownSink(f"format {name!r} of {each.value} does not load: {error}") from error
        return found
    raise UnknownSink(f"no format {name!r}; there are {', '.join(sink_names())}")


def keeps_columns(name: str) -> bool:
    """Tell whether the sink called `name` writes columns of the corpus beside the vectors.

    Raises:
        UnknownSink: It cannot be had.
    """
    return hasattr(sink_kind(name), ColumnSink.read_columns.__name__)


def lists_stored(name: str) -> bool:
    """Tell whether the sink called `name` lists stored vectors, instead of having them.

    Raises:
        UnknownSink: It cannot be had.
    """
    return hasattr(sink_kind(name), ListingSink.write_results.__name__)


def open_sink(name: str, directory: Path) -> Sink:
    """Return the sink called `name`; nothing on the disk changes yet.

    Raises:
        UnknownSink: It cannot be had.
    """
    return sink_kind(name)(directory)
