"""npy: one array for the whole corpus, row = index, to be mapped into memory."""

import hashlib
import os
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import IDS_FILE, Failure, Layout, Part, Written, read_failures
from embedfarm.collector.sinks.part_rows import Matrix, PartError, PartRows, Vectors, check_layout
from embedfarm.contract.durable_files import (
    HashingFile,
    replacing,
    sha256_of,
    sync,
    sync_directory,
)

EMBEDDINGS_FILE: Final = "embeddings.npy"
PARTIAL_SUFFIX: Final = ".partial"

_COPY_BYTES: Final = 1 << 20
_HEADER_BYTES: Final = 128
_MAGIC: Final = b"\x93NUMPY\x01\x00"


class Npy:
    """Writes and reads `embeddings.npy`, and `ids.jsonl` with one JSON string a line.

    The row of a failed chunk is NaN, or zero where vectors are integers. Until all rows are there
    both names end in `.partial` and the header is blank.
    """

    about: ClassVar[str] = "NumPy: a matrix, row by row"
    files: ClassVar[str] = r"embeddings\.npy|ids\.jsonl"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ids_end_bytes = 0

    def resume(self, parts: Sequence[Part]) -> None:
        """Cut both files off behind the parts; a crash in `finish` may have renamed them."""
        last = parts[-1] if parts else Written(file=EMBEDDINGS_FILE, bytes=0, sha256="")
        self._ids_end_bytes = last.ids_offset_bytes + last.ids_bytes
        for name, end in (
            (EMBEDDINGS_FILE, last.offset_bytes + last.bytes),
            (IDS_FILE, self._ids_end_bytes),
        ):
            _rename(self._directory / name, self._partial(name))
            _cut(self._partial(name), end)
        if parts:  # `finish` may have written the header, and its sync may have failed
            self._put(EMBEDDINGS_FILE, 0, bytes(_HEADER_BYTES), hashlib.sha256())
        sync_directory(self._directory)

    def write(self, batch: PartRows) -> Written:
        """Append the rows; they are written from where they are, without a copy."""
        rows, lines = fill_failed(batch), _lines(batch)
        offset = _HEADER_BYTES + batch.start * rows[0].nbytes
        digest = hashlib.sha256()
        self._put(EMBEDDINGS_FILE, offset, rows.data, digest)
        if lines:
            self._put(IDS_FILE, self._ids_end_bytes, lines, digest)
        sync_directory(self._directory)
        written = Written(
            file=EMBEDDINGS_FILE,
            offset_bytes=offset,
            bytes=rows.nbytes,
            ids_offset_bytes=self._ids_end_bytes,
            ids_bytes=len(lines),
            sha256=digest.hexdigest(),
        )
        self._ids_end_bytes += len(lines)
        return written

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """Write the rows over those in a copy of the array; ids are as they were."""
        path = self._directory / EMBEDDINGS_FILE
        if not path.exists():
            with replacing(path) as copy, (original / EMBEDDINGS_FILE).open("rb") as file:
                shutil.copyfileobj(file, copy, _COPY_BYTES)
        rows = fill_failed(batch)
        with path.open("r+b") as file:
            file.seek(part.offset_bytes)
            file.write(rows.data)
            sync(file)
        here, *ids = part.spans(original)
        written = {name: getattr(part, name) for name in Written.__struct_fields__}
        return Written(**written | {"sha256": sha256_of([here._replace(path=path), *ids])})

    def finish(self, count: int, layout: Layout) -> None:
        """Write the header and take the suffix away; a corpus without chunks has no array."""
        if not count:
            return
        self._put(EMBEDDINGS_FILE, 0, make_header(count, layout), hashlib.sha256())
        for name in (EMBEDDINGS_FILE, IDS_FILE):
            _rename(self._partial(name), self._directory / name)
        sync_directory(self._directory)

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Return the rows of a part, mapped into memory, without those of failed chunks."""
        matrix = self._map(layout)[part.start : part.end]
        ids = self._read_ids(part) if layout.ids else None
        vectors = PartRows(part.start, ids, matrix, self._good(part, matrix)).vectors()
        return check_layout(vectors, part, layout)

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Return the rows of a part, mapped into memory; those of failed chunks as they are."""
        shape, offset = (part.count, layout.dimensions), part.offset_bytes
        with self._open(EMBEDDINGS_FILE) as file:
            try:
                matrix = np.memmap(file, layout.dtype, "r", offset, shape)
            except ValueError as error:
                raise PartError(f"{file.name} ends before {part.end}: {error}") from error
        good = np.ones(part.count, dtype=np.bool_)
        good[np.array([each.index - part.start for each in failures], dtype=np.int64)] = False
        ids = self._read_ids(part) if layout.ids else None
        return PartRows(part.start, ids, np.asarray(matrix), good)

    def _good(self, part: Part, matrix: Matrix) -> NDArray[np.bool_]:
        """Tell which rows hold a vector: by NaN, or by the error list for integers."""
        if matrix.dtype.kind == "f":
            return np.asarray(~np.isnan(matrix[:, 0]))  # a failed row is NaN throughout
        good = np.ones(len(matrix), dtype=np.bool_)
        if part.errors:
            failed = np.array([line.index for line in read_failures(self._directory)])
            good[failed[(failed >= part.start) & (failed < part.end)] - part.start] = False
        return good

    def _map(self, layout: Layout) -> Matrix:
        """Map the whole array into memory, its header checked to the byte."""
        path = self._directory / EMBEDDINGS_FILE
        try:
            matrix: Matrix = np.asarray(np.load(path, mmap_mode="r"))
        except (ValueError, EOFError) as error:
            raise PartError(f"is not an array as it was written: {error}") from error
        with path.open("rb") as file:
            if file.read(_HEADER_BYTES) != make_header(len(matrix), layout):
                raise PartError(f"has another header than {layout.dimensions} {layout.dtype} a row")
        return matrix

    def _read_ids(self, part: Part) -> list[str]:
        """Read one id for each chunk of the part."""
        with self._open(IDS_FILE) as file:
            file.seek(part.ids_offset_bytes)
            lines = file.read(part.ids_bytes).splitlines()
        try:
            ids = [msgspec.json.decode(line, type=str) for line in lines]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PartError(f"has a damaged line in {IDS_FILE}: {error}") from error
        if len(ids) != part.count:
            raise PartError(f"has {len(ids)} instead of {part.count} lines in {IDS_FILE}")
        return ids

    def _open(self, name: str) -> BinaryIO:
        """Open a file to read, whatever it is called just now: `finish` renames it."""
        names = (self._directory / name, self._partial(name))
        for path in names:
            with suppress(FileNotFoundError):
                return path.open("rb")
        return names[0].open("rb")  # it was renamed between the two

    def _partial(self, name: str) -> Path:
        """Return the path of a file while it grows."""
        return self._directory / (name + PARTIAL_SUFFIX)

    def _put(
        self, name: str, offset: int, content: bytes | memoryview, digest: "hashlib._Hash"
    ) -> None:
        """Write durably at a place of a growing file; what is written goes through `digest`."""
        with os.fdopen(os.open(self._partial(name), os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(offset)
            HashingFile(file, digest).write(content)
            sync(file)


def fill_failed(batch: PartRows) -> Matrix:
    """Return the rows of a batch, those without a vector as NaN, or as zero for integers."""
    if batch.good.all():
        return batch.matrix
    rows = batch.matrix.copy()
    rows[~batch.good] = np.nan if rows.dtype.kind == "f" else 0
    return rows


def _lines(batch: PartRows) -> bytes:
    """Return the ids, one JSON string a line."""
    return b"".join(msgspec.json.encode(identifier) + b"\n" for identifier in batch.ids or ())


def make_header(count: int, layout: Layout) -> bytes:
    """Return the npy 1.0 header of a (count, dimensions) array, always of the same size."""
    shape = (count, layout.dimensions)
    text = repr({"descr": np.dtype(layout.dtype).str, "fortran_order": False, "shape": shape})
    size = _HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + struct.pack("<H", size) + text.ljust(size - 1).encode() + b"\n"


def _rename(path: Path, other: Path) -> None:
    """Rename a file that need not exist."""
    if path.exists():
        path.replace(other)


def _cut(path: Path, size: int) -> None:
    """Bring a file back to an earlier size, durably; at size 0 remove it."""
    if not size:
        path.unlink(missing_ok=True)
        return
    if not path.exists() or path.stat().st_size < size:
        raise PartError(f"{path} does not have the {size} bytes that were written")
    with path.open("r+b") as file:
        file.truncate(size)
        sync(file)
