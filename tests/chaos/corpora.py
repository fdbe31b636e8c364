"""Corpora that people change, and the vectors that their texts must have."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHUFFLED_SHARE: Final = 0.15  # of the rows
SHARE_MAX: Final = 0.2  # of the rows that come or go at once
SPARE: Final = ".new"


def cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosines of two matrices, row by row."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray(np.sum(left * right, axis=1) / norms)


@dataclass(frozen=True)
class Vectors:
    """The vectors that a quiet farm gave to texts.

    Attributes:
        matrix: One vector per row.
        rows: The row of each text.
    """

    matrix: NDArray[np.float32]
    rows: dict[str, int]

    def of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, in their order."""
        return self.matrix[[self.rows[text] for text in texts]]

    def least_cosine(self, vectors: NDArray[np.float32], texts: Sequence[str]) -> float:
        """Return the least cosine of vectors with those of texts; NaN where the counts differ."""
        if len(vectors) != len(texts) or not len(texts):
            return float("nan")
        return float(cosines(vectors, self.of(texts)).min())


def vectors_of(texts: Sequence[str], matrix: NDArray[np.float32]) -> Vectors:
    """Return the vectors of texts, which are the rows of a matrix."""
    return Vectors(matrix, {text: row for row, text in enumerate(texts)})


# What people do to a corpus. No text comes into it whose vector is not known.

Change = Callable[[list[str], random.Random], list[str]]


def insert(texts: list[str], draw: random.Random) -> list[str]:
    """Insert a row somewhere, which shifts what follows."""
    place = draw.randrange(len(texts))
    return [*texts[:place], draw.choice(texts), *texts[place:]]


def remove(texts: list[str], draw: random.Random) -> list[str]:
    """Remove a row somewhere."""
    place = draw.randrange(len(texts))
    return [*texts[:place], *texts[place + 1 :]]


def shuffle(texts: list[str], draw: random.Random) -> list[str]:
    """Shuffle a run of rows."""
    first, count = draw.randrange(len(texts)), int(SHUFFLED_SHARE * len(texts))
    middle = texts[first : first + count]
    draw.shuffle(middle)
    return [*texts[:first], *middle, *texts[first + count :]]


def shorten(texts: list[str], draw: random.Random) -> list[str]:
    """Remove the last rows."""
    return texts[: len(texts) - draw.randint(1, max(1, int(SHARE_MAX * len(texts))))]


def grow(texts: list[str], draw: random.Random) -> list[str]:
    """Add rows at the end."""
    return [*texts, *draw.sample(texts, max(1, int(SHARE_MAX * len(texts))))]


def turn(texts: list[str], draw: random.Random) -> list[str]:
    """Rotate the rows, and sometimes reverse them."""
    place = draw.randrange(len(texts))
    turned = [*texts[place:], *texts[:place]]
    return turned if draw.random() < 0.5 else turned[::-1]


CHANGES: Final[Sequence[Change]] = (insert, remove, shuffle, shorten, grow)


class Version(NamedTuple):
    """The texts that a corpus held for some time, and whether a bad row followed them."""

    texts: list[str]
    spoiled: bool = False


@dataclass
class Corpus:
    """A file of texts, and all versions of it.

    Attributes:
        path: The path of the file.
        versions: The versions, the oldest first; the last one is in the file.
    """

    path: Path
    versions: list[Version] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The texts that the file holds now."""
        return self.versions[-1].texts

    def write(self, texts: Sequence[str], *, spoiled: bool = False, whole: bool = True) -> None:
        """Write texts into the file as its newest version.

        Args:
            texts: All texts.
            spoiled: Whether a row without a text follows.
            whole: Whether another file takes the place of this one, so that whoever reads it has
                all of the one or of the other; otherwise the file is written over.
        """
        self.versions.append(Version(list(texts), spoiled))
        write_texts(path := self.path.with_suffix(SPARE) if whole else self.path, texts)
        if spoiled:
            with path.open("a") as file:
                file.write('{"text": 7}\n')
        if whole:
            path.replace(self.path)

    def change(self, change: Change, draw: random.Random, *, whole: bool) -> None:
        """Change the texts as people do, by one of the changes."""
        self.write(change(self.texts, draw), whole=whole)


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    """Write a corpus of texts, and return its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class Finding(NamedTuple):
    """The difference of an output from the texts that it should be made of.

    Attributes:
        lost, doubled: Number of rows that are not there, or more than once.
        ordered: Whether the rows are 0 to N - 1 in order.
        cosine: The least cosine of a vector with that of its text; NaN where rows do not match.
    """

    lost: int
    doubled: int
    ordered: bool
    cosine: float


def compare(
    indices: Sequence[int], vectors: NDArray[np.float32], texts: Sequence[str], known: Vectors
) -> Finding:
    """Compare an output with the texts that it should be made of."""
    counts = np.bincount(np.asarray(indices, dtype=np.intp), minlength=len(texts))
    ordered = list(indices) == list(range(len(texts)))
    cosine = known.least_cosine(vectors, texts) if ordered else float("nan")
    return Finding(int((counts[: len(texts)] == 0).sum()), int((counts > 1).sum()), ordered, cosine)
