"""A file with as many bytes for each chunk of an output, written with its parts."""

from pathlib import Path

from embedfarm.contract.durable_files import sync, sync_directory


class RowFile:
    """Bytes for each chunk of an output that is being written, in order of the chunks.

    Args:
        path: The file; it is made with the first chunk.
        row_bytes: Bytes for each chunk.
    """

    def __init__(self, path: Path, row_bytes: int) -> None:
        self.path = path
        self._row_bytes = row_bytes

    def resume(self, count: int) -> None:
        """Drop what goes beyond the first `count` chunks."""
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.truncate(min(self.path.stat().st_size, count * self._row_bytes))

    def append(self, start: int, data: bytes) -> None:
        """Add the bytes of the chunks from `start` on, which are on the disk then.

        Nothing is added where those of a chunk before are missing, as in an output that was begun
        by a version that kept none: what follows would stand in their place.

        Raises:
            OSError: The disk refused; `resume`, and append again.
        """
        if self.holds(start):
            with self.path.open("ab") as file:
                file.write(data)
                sync(file)
            if not start:
                sync_directory(self.path.parent)

    def holds(self, count: int) -> bool:
        """Tell whether it has the bytes of the first `count` chunks, and no others."""
        size = self.path.stat().st_size if self.path.exists() else 0
        return size == count * self._row_bytes

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
