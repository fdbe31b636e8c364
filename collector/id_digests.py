"""Ids that occur more than once: found by a digest of each, in a file beside the journal."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.collector.row_file import RowFile

DIGEST: Final = np.dtype("<u8")
COMPARED_MAX: Final = 1 << 21  # digests in memory at a time; with what sorting takes 64 bytes each


class RepeatedIds(msgspec.Struct, frozen=True):
    """Chunks whose id an earlier chunk has.

    Attributes:
        count: Number of such chunks.
        first: Index of the first of them.
        earlier: Index of the chunk that had its id before.
    """

    count: int
    first: int
    earlier: int


class IdDigests(RowFile):
    """Digests of the ids of an output's chunks, eight bytes each, in order of the chunks.

    Two different ids have the same digest with a probability of 2^-64, so that among a billion
    chunks with ids of their own one in 37 outputs has a pair that seems to repeat.

    Args:
        path: File of the digests; it is made with the first of them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, DIGEST.itemsize)

    def add(self, start: int, ids: Iterable[str]) -> None:
        """Add the ids of the chunks from `start` on, as `append` does."""
        self.append(start, b"".join(map(_digest, ids)))

    def find_repeated(self, count: int) -> RepeatedIds | None:
        """Find the ids that occur more than once among `count` chunks; None where none does.

        Nothing is found where a digest is missing, as in an output that was begun by a version
        that kept none.
        """
        if not count or not self.holds(count):
            return None
        shares = -(-count // COMPARED_MAX)
        pairs = np.concatenate([self._repeated(share, shares) for share in range(shares)])
        if not len(pairs):
            return None
        first, earlier = pairs[pairs[:, 0].argmin()].tolist()
        return RepeatedIds(len(pairs), first, earlier)

    def _repeated(self, share: int, shares: int) -> NDArray[np.int64]:
        """Return rows of a chunk and the last one before it with its id, for a share of all ids."""
        found = [
            (digests[own], start + own)
            for start, digests in self._read()
            for own in [np.flatnonzero(digests % shares == share)]
        ]
        digests = np.concatenate([each for each, _ in found])
        indices = np.concatenate([each for _, each in found])
        order = digests.argsort(kind="stable")
        repeats = np.flatnonzero(digests[order[1:]] == digests[order[:-1]])
        return np.column_stack([indices[order[repeats + 1]], indices[order[repeats]]])

    def _read(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield digests in pieces, each with the index of its first chunk."""
        start = 0
        with self.path.open("rb") as file:
            while data := file.read(COMPARED_MAX * DIGEST.itemsize):
                yield start, np.frombuffer(data, dtype=DIGEST)
                start += len(data) // DIGEST.itemsize


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=DIGEST.itemsize).digest()
