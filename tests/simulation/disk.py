"""A disk that keeps what was synced, and after a power loss perhaps nothing else.

What programs see are real files below one directory. Beside them stands what would be there after a
power loss: the content of each file when it was synced last, the names in each directory when that
was, and what has changed since. A power loss brings the files into one of the states that a machine
may come back with: of the names that changed any may be as before, a file may lack what was written
last, or have zeros or half of it. A sync that fails leaves what was written where programs see it,
and no later sync puts it on the disk, as Linux does it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.simulation.mount import REAL, mounted, take_over
from tests.simulation.states import State
from tests.simulation.world import Effect, Killed, World

UNDONE: Final = State("rename undone", "a power loss takes back that a file took another's place")
FORGOTTEN: Final = State("new name forgotten", "a power loss takes a name that was not synced")
RETURNED: Final = State("deleted name back", "a power loss brings a name back that was deleted")
TORN: Final = State("write torn", "a power loss leaves half of what was written last")
ZEROED: Final = State("zeros in a file", "a power loss leaves zeros where something was written")
NOT_SYNCED: Final = State("sync failed", "a sync is answered by EIO")
NO_ROOM: Final = State("disk full", "a write is answered by ENOSPC")

Change: TypeAlias = int | tuple[int, bytes]
"""A new size of a file; or bytes, and where in it they were written."""


@dataclass(eq=False)
class File:
    """A file of the simulated disk.

    Attributes:
        durable: Its content after a power loss that keeps none of the changes.
        changes: Changes since the last sync, in order.
        taken: Number of changes that syncs have taken off `changes`.
    """

    durable: bytearray = field(default_factory=bytearray)
    changes: list[Change] = field(default_factory=list)
    taken: int = 0


@dataclass(eq=False)
class Folder:
    """A directory of the simulated disk.

    Attributes:
        entries: The files and directories in it, by name.
        durable: Its entries after a power loss that keeps none of the changes.
        changes: Changes of names since the last sync, in order; each maps the names that changed
            together to their new files or directories, or to None.
        taken: Number of changes that syncs have taken off `changes`.
    """

    entries: dict[str, "Node"] = field(default_factory=dict)
    durable: dict[str, "Node"] = field(default_factory=dict)
    changes: list[dict[str, "Node | None"]] = field(default_factory=list)
    taken: int = 0

    def change(self, names: dict[str, "Node | None"]) -> None:
        """Make names stand for other files or directories, or for nothing."""
        self.changes.append(names)
        _rename(self.entries, names)


Node: TypeAlias = File | Folder


def _rename(entries: dict[str, Node], names: dict[str, Node | None]) -> None:
    for name, node in names.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


def _write(content: bytearray, change: Change) -> None:
    size, data = (change, b"") if isinstance(change, int) else change
    if isinstance(change, int):
        del content[size:]
    content.extend(bytes(max(0, size - len(content))))
    content[size : size + len(data)] = data


@dataclass
class Disk:
    """The disk of one machine.

    Attributes:
        root: The directory that stands for the disk.
        sync_seconds: Returns how many seconds a sync takes.
        tell: Called with a line for each operation of a program on the disk.
        full: Whether there is no room for anything more.
        syncs_left: How many syncs of files succeed before one fails.
    """

    root: Path
    world: World
    sync_seconds: Callable[[], float]
    tell: Callable[[str], object]
    full: bool = False
    syncs_left: float = float("inf")
    _root: str = field(init=False)
    _top: Folder = field(default_factory=Folder)
    _open: dict[int, tuple[Node, str]] = field(default_factory=dict)  # and its path

    def __post_init__(self) -> None:
        self.root.mkdir()
        self._root = str(self.root)
        take_over()
        mounted[:] = [self]

    @contextmanager
    def unmounted(self) -> Iterator[None]:
        """Let the simulation change the files itself: nothing done meanwhile is a program's."""
        mounted.clear()
        yield
        mounted[:] = [self]

    def path(self, path: object, directory: int | None = None) -> str | None:
        """Return the whole path of something on this disk; None for anything else."""
        if directory is not None:
            above = self._open.get(directory)
            return None if above is None else f"{above[1]}/{path}"
        if not isinstance(path, str | Path):
            return None
        text = str(path)
        return text if text == self._root or text.startswith(self._root + "/") else None

    def node(self, descriptor: int) -> Node | None:
        """Return the file or directory that is open under a descriptor, None if not on the disk."""
        return self._open.get(descriptor, (None, ""))[0]

    def forget(self, descriptor: int) -> None:
        """Note that a descriptor was closed."""
        self._open.pop(descriptor, None)

    def _find(self, path: str) -> tuple[Folder, str]:
        """Return the directory that a path's last name is in, and that name."""
        *above, name = path[len(self._root) + 1 :].split("/")
        folder = self._top
        for each in above:
            found = folder.entries[each]
            if not isinstance(found, Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            folder = found
        return folder, name

    def _begin(self, *words: str) -> None:
        self.tell(" ".join(("disk:", *words)))
        self.world.effect(Effect.FILE)

    # What programs do with it.

    def open(self, path: str, flags: int, *arguments: Any, **named: Any) -> int:  # noqa: ANN401 # the system's
        """Open a file like `os.open`, and note what was created or truncated."""
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            descriptor: int = REAL.open(path, flags, *arguments, **named)
            self._open[descriptor] = self._look(path), path
            return descriptor
        self._begin("open", path)
        folder, name = self._find(path)
        if name not in folder.entries and flags & os.O_CREAT:
            self._take_room(path)
        descriptor = REAL.open(path, flags, *arguments, **named)
        if name not in folder.entries:
            folder.change({name: File()})
        file = folder.entries[name]
        if flags & os.O_TRUNC and isinstance(file, File):
            file.changes.append(0)
        self._open[descriptor] = file, path
        try:
            self.world.effect(Effect.FILE)
        except Killed:
            os.close(descriptor)
            raise
        return descriptor

    def _look(self, path: str) -> Node:
        if path == self._root:
            return self._top
        folder, name = self._find(path)
        return folder.entries[name]

    def write(self, descriptor: int, data: bytes, write: Callable[[bytes], int]) -> int:
        """Write at the file's position; only a part where the process dies or the disk is full."""
        if self.world.task is not None and self.world.task.process.dead:
            return len(data)  # what is in the buffers of a dead process is lost
        try:
            self._begin("write", self._open[descriptor][1], str(len(data)))
        except Killed:
            self._put(descriptor, data[: self._some(len(data))], write)
            raise
        if self.full and _place(descriptor) + len(data) > os.fstat(descriptor).st_size:
            data = data[: self._some(len(data) - 1)]
            if not data:
                self._take_room(self._open[descriptor][1])
        count = self._put(descriptor, data, write)
        self.world.effect(Effect.FILE)
        return count

    def _put(self, descriptor: int, data: bytes, write: Callable[[bytes], int]) -> int:
        place = _place(descriptor)
        count = write(data)
        file = self.node(descriptor)
        if isinstance(file, File) and data:
            file.changes.append((place, data))
        return count

    def _some(self, most: int) -> int:
        """Return how many bytes are written where not all of them are."""
        return self.world.random.choice([0, self.world.random.randint(0, max(0, most))])

    def _take_room(self, path: str) -> None:
        """Raise ENOSPC if the disk is full."""
        if self.full:
            NO_ROOM.reach()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def truncate(self, descriptor: int, size: int) -> None:
        """Set a file's size like `os.ftruncate`."""
        self._begin("truncate", self._open[descriptor][1], str(size))
        os.ftruncate(descriptor, size)
        file = self.node(descriptor)
        if isinstance(file, File):
            file.changes.append(size)
        self.world.effect(Effect.FILE)

    def sync(self, descriptor: int) -> None:
        """Sync a file or directory like `os.fsync`; other tasks go on meanwhile."""
        node, path = self._open[descriptor]
        self._begin("sync", path)
        if isinstance(node, Folder):
            self._sync_folder(node)
        else:
            self._sync_file(node)
        self.world.effect(Effect.FILE)

    def _sync_folder(self, folder: Folder) -> None:
        for names in self._take(folder):
            _rename(folder.durable, names)

    def _sync_file(self, file: File) -> None:
        changes = self._take(file)
        self._may_fail()
        for change in changes:
            _write(file.durable, change)

    def _take(self, node: "File | Folder") -> list[Any]:
        """Let a sync take its time; return the changes of before that no other one has taken."""
        upto = node.taken + len(node.changes)
        self.world.park(self.sync_seconds())
        count = max(0, upto - node.taken)
        changes = node.changes[:count]
        del node.changes[:count]
        node.taken += count
        return list(changes)

    def _may_fail(self) -> None:
        """Raise EIO if this sync is to fail; what it was to sync then never reaches the disk."""
        self.syncs_left -= 1
        if self.syncs_left < 0:
            self.syncs_left = float("inf")
            NOT_SYNCED.reach()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def replace(self, path: str, other: str) -> None:
        """Rename like `os.replace` and `os.rename`, within one directory only."""
        self._begin("replace", path, other)
        folder, name = self._find(path)
        target, new_name = self._find(other)
        if folder is not target:
            raise NotImplementedError("renaming from one directory to another")
        REAL.replace(path, other)
        folder.change({name: None, new_name: folder.entries[name]})
        self.world.effect(Effect.FILE)

    def unlink(self, path: str) -> None:
        """Delete a file like `os.unlink`."""
        self._remove(path, REAL.unlink)

    def rmdir(self, path: str) -> None:
        """Delete an empty directory like `os.rmdir`."""
        self._remove(path, REAL.rmdir)

    def _remove(self, path: str, remove: Callable[[str], None]) -> None:
        self._begin("remove", path)
        remove(path)
        folder, name = self._find(path)
        folder.change({name: None})
        self.world.effect(Effect.FILE)

    def mkdir(self, path: str, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 # the system's
        """Make a directory like `os.mkdir`."""
        self._begin("mkdir", path)
        self._take_room(path)
        REAL.mkdir(path, *arguments, **named)
        folder, name = self._find(path)
        folder.change({name: Folder()})
        self.world.effect(Effect.FILE)

    # What happens to it.

    def lose_power(self) -> None:
        """Bring the files into a state that they may have after a power loss.

        The processes on it must be gone, or go before they do anything more.
        """
        self._settle(self._top)
        with self.unmounted():
            shutil.rmtree(self.root)
            self._restore(self._top, self.root)
        self._open.clear()

    def _settle(self, folder: Folder) -> None:
        """Bring a directory, and all that is in it, into a state that a power loss may leave."""
        for names in self._survivors(folder):
            _rename(folder.durable, names)
        folder.changes.clear()
        folder.entries = dict(folder.durable)
        for node in dict.fromkeys(folder.entries.values()):
            if isinstance(node, Folder):
                self._settle(node)
            else:
                self._settle_file(node)

    def _survivors(self, folder: Folder) -> list[dict[str, Node | None]]:
        """Return the changes of a directory that survive the power loss, in order."""
        random, changes = self.world.random, folder.changes
        if not changes:
            return []
        how_many = random.choice([0, len(changes), random.randint(0, len(changes))])
        kept = random.choice([range(how_many), random.sample(range(len(changes)), how_many)])
        for names in (each for n, each in enumerate(changes) if n not in kept):
            _tell(names)
        return [changes[n] for n in sorted(kept)]

    def _settle_file(self, file: File) -> None:
        random, changes = self.world.random, file.changes
        if not changes:
            return
        kept = changes[: random.choice([0, len(changes), random.randint(0, len(changes))])]
        if kept and not isinstance(kept[-1], int):
            place, data = kept[-1]
            torn, zeroed = data[: random.randint(0, len(data))], bytes(len(data))
            data = random.choice([data, torn, zeroed])
            TORN.reach(data is torn)
            ZEROED.reach(data is zeroed)
            kept = [*kept[:-1], (place, data)]
        for change in kept:
            _write(file.durable, change)
        changes.clear()

    def _restore(self, folder: Folder, path: Path) -> None:
        path.mkdir()
        for name, node in folder.entries.items():
            if isinstance(node, Folder):
                self._restore(node, path / name)
            else:
                (path / name).write_bytes(node.durable)


def _tell(undone: dict[str, Node | None]) -> None:
    """Mark the state that a lost change of names stands for as reached."""
    if len(undone) > 1:
        UNDONE.reach()
    elif None in undone.values():
        RETURNED.reach()
    else:
        FORGOTTEN.reach()


def _place(descriptor: int) -> int:
    """Return the position in a file at which the next byte is written."""
    return os.lseek(descriptor, 0, os.SEEK_CUR)
