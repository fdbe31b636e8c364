"""Vectors that workers of this host made before, in a file that they share.

The file is SQLite's. Rows are in the order in which they came, and a full file loses the first
ones. A row of the older half of a full file is to be kept anew when it is found, so that what goes
is about what was not used for longest. Nothing in the file is needed: whatever fails costs vectors
that are made once more.
"""

import logging
import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.private_directories import make_private

PAGE_BYTES: Final = 4096
CHECKSUM_BYTES: Final = 4
ROW_BYTES: Final = 80  # of a vector beside its components, with its place in the index
KEYS_AT_ONCE: Final = 256  # in a query; with more or fewer of them a key takes longer
TRANSACTION_BYTES: Final = 2 << 20
ROOM: Final = 2  # times the bytes of new rows that are free before they come: pages are not full
BUSY_SECONDS: Final = 1.0  # that a transaction of another worker is waited for
FILE_NAME: Final = re.compile(r"vectors-1-(\d+)\.sqlite")  # 1 is the version of its layout
SETUP: Final = (
    f"PRAGMA page_size = {PAGE_BYTES}",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = OFF",  # a file that a power cut damages is given up for a new one
    """CREATE TABLE IF NOT EXISTS vectors
    (place INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, vector BLOB NOT NULL)""",
)

T = TypeVar("T")
log = logging.getLogger(__name__)


class KeptVector(NamedTuple):
    """A vector that was found.

    Attributes:
        vector: Its components, shape (dimensions,).
        fades: Whether it is to be kept anew, since it would soon go.
    """

    vector: NDArray[np.float32]
    fades: bool


