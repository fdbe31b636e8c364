"""A real disk for tests that is small enough to be filled."""

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Disk:
    """A file system in memory, with a file that takes up the room that is left."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        """Fill the disk, so that there is no room for another page."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE_BYTES))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 -- the other end of a loop

    def free(self, pages: int) -> None:
        """Make room for some pages."""
        with self._ballast.open("r+b") as file:
            size = file.seek(0, 2)
            assert size >= pages * PAGE_BYTES, "all of it is taken"
            file.truncate(size - pages * PAGE_BYTES)

    def clear(self) -> None:
        """Make all room free again."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Disk]:
    """Mount a disk at `path`, which must not exist; only root may do so."""
    path.mkdir()
    subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True
    )
    try:
        yield Disk(path)
    finally:
        subprocess.run(["/bin/umount", "--lazy", path], check=True)
