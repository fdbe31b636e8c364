"""An index of texts by their digests: on disk, and in bounded memory, however many there are."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

KEY: Final = np.dtype("<u8")
REST: Final = np.dtype([("low", "<u8"), ("place", "<i8")])
FANOUT: Final = 8  # runs of a level that are merged into one of the next level
IN_MEMORY_MAX: Final = 1 << 18  # entries of a run that is not put on the disk
MERGED_MAX: Final = 1 << 20  # entries that are sorted at a time when runs are merged
NOWHERE: Final = -1

Keys: TypeAlias = NDArray[np.uint64]
Piece: TypeAlias = tuple[Keys, NDArray[np.void]]


class SortedRun(NamedTuple):
    """Entries in the order of their keys, no digest twice.

    Attributes:
        keys: First half of each digest.
        rest: Second half of each digest, and the place of the text.
        level: How often its entries were merged.
        paths: Files that hold it; none if it is in memory.
    """

    keys: Keys
    rest: NDArray[np.void]
    level: int
    paths: Sequence[Path] = ()


class DigestIndex:
    """Finds the place that a text was added with first, by its digest.

    Entries are kept in sorted runs, as in a log-structured merge tree (O'Neil et al. 1996): what is
    added makes a run, and `FANOUT` runs of a level become one of the next. Digests are spread
    evenly, so that a merge goes through the keys in steps of equal width. An entry takes 24 bytes.

    Args:
        directory: An empty directory for the runs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: list[SortedRun] = []
        self._names = itertools.count()

    def add(self, digests: bytes, places: NDArray[np.int64]) -> None:
        """Add texts, of which those that are there already keep their place.

        Args:
            digests: Their digests, 16 bytes each.
            places: Where each of them is, a number that is not negative: int64, shape (texts,).

        Raises:
            OSError: The disk refused; the same texts may be added again.
        """
        keys, lows = _halves(digests)
        rest = np.empty(len(keys), REST)
        rest["low"], rest["place"] = lows, places
        self._runs.append(self._keep([(keys, rest)], len(keys), 0))
        while _is_full(alike := self._runs[-FANOUT:]):
            count = sum(len(run.keys) for run in alike)
            merged = self._keep(_pieces(alike, count), count, alike[0].level + 1)
            self._runs[-FANOUT:] = [merged]
            for path in itertools.chain.from_iterable(run.paths for run in alike):
                path.unlink()

    def find(self, digests: bytes) -> NDArray[np.int64]:
        """Return where texts are: int64, shape (texts,), `NOWHERE` for those that were not added.

        Args:
            digests: Their digests, 16 bytes each.
        """
        keys, lows = _halves(digests)
        found = np.full(len(keys), NOWHERE, np.int64)
        left = keys.argsort()  # neighbours are near each other on the disk, too
        for run in self._runs:
            found[left] = _find(run, keys[left], lows[left])
            left = left[found[left] == NOWHERE]
        return found

    def _keep(self, pieces: Iterable[Piece], count: int, level: int) -> SortedRun:
        """Sort each of some pieces, which follow each other, and put them on the disk if many."""
        made = (_sorted(*piece) for piece in pieces)
        if count <= IN_MEMORY_MAX:
            (run,) = made
            return SortedRun(*run, level)
        name = next(self._names)
        paths = [self._directory / f"{name}.{kind}" for kind in ("keys", "rest")]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for piece in made:
                for file, column in zip(files, piece, strict=True):
                    column.tofile(file)
        keys, rest = (
            np.memmap(path, kind, "r") for path, kind in zip(paths, (KEY, REST), strict=True)
        )
        return SortedRun(keys, rest, level, paths)


def _halves(digests: bytes) -> tuple[Keys, Keys]:
    """Return both halves of digests of 16 bytes."""
    halves = np.frombuffer(digests, KEY).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def _is_full(runs: Sequence[SortedRun]) -> bool:
    return len(runs) == FANOUT and len({run.level for run in runs}) == 1


def _sorted(keys: Keys, rest: NDArray[np.void]) -> Piece:
    """Sort entries by their keys; of those with the same digest the first one stays."""
    order = keys.argsort(kind="stable")
    keys, rest = keys[order], rest[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (rest["low"][1:] != rest["low"][:-1])
    return keys[new], rest[new]


def _pieces(runs: Sequence[SortedRun], count: int) -> Iterator[Piece]:
    """Yield the entries of runs together, in pieces of ascending keys."""
    steps = 1 if count <= IN_MEMORY_MAX else -(-count // MERGED_MAX)
    bounds = np.array([(step << 64) // steps for step in range(1, steps)], KEY)
    cuts = [[0, *run.keys.searchsorted(bounds).tolist(), len(run.keys)] for run in runs]
    for step in range(steps):
        parts = [slice(*cut[step : step + 2]) for cut in cuts]
        yield (
            np.concatenate([run.keys[part] for run, part in zip(runs, parts, strict=True)]),
            np.concatenate([run.rest[part] for run, part in zip(runs, parts, strict=True)]),
        )


def _find(run: SortedRun, keys: Keys, lows: Keys) -> NDArray[np.int64]:
    """Return the places of texts in one run."""
    found = np.full(len(keys), NOWHERE, np.int64)
    at = run.keys.searchsorted(keys)
    left = np.arange(len(keys))
    while len(left):  # seldom twice: half of a digest is the same for two texts in 2^64
        left = left[at[left] < len(run.keys)]
        left = left[run.keys[at[left]] == keys[left]]
        rest = run.rest[at[left]]
        same = rest["low"] == lows[left]
        found[left[same]] = rest["place"][same]
        left = left[~same]
        at[left] += 1
    return found
