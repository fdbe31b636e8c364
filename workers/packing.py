"""Chunks packed into the device batches that go through the model together.

A padded device batch costs `rows * longest` tokens, and each batch costs something by itself. So
chunks are sorted by length and cut where the sum of both is least, within a budget. The plain sum
of lengths counts where the engine needs no padding.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

ROWS_MAX: Final = 1 << 16
EXACT_CHUNKS_MAX: Final = 256  # beyond, batches begin where lengths change: it takes 8 us a chunk
STARTED_MAX: Final = 2  # device batches at a time: one that runs, and the next in its queue


def pack(
    lengths: Sequence[int] | NDArray[np.integer],
    budget_tokens: int,
    launch_tokens: float,
    *,
    padded: bool,
) -> list[NDArray[np.intp]]:
    """Pack chunks into device batches: arrays of positions in `lengths`, longest chunks first.

    The longest are first, so that running out of memory happens at once and not at the end. Each
    position is in exactly one batch. A batch costs at most `budget_tokens`, unless it is a single
    chunk that alone costs more: an over-long chunk always goes alone.

    Args:
        lengths: Tokens of each chunk.
        budget_tokens: Padded (or plain) tokens in one batch.
        launch_tokens: What a batch costs by itself, in tokens.
        padded: Whether the engine pads to the longest chunk of a batch.
    """
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    if padded:
        cuts = _cut_padded(ordered, budget_tokens, launch_tokens)
    else:
        cuts = _cut_plain(ordered, budget_tokens)
    return [order[first:end] for first, end in pairwise(cuts)]


def _cut_plain(ordered: NDArray[np.int64], budget_tokens: int) -> list[int]:
    """Return where batches begin, and the end: each is as full as the budget lets it be."""
    cuts = [0]
    while cuts[-1] < len(ordered):
        rows = ordered[cuts[-1] : cuts[-1] + min(budget_tokens, ROWS_MAX)]
        fitting = int(np.searchsorted(np.cumsum(rows), budget_tokens, side="right"))
        cuts.append(cuts[-1] + max(1, fitting))
    return cuts


def _cut_padded(ordered: NDArray[np.int64], budget_tokens: int, launch_tokens: float) -> list[int]:
    """Return where batches begin, and the end: a cheapest path of which each step is a batch."""
    rows_max = np.clip(budget_tokens // ordered, 1, ROWS_MAX)
    places = _places(ordered, rows_max)
    costs = np.full(len(places), np.inf)
    costs[0] = 0.0
    came_from = np.zeros(len(places), dtype=np.intp)
    lasts = np.searchsorted(places, places[:-1] + rows_max[places[:-1]], side="right").tolist()
    for at, last in enumerate(lasts):
        steps = slice(at + 1, last)
        reached = costs[at] + launch_tokens + ordered[places[at]] * (places[steps] - places[at])
        better = reached <= costs[steps]  # of equal ways the one with full batches first
        costs[steps][better] = reached[better]
        came_from[steps][better] = at
    cuts = [len(places) - 1]
    while cuts[-1] > 0:
        cuts.append(int(came_from[cuts[-1]]))
    return [int(places[cut]) for cut in reversed(cuts)]


def _places(ordered: NDArray[np.int64], rows_max: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a batch may begin, and the end.

    Of many chunks these are the places where the length changes, and after each full batch of equal
    ones.
    """
    if len(ordered) <= EXACT_CHUNKS_MAX:
        return np.arange(len(ordered) + 1)
    changes = np.flatnonzero(np.diff(ordered, prepend=-1, append=-1))
    steps = [np.arange(first, end, rows_max[first]) for first, end in pairwise(changes.tolist())]
    return np.append(np.concatenate(steps), len(ordered))


def batch_tokens(lengths: NDArray[np.integer], *, padded: bool) -> int:
    """Return what a device batch of such chunks costs in tokens, with its padding if any."""
    if not padded or not len(lengths):
        return int(lengths.sum())
    return int(lengths.max()) * len(lengths)
