"""Which chunks go through the model together.

A padded device batch costs `rows * longest` tokens, and each batch costs something by itself. So
chunks are sorted by length, and a batch ends where its padding would cost more than another batch
does, or where the budget ends. The plain sum of lengths counts where the engine needs no padding.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROWS_MAX = 1 << 16


def pack(
    lengths: Sequence[int] | NDArray[np.integer],
    budget_tokens: int,
    launch_tokens: int,
    *,
    padded: bool,
) -> list[NDArray[np.intp]]:
    """Device batches as arrays of positions in `lengths`, longest chunks first.

    Longest first, because running out of memory then happens at once and not at the end. Each
    position is in exactly one batch. A batch costs at most `budget_tokens`, unless it is a single
    chunk that alone costs more: an over-long chunk always goes alone.

    Args:
        lengths: Tokens of each chunk.
        budget_tokens: Padded (or plain) tokens in one batch.
        launch_tokens: What a batch costs by itself, in tokens: padding beyond this is not worth it.
        padded: Whether the engine pads to the longest chunk of a batch.
    """
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    batches = []
    first = 0
    while first < len(order):
        rows = ordered[first : first + min(budget_tokens, ROWS_MAX)]
        count = _padded_rows(rows, budget_tokens, launch_tokens) if padded else 0
        if not padded:
            count = int(np.searchsorted(np.cumsum(rows), budget_tokens, side="right"))
        batches.append(order[first : first + max(1, count)])
        first += max(1, count)
    return batches


def _padded_rows(rows: NDArray[np.int64], budget_tokens: int, launch_tokens: int) -> int:
    """How many of `rows`, longest first, fit the budget before padding outweighs a batch."""
    longest = rows[0]
    fitting = rows[: budget_tokens // longest]
    padding = longest * np.arange(1, len(fitting) + 1) - np.cumsum(fitting)
    return int(np.searchsorted(padding, launch_tokens, side="right"))


def batch_tokens(lengths: NDArray[np.integer], *, padded: bool) -> int:
    """What a device batch of such chunks costs in tokens, with its padding if it has any."""
    if not padded or not len(lengths):
        return int(lengths.sum())
    return int(lengths.max()) * len(lengths)
