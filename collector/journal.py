"""The parts of an unfinished output, one durable line each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.collector.manifest import Failure, Layout, OutputError, Part, WorkerFigures
from embedfarm.collector.source_check import Mark
from embedfarm.contract.durable_files import ByteRange, read_pieces, replacing, sync


class JournalError(OutputError):
    """Raised when a journal does not continue from line to line."""


class JournalLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: a part that is on the disk, and what the manifest will need to know of it.

    Attributes:
        mark: A place in the source, behind which no row of the part begins.
        reused: How many vectors of the part were there before, by the output that had them.
    """

    part: Part
    layout: Layout
    failures: list[Failure]
    workers: dict[str, WorkerFigures]
    mark: Mark | None = None
    reused: dict[str, int] = msgspec.field(default_factory=dict)


END: Final = b"\n"

_decoder = msgspec.json.Decoder(JournalLine)


class Journal:
    """Appends entries that are on the disk when `append` returns.

    A line gets its end, which makes it one to those who read, once it is on the disk: what they
    have seen survives a loss of power, though it may be away until the journal is opened again, if
    that end was lost. A crash can only damage the last line, which has no end yet: opening the
    journal cuts it off, or gives it its end if all of it is there.

    A line whose sync failed may be there for as long as the machine runs and yet never reach the
    disk: the kernel tells of the failure once, and then counts the pages as written. Therefore the
    sound lines are written into a new file before they are believed, when the journal is opened and
    after an `append` that the disk refused. They say the truth: each of their parts was on the disk
    before its line was written.

    Raises:
        JournalError: Another line is damaged, or a part does not begin where the last one ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self._bytes, ended = _measure(path)
        self._durable = False
        self._renew()
        if not ended:
            with path.open("ab") as file:
                file.write(END)
            self._bytes += len(END)

    def __iter__(self) -> Iterator[JournalLine]:
        """Yield the entries in order, read from the disk: their failures need not fit in memory."""
        with self._path.open("rb") as file:
            yield from map(_decoder.decode, file)

    def append(self, entry: JournalLine) -> None:
        """Add a line; it is on the disk when this returns."""
        line = msgspec.json.encode(entry)
        if not self._durable:
            self._renew()
        self._durable = False
        with self._path.open("ab") as file:
            file.write(line)
            sync(file)
            file.write(END)
        self._bytes += len(line + END)
        self._durable = True

    def recover(self) -> None:
        """Cut off, durably, what an `append` that the disk refused has left: it needs no room.

        The line may be whole, and whoever opens the journal next would give it its end. Therefore
        it goes before the rows of its part do.
        """
        if not self._durable:
            with self._path.open("r+b") as file:
                file.truncate(self._bytes)
                sync(file)

    def keep(self, count: int) -> None:
        """Take the lines behind the first `count` away, durably."""
        with self._path.open("rb") as file:
            self._bytes = sum(len(line) for line, _ in zip(file, range(count), strict=False))
        self._renew()

    def _renew(self) -> None:
        """Write the sound lines into a new file, which takes the place of the old one."""
        with replacing(self._path) as file:
            file.writelines(read_pieces(ByteRange(self._path, 0, self._bytes)))
        self._durable = True


def _measure(path: Path) -> tuple[int, bool]:
    """Return the size in bytes of the lines that are whole, and whether the last has its end.

    A loss of power may leave zeros for what was not on the disk, such as that end.
    """
    sound, expected, ended = 0, 0, True
    size = path.stat().st_size
    with path.open("rb") as file:
        for number, read in enumerate(file, 1):
            is_last = sound + len(read) == size
            line = read.rstrip(b"\0")
            entry = _decode(line)
            if entry is None and is_last:
                break
            if entry is None or entry.part.start != expected:
                raise JournalError(f"{path}, line {number} does not continue at chunk {expected}")
            sound, expected, ended = sound + len(line), entry.part.end, line.endswith(END)
    return sound, ended


def _decode(line: bytes) -> JournalLine | None:
    """Return the entry in a line; None when the line was torn."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
