"""stored: lists of where workers have stored the vectors, which stay there."""

import errno
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.manifest import Failure, Layout, Part, Written
from embedfarm.collector.sinks.part_files import keep_parts, write_part
from embedfarm.collector.sinks.part_rows import (
    Matrix,
    PartError,
    PartRows,
    Vectors,
    check_layout,
)
from embedfarm.collector.sinks.stored_listing import Listing, Piece, ask, read_listing, read_vectors
from embedfarm.collector.stored_vectors import known_places
from embedfarm.contract.records import Result
from embedfarm.contract.stored_results import StoredFiles, checksum_of, make_name

SUFFIX: Final = "stored.json"


class StoredParts:
    """Writes and reads `part-<start>.stored.json`, each of which lists where its vectors are.

    Vectors that come without a receipt, such as reused ones, are stored in files of their own
    beside those that workers have stored.
    """

    about: ClassVar[str] = "lists of where the vectors are stored, none of which is copied"
    files: ClassVar[str] = rf"part-\d{{12}}\.{SUFFIX}"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()

    @property
    def listed(self) -> AbstractSet[str]:
        """The names of the files that the parts on the disk list, in whichever place."""
        return self._names

    def resume(self, parts: Sequence[Part]) -> None:
        """Check the files of the parts, and remove those of other parts."""
        keep_parts(self._directory, parts, SUFFIX)
        listings = [read_listing(self._directory, part) for part in parts]
        self._names = {piece.file for listing in listings for piece in listing.pieces}

    def write(self, batch: PartRows) -> Written:
        """Store the vectors of a part in a file, and list where they are."""
        place, indices = self._place(), batch.start + np.arange(len(batch.good))
        pieces = _put(place, indices[batch.good], batch.matrix[batch.good])
        listing = Listing(place, pieces, indices[~batch.good].tolist(), batch.ids)
        return self._list(batch.start, listing, batch.matrix[:1].nbytes)

    def write_results(self, results: Sequence[Result]) -> Written:
        """List where the vectors of consecutive results are, which make up the next part."""
        place, first = self._place(), results[0]
        failed = sorted({error.index for result in results for error in result.errors})
        pieces = [
            Piece(result.start, result.count, receipt.file, receipt.offset, receipt.checksum)
            for result in results
            if (receipt := result.receipt) is not None
        ]
        own = [result for result in results if result.receipt is None]
        if own:
            indices = np.concatenate(
                [np.arange(each.start, each.start + each.count) for each in own]
            )
            good = np.isin(indices, failed, invert=True)
            matrix = np.concatenate([each.matrix() for each in own])
            pieces += _put(place, indices[good], matrix[good])
            pieces.sort(key=lambda piece: piece.start)
        ids = None
        if first.ids is not None:
            ids = [identifier for result in results for identifier in result.ids or ()]
        return self._list(first.start, Listing(place, pieces, failed, ids), first.vector_bytes)

    def replace(self, part: Part, batch: PartRows, original: Path) -> Written:
        """List a part anew, with more vectors; these are stored in a file of their own."""
        old, indices = read_listing(original, part), batch.start + np.arange(len(batch.good))
        before = np.isin(indices, old.failed, invert=True)
        new = batch.good & ~before
        pieces = [each for piece in old.pieces for each in _cut(piece, before, batch)]
        pieces += _put(old.place, indices[new], batch.matrix[new])
        pieces.sort(key=lambda piece: piece.start)
        listing = Listing(old.place, pieces, indices[~batch.good].tolist(), old.ids)
        return self._list(part.start, listing, batch.matrix[:1].nbytes)

    def finish(self, count: int, layout: Layout) -> None:
        """Do nothing: every part is final already."""

    def read(self, part: Part, layout: Layout) -> Vectors:
        """Read the rows of a part from where they are stored."""
        return check_layout(
            self.read_some(part, layout, part.start, part.count).vectors(), part, layout
        )

    def read_all(self, part: Part, layout: Layout, failures: Sequence[Failure]) -> PartRows:
        """Read all chunks of a part from where they are stored."""
        del failures  # the list has them, too
        return self.read_some(part, layout, part.start, part.count)

    def read_some(self, part: Part, layout: Layout, start: int, limit: int) -> PartRows:
        """Read up to `limit` chunks of a part from chunk `start` on, and nothing else of it."""
        listing, end = read_listing(self._directory, part), min(start + limit, part.end)
        matrix = read_vectors(listing, start, end, layout)
        good = np.isin(np.arange(start, end), listing.failed, invert=True)
        ids = listing.ids
        return PartRows(
            start, None if ids is None else ids[start - part.start : end - part.start], matrix, good
        )

    def _place(self) -> str:
        """Return where the results of this run are stored.

        Raises:
            PartError: Nobody has said where.
        """
        places = known_places(self._directory)
        if not places:
            raise PartError(f"nobody has said where the vectors of {self._directory} are stored")
        return places[-1]

    def _list(self, start: int, listing: Listing, row_bytes: int) -> Written:
        """Write the file of a part durably, and remember what it lists."""
        path = self._directory / f"part-{start:012d}.{SUFFIX}"
        written = write_part(path, lambda file: file.write(msgspec.json.encode(listing)))
        self._names.update(piece.file for piece in listing.pieces)
        size = row_bytes * sum(piece.count for piece in listing.pieces)
        return msgspec.structs.replace(written, stored_bytes=size)


def _put(place: str, indices: NDArray[np.int64], matrix: Matrix) -> list[Piece]:
    """Store the vectors of some chunks, which are in order, in a file; return where they are.

    Raises:
        PartError, OSError: The storage refuses.
    """
    if not len(indices):
        return []
    rows = np.ascontiguousarray(matrix)
    name = make_name("", int(indices[0]), int(indices[-1]) + 1)

    def put(files: StoredFiles) -> None:
        files.put(name, rows.data)
        if (size := files.size(name)) != rows.nbytes:
            raise OSError(errno.EIO, f"{size} of {rows.nbytes} bytes of {name} are there")

    ask(place, put)
    bounds = [0, *(1 + np.flatnonzero(np.diff(indices) != 1)).tolist(), len(indices)]
    return [
        Piece(
            int(indices[first]), end - first, name, first * rows.strides[0],
            checksum_of(rows[first:end].data),
        )
        for first, end in pairwise(bounds)
    ]  # fmt: skip


def _cut(piece: Piece, kept: NDArray[np.bool_], batch: PartRows) -> Iterator[Piece]:
    """Yield the runs of rows of a piece that are kept; the piece itself if all are.

    Args:
        piece: The piece.
        kept: Whether each chunk of the part is kept.
        batch: All chunks of the part.
    """
    first = piece.start - batch.start
    own = kept[first : first + piece.count]
    if own.all():
        yield piece
        return
    rows = np.ascontiguousarray(batch.matrix[first : first + piece.count])
    edges = np.flatnonzero(np.diff(own, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        offset, checksum = begin * rows.strides[0], checksum_of(rows[begin:end].data)
        yield Piece(piece.start + begin, end - begin, piece.file, piece.offset + offset, checksum)
