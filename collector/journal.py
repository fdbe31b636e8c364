"""The parts of an unfinished output, one durable line each."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from collector.files import sync, sync_directory
from collector.manifest import Failure, Layout, OutputError, Part, WorkerFigures


class JournalError(OutputError):
    """A journal that does not continue from line to line."""


class Entry(msgspec.Struct, kw_only=True):
    """One line: a part that is on the disk, and what the manifest will need to know of it."""

    part: Part
    layout: Layout
    failures: list[Failure]
    workers: dict[str, WorkerFigures]


_decoder = msgspec.json.Decoder(Entry)


class Journal:
    """Appends entries that are on the disk when `append` returns.

    A crash can only damage the last line, whose part nobody was told about yet: opening the
    journal cuts such a line off. So does the next `append`, after one that the disk refused.

    Raises:
        JournalError: Another line is damaged, or a part does not begin where the last one ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        sync_directory(path.parent)
        self._bytes = _sound_bytes(path)
        with path.open("r+b") as file:
            file.truncate(self._bytes)
            sync(file)

    def __iter__(self) -> Iterator[Entry]:
        """The entries in order, read from the disk: their failures need not fit in memory."""
        with self._path.open("rb") as file:
            yield from map(_decoder.decode, file)

    def append(self, entry: Entry) -> None:
        """Add a line; it is on the disk when this returns."""
        line = msgspec.json.encode(entry) + b"\n"
        with self._path.open("r+b") as file:
            file.truncate(self._bytes)
            file.seek(self._bytes)
            file.write(line)
            sync(file)
        self._bytes += len(line)


def _sound_bytes(path: Path) -> int:
    """Size of the lines that are whole."""
    sound = expected = 0
    size = path.stat().st_size
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = _decode(line)
            is_last = sound + len(line) == size
            if entry is None and is_last:
                break
            if entry is None or entry.part.start != expected:
                raise JournalError(f"{path}, line {number} does not continue at chunk {expected}")
            sound, expected = sound + len(line), entry.part.end
    return sound


def _decode(line: bytes) -> Entry | None:
    """The entry in a line, None when the line was torn."""
    try:
        return _decoder.decode(line) if line.endswith(b"\n") else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
