"""Sinks: the file formats that vectors are written in, behind one small protocol."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.batch import Batch, PartError, Vectors
from embedfarm.collector.sinks.jsonl import Jsonl
from embedfarm.collector.sinks.npy import Npy
from embedfarm.collector.sinks.parquet import Parquet

__all__ = ["SINKS", "Batch", "PartError", "Sink", "Vectors", "open_sink"]


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

    def write(self, batch: Batch) -> Written:
        """Put the next part on the disk; it is there, durably, when this returns."""

    def replace(self, part: Part, batch: Batch, original: Path) -> Written:
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

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> Batch:
        """Return all chunks of a part that is on the disk, also while others are not written yet.

        Args:
            part: A journalled part.
            layout: Layout of the output.
            failures: All chunks of the part that failed.

        Raises:
            PartError: The files do not hold the rows.
            OSError: The files cannot be read.
        """


SINKS: Final[dict[str, Callable[[Path], Sink]]] = {
    "parquet": Parquet,
    "npy": Npy,
    "jsonl": Jsonl,
}


def open_sink(name: str, directory: Path) -> Sink:
    """Return the sink called `name`; nothing on the disk changes yet.

    Raises:
        ValueError: There is no sink of that name.
    """
    if name not in SINKS:
        raise ValueError(f"no format {name!r}; there are {', '.join(SINKS)}")
    return SINKS[name](directory)
