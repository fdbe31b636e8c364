"""A disk that refuses a sync once, and what is on it when the power goes.

It behaves as Linux does (https://lwn.net/Articles/752063): after a sync of a file that failed, the
kernel tells nobody else, shows what was written to whoever reads, and takes it for written. A later
sync succeeds, and brings only those blocks to the disk that were written again since.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

BLOCK_BYTES = 512
Inode: TypeAlias = tuple[int, int]


@dataclass
class _File:
    """A file of the disk, by whatever names.

    Attributes:
        held: Descriptor that keeps the file open, so that no other one gets its inode number.
        durable: Its content on the disk.
        lost: Blocks by number that a failed sync left in memory alone, as they were then.
    """

    held: int
    durable: bytes = b""
    lost: dict[int, bytes] = field(default_factory=dict)

    def read(self) -> list[bytes]:
        """Return the content that programs see, in blocks."""
        content = os.pread(self.held, os.fstat(self.held).st_size, 0)
        return _blocks(content)

    def fail(self) -> None:
        """Note as lost the blocks that a failed sync leaves in memory alone."""
        durable = dict(enumerate(_blocks(self.durable)))
        self.lost |= {n: each for n, each in enumerate(self.read()) if durable.get(n) != each}

    def sync(self) -> None:
        """Bring what is not lost to the disk."""
        durable, seen = dict(enumerate(_blocks(self.durable))), self.read()
        self.lost = {n: each for n, each in self.lost.items() if seen[n : n + 1] == [each]}
        size = os.fstat(self.held).st_size
        kept = [
            (durable.get(n, b"") if n in self.lost else each).ljust(BLOCK_BYTES, b"\0")
            for n, each in enumerate(seen)
        ]
        self.durable = b"".join(kept)[:size]


class LossyDisk:
    """A disk below a directory, which itself is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[Inode, _File] = {}
        self._names: dict[Inode, dict[str, Inode]] = {}
        self._root = _inode(root.stat())
        self._fails, self._error = -1, 0

    def close(self) -> None:
        """Close all files."""
        for each in self._files.values():
            os.close(each.held)

    def fail(self, number: int, error: int = errno.EIO) -> None:
        """Let one of the syncs to come fail: 0 is the next one."""
        self._fails, self._error = number, error

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Take over the syncs of this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._sync)
            yield

    def lose_power(self, target: Path) -> Path:
        """Write what is on the disk into a new directory, and return that."""
        self._restore(self._root, target)
        return target

    def _sync(self, descriptor: int) -> None:
        self._fails -= 1
        failed = self._fails == -1
        path = Path(f"/proc/self/fd/{descriptor}")
        if path.is_dir():
            # A file system that cannot write its own log refuses everything from then on. So a
            # sync of names that succeeds has brought all of them to the disk.
            if not failed:
                directory = _inode(path.stat())
                # Without a look at each name: others come and go in the directories above.
                with os.scandir(path) as entries:
                    self._names[directory] = {e.name: (directory[0], e.inode()) for e in entries}
        else:
            file = self._file(path)
            file.fail() if failed else file.sync()
        if failed:
            raise OSError(self._error, os.strerror(self._error))

    def _file(self, path: Path) -> _File:
        inode = _inode(path.stat())
        if inode not in self._files:
            self._files[inode] = _File(os.open(path, os.O_RDONLY))
        return self._files[inode]

    def _restore(self, inode: Inode, target: Path) -> None:
        target.mkdir()
        for name, each in self._names.get(inode, {}).items():
            if each in self._names:
                self._restore(each, target / name)
            else:
                file = self._files.get(each)
                (target / name).write_bytes(file.durable if file else b"")


def _inode(info: os.stat_result) -> Inode:
    return info.st_dev, info.st_ino


def _blocks(content: bytes) -> list[bytes]:
    return [content[n : n + BLOCK_BYTES] for n in range(0, len(content), BLOCK_BYTES)]
