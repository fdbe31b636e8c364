"""Which texts of a micro-batch go through the model, and what becomes of those that repeat."""

import numpy as np
from numpy.typing import NDArray

from workers.leases import MicroBatch


def live_texts(batch: MicroBatch) -> NDArray[np.intp]:
    """Texts that need the model: of leases that are ours, with tokens, not given up on already."""
    lengths = batch.tokenised.text_lengths
    for text in np.flatnonzero(lengths == 0).tolist():
        batch.reasons.setdefault(text, "the tokenizer makes no token of it")
    live = np.ones(len(lengths), dtype=bool)
    for lease, rows in batch.rows():
        live[rows] = not lease.lost
    live[list(batch.reasons)] = False
    return np.flatnonzero(live)


def first_texts(batch: MicroBatch, live: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each live text, the first one that is equal."""
    keys = [key for lease in batch.leases for key in lease.block.identities()]
    first: dict[str | bytes, int] = {}
    found = (first.setdefault(keys[place], place) for place in live.tolist())
    return np.fromiter(found, dtype=np.intp, count=len(live))


def copy_repeated(
    batch: MicroBatch,
    texts: NDArray[np.intp],
    sources: NDArray[np.intp],
    vectors: NDArray[np.float32],
) -> None:
    """Give repeated texts what became of the first ones, vectors or reasons."""
    repeated = np.flatnonzero(texts != sources)
    vectors[texts[repeated]] = vectors[sources[repeated]]
    for text, source in zip(texts[repeated].tolist(), sources[repeated].tolist(), strict=True):
        if source in batch.reasons:
            batch.reasons[text] = batch.reasons[source]
