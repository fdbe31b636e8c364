"""Texts as tokens, which of them go through the model, and what becomes of those that repeat."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedfarm.workers.engines.engine import Chunk, Engine, Tokenised
from embedfarm.workers.leases import MicroBatch

log = logging.getLogger(__name__)


def tokenise(engine: Engine, chunks: Sequence[Chunk]) -> tuple[Tokenised, dict[int, str]]:
    """Tokenise all chunks; return them, and by row why single ones cannot be embedded."""
    reasons: dict[int, str] = {}
    if not chunks:
        return Tokenised(np.zeros(0, np.int64), None), reasons
    try:
        tokenised = engine.tokenise(chunks)
    except Exception as error:  # noqa: BLE001 # a tokenizer may raise anything; the chunk pays
        log.warning("tokenising failed, trying chunks one by one: %r", error)
        tokenised, reasons = _tokenise_each(engine, chunks)
    return tokenised, reasons | dict(tokenised.reasons)


def _tokenise_each(engine: Engine, chunks: Sequence[Chunk]) -> tuple[Tokenised, dict[int, str]]:
    """Tokenise all chunks, with an empty text in place of each that cannot be tokenised."""
    reasons = {}
    kept = list(chunks)
    for row, chunk in enumerate(chunks):
        try:
            engine.tokenise([chunk])
        except Exception as error:  # noqa: BLE001 # as above
            reasons[row] = f"the tokenizer raised {type(error).__name__}: {error}"
            kept[row] = ""
    return engine.tokenise(kept), reasons


def live_texts(batch: MicroBatch) -> NDArray[np.intp]:
    """Return the texts that need the model.

    They are of leases still ours, have tokens, are not given up on, and are not in the cache.
    """
    lengths = batch.tokenised.text_lengths
    for text in np.flatnonzero(lengths == 0).tolist():
        batch.reasons.setdefault(text, "the tokenizer makes no token of it")
    live = np.ones(len(lengths), dtype=bool)
    for lease, rows in batch.rows():
        live[rows] = not lease.lost
    live[list(batch.reasons)] = False
    if batch.cached is not None:
        live[batch.cached.texts] = False
    return np.flatnonzero(live)


def first_texts(batch: MicroBatch, live: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return for each live text the first one that is equal."""
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
    """Give repeated texts the vector, or the reason, of the first text that is equal."""
    repeated = np.flatnonzero(texts != sources)
    vectors[texts[repeated]] = vectors[sources[repeated]]
    for text, source in zip(texts[repeated].tolist(), sources[repeated].tolist(), strict=True):
        if source in batch.reasons:
            batch.reasons[text] = batch.reasons[source]


def give_up(batch: MicroBatch, rows: NDArray[np.intp], reason: str) -> None:
    """Give up the texts of some rows, for this reason."""
    batch.reasons.update(dict.fromkeys(batch.tokenised.texts_of(rows).tolist(), reason))


def without_reason(batch: MicroBatch, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the rows whose texts have not failed."""
    if not batch.reasons:
        return rows
    return rows[~np.isin(batch.tokenised.texts_of(rows), list(batch.reasons))]