@dataclass
class VectorCache:
    """Vectors by a key of 16 bytes, on the disk of this host; safe between threads and processes.

    Attributes:
        directory: Directory of the file; it is made, and closed to others.
        bytes_max: Most bytes of the file and its log together.
    """

    directory: Path
    bytes_max: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _connection: sqlite3.Connection | None = None
    _number: int = 0  # of the file that this process uses
    _number_min: int = 1  # of a file that is not known to be damaged
    _fails: bool = False

    def find(self, keys: Sequence[bytes]) -> dict[bytes, KeptVector]:
        """Return by key the vectors that are there, and sound."""
        return self._use(lambda file: self._select(file, keys), {})

    def keep(self, vectors: Mapping[bytes, NDArray[np.float32]]) -> None:
        """Keep vectors, in place of those with the same keys; the oldest ones go for them."""
        rows = [(key, _to_row(key, vector)) for key, vector in vectors.items()]
        step = max(1, TRANSACTION_BYTES // (len(rows[0][1]) + ROW_BYTES)) if rows else 1
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            if not self._use(lambda file: self._insert(file, part), otherwise=False):  # noqa: B023 # called at once
                return

    def _select(self, file: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, KeptVector]:
        older = self._older_half(file)
        found = {}
        for first in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[first : first + KEYS_AT_ONCE]
            marks = ",".join("?" * len(some))
            query = f"SELECT place, key, vector FROM vectors WHERE key IN ({marks})"  # noqa: S608 # marks alone
            for place, key, row in file.execute(query, some):
                vector = _from_row(key, row)
                if vector is not None:
                    found[key] = KeptVector(vector, place <= older)
        return found

    def _older_half(self, file: sqlite3.Connection) -> int:
        """Return the last place of the older half of a full file; 0 of one that has room."""
        if _pages(file, "page_count") < self._pages_max // 2:
            return 0
        (first,) = file.execute("SELECT min(place) FROM vectors").fetchone()
        (last,) = file.execute("SELECT max(place) FROM vectors").fetchone()
        return ((first or 0) + (last or 0)) // 2

    def _insert(self, file: sqlite3.Connection, rows: Sequence[tuple[bytes, bytes]]) -> bool:
        """Insert rows in a transaction; return False if its log would have no room."""
        logged = self._path(self._number, "-wal")
        if logged.exists() and logged.stat().st_size > self.bytes_max // 16:
            (busy, *_) = file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                return False
        wanted = ROOM * sum(len(row) + ROW_BYTES for _, row in rows) // PAGE_BYTES
        with file:
            file.execute("BEGIN IMMEDIATE")
            while _pages_free(file, self._pages_max) < wanted:
                oldest = "SELECT place FROM vectors ORDER BY place LIMIT ?"
                delete = f"DELETE FROM vectors WHERE place IN ({oldest})"  # noqa: S608 # as above
                if not file.execute(delete, (len(rows),)).rowcount:
                    break
            insert = "INSERT OR REPLACE INTO vectors (key, vector) VALUES (?, ?)"
            file.executemany(insert, rows)
        return True

    @property
    def _pages_max(self) -> int:
        """Most pages of the file itself; an eighth of the room is for its log."""
        return self.bytes_max * 7 // 8 // PAGE_BYTES

    def _use(self, call: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Call something with the file; return `otherwise` if the file or the disk fails."""
        with self._lock:
            try:
                result = call(self._file())
            except (sqlite3.Error, OSError) as error:
                if not self._fails:
                    log.warning("the vector cache in %s fails: %s", self.directory, error)
                self._fails = True
                if type(error) is sqlite3.DatabaseError:  # damaged, or no file of SQLite's
                    self._number_min = self._number + 1
                self.close()
                return otherwise
            self._fails = False
            return result

    def _file(self) -> sqlite3.Connection:
        """Return a connection to the newest file that is not damaged, and remove older ones.

        A file has another number than the one before: those who still use that would remove the
        log of one with its name.

        Raises:
            OSError: The directory is not ours.
            sqlite3.Error: The file cannot be used.
        """
        make_private(self.directory)
        if self.directory.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self.directory} belongs to another user")
        names = (FILE_NAME.fullmatch(each.name) for each in os.scandir(self.directory))
        numbers = {int(name[1]) for name in names if name}
        if self._connection is not None:
            if max(numbers, default=0) == self._number:
                return self._connection
            if self._number not in numbers:  # it was removed
                self._number_min = self._number + 1
            self.close()
        self._number = max(self._number_min, *numbers, 1)
        self._connection = self._connect(self._path(self._number))
        for number in numbers - {self._number}:
            for suffix in ("", "-wal", "-shm"):
                self._path(number, suffix).unlink(missing_ok=True)
        return self._connection

    def _connect(self, path: Path) -> sqlite3.Connection:
        file = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            for statement in (*SETUP, f"PRAGMA max_page_count = {self._pages_max}"):
                file.execute(statement)
            _check_size(file, self._pages_max)
        except BaseException:
            file.close()
            raise
        return file

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.directory / f"vectors-1-{number}.sqlite{suffix}"

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _pages(file: sqlite3.Connection, name: str) -> int:
    return int(file.execute(f"PRAGMA {name}").fetchone()[0])


def _check_size(file: sqlite3.Connection, pages_max: int) -> None:
    """Refuse a file from before the settings allowed less: one never becomes smaller.

    Raises:
        sqlite3.DatabaseError: It has more pages than it may have.
    """
    if _pages(file, "page_count") > pages_max:
        raise sqlite3.DatabaseError("it is larger than it may be now, and is begun anew")


def _pages_free(file: sqlite3.Connection, pages_max: int) -> int:
    """Return the pages that new rows may take."""
    return pages_max - _pages(file, "page_count") + _pages(file, "freelist_count")


def _to_row(key: bytes, vector: NDArray[np.float32]) -> bytes:
    """Return a vector behind its checksum, which is that of the key as well."""
    components = vector.astype("<f4", copy=False).tobytes()
    return _checksum(key, components) + components


def _from_row(key: object, row: object) -> NDArray[np.float32] | None:
    """Return the vector of a row; None where the row is damaged, or of another key."""
    if not isinstance(key, bytes) or not isinstance(row, bytes):
        return None  # damaged where their types are
    components = memoryview(row)[CHECKSUM_BYTES:]
    if _checksum(key, components) != row[:CHECKSUM_BYTES] or len(components) % 4:
        return None
    return np.frombuffer(components, "<f4")


def _checksum(key: bytes, components: bytes | memoryview) -> bytes:
    return zlib.crc32(components, zlib.crc32(key)).to_bytes(CHECKSUM_BYTES, "little")
