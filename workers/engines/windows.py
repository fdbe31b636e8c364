"""Texts longer than a model takes: where they are cut, and how their parts become one vector."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from embedfarm.workers.engines.engine import Tokenised


def cut_windows(
    text: str, offsets: Sequence[tuple[int, int]], room: int, overlap: int
) -> Iterator[tuple[int, int]]:
    """Yield where windows begin and end that hold all of a text, cut at blanks if that can be.

    Args:
        text: The text.
        offsets: Where each of its tokens begins and ends, in characters.
        room: Tokens in a window.
        overlap: Tokens that a window repeats of the one before, about; less than half of `room`.
    """
    first = 0
    while len(offsets) - first > room:
        end = _blank_before(text, offsets, first + room, first + room // 2 + overlap)
        yield offsets[first][0], offsets[end - 1][1]
        first = _blank_before(text, offsets, end - overlap, first + 1)
    yield offsets[first][0], len(text)


def _blank_before(text: str, offsets: Sequence[tuple[int, int]], place: int, least: int) -> int:
    """Return the last token from `least` to `place` at a blank; `place` where there is none."""
    for token in range(place, least - 1, -1):
        start = offsets[token][0]
        if text[start - 1 : start + 1].strip() != text[start - 1 : start + 1]:
            return token
    return place


def pool_windows(
    batch: Tokenised, vectors: NDArray[np.float32], *, normalised: bool
) -> NDArray[np.float32]:
    """Return one vector for each text: the mean of its windows, weighted by their tokens.

    Args:
        batch: Batch that says which rows are of which text.
        vectors: Vectors of all rows, shape (rows, dimensions).
        normalised: Whether the model's vectors have length 1; the mean then gets it as well.

    Returns:
        Vectors, shape (texts, dimensions). A text of one window keeps that one's vector as it is.
    """
    if batch.owners is None:
        return vectors
    weights = batch.lengths / np.maximum(batch.text_lengths, 1)[batch.owners]
    sums = np.zeros((len(batch.text_lengths), vectors.shape[1]))
    np.add.at(sums, batch.owners, vectors * weights[:, None])
    if normalised:
        sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    pooled = sums.astype(np.float32)
    single = np.bincount(batch.owners)[batch.owners] == 1
    pooled[batch.owners[single]] = vectors[single]
    return pooled
