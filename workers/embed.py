"""Second stage: a micro-batch through the model, device batch by device batch."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedfarm.farm import model_key
from workers.engines import DeviceFailed, OutOfMemory
from workers.leases import MicroBatch
from workers.packing import batch_tokens, pack
from workers.quantisation import quantise


@dataclass
class Embedder:
    """Runs micro-batches on one device and remembers how much it can take at once.

    Attributes:
        batch_tokens_max: Budget of a device batch in padded tokens; 0 takes the engine's own.
        slowdown: Makes the device this many times slower, for tests.
        budgets: Learned budgets by model.
    """

    batch_tokens_max: int = 0
    slowdown: float = 1.0
    budgets: dict[str, int] = field(default_factory=dict)

    def embed(self, batch: MicroBatch) -> NDArray[Any]:
        """Vectors of all texts as they are stored, shape (n, width); accounts go to `batch`.

        A text that repeats goes through the model once. A chunk that the engine cannot embed gets a
        zero vector and an entry in `batch.reasons`. Rows of lost leases stay zero.

        Raises:
            DeviceFailed: Nothing works on this device any more; no chunk is to blame.
        """
        began = time.monotonic()
        rows = _live_rows(batch)
        vectors = np.zeros((len(batch.tokenised.lengths), batch.engine.dimensions), np.float32)
        sources = _first_rows(batch, rows)
        self._run(batch, np.unique(sources), vectors)
        _copy_repeated(batch, rows, sources, vectors)
        stored = _store(vectors, batch)
        batch.forward_seconds = time.monotonic() - began
        return stored

    def _run(self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]) -> None:
        """Fill `vectors` for `rows`; halve what does not fit or raises."""
        todo = self._pack(batch, rows)
        while todo:
            rows = todo.pop()
            try:
                self._forward(batch, rows, vectors)
            except OutOfMemory as error:
                if len(rows) == 1:
                    batch.reasons[int(rows[0])] = f"does not fit on the device: {error}"
                    continue
                cost = batch_tokens(batch.tokenised.lengths[rows], padded=batch.engine.padded)
                self.budgets[model_key(batch.spec)] = max(1, cost // 2)
                todo = self._pack(batch, np.concatenate([rows, *todo]))
            except DeviceFailed:
                raise
            except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
                if len(rows) == 1:
                    reason = f"the model raised {type(error).__name__}: {error}"
                    batch.reasons[int(rows[0])] = reason
                    continue
                half = len(rows) // 2
                todo += [rows[half:], rows[:half]]

    def _pack(self, batch: MicroBatch, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Device batches of `rows` within the learned budget, the longest chunks last."""
        engine = batch.engine
        budget = self.budgets.get(
            model_key(batch.spec), self.batch_tokens_max or engine.batch_tokens
        )
        lengths = batch.tokenised.lengths[rows]
        batches = pack(lengths, budget, engine.launch_tokens, padded=engine.padded)
        return [rows[each] for each in reversed(batches)]

    def _forward(
        self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]
    ) -> None:
        """One device batch."""
        began = time.monotonic()
        vectors[rows] = batch.engine.forward(batch.tokenised, rows)
        lengths = batch.tokenised.lengths[rows]
        batch.real_tokens += int(lengths.sum())
        batch.padded_tokens += batch_tokens(lengths, padded=batch.engine.padded)
        if self.slowdown > 1:
            threading.Event().wait((self.slowdown - 1) * (time.monotonic() - began))


def _live_rows(batch: MicroBatch) -> NDArray[np.intp]:
    """Rows that need the model: of leases that are ours, with tokens, not given up on already."""
    lengths = batch.tokenised.lengths
    for row in np.flatnonzero(lengths == 0).tolist():
        batch.reasons.setdefault(row, "the tokenizer makes no token of it")
    live = np.ones(len(lengths), dtype=bool)
    for lease, rows in batch.rows():
        live[rows] = not lease.lost
    live[list(batch.reasons)] = False
    return np.flatnonzero(live)


def _first_rows(batch: MicroBatch, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of `rows`, the first of them with the same text."""
    texts = [text for lease in batch.leases for text in lease.block.texts]
    first: dict[str, int] = {}
    found = (first.setdefault(texts[row], row) for row in rows.tolist())
    return np.fromiter(found, dtype=np.intp, count=len(rows))


def _copy_repeated(
    batch: MicroBatch,
    rows: NDArray[np.intp],
    sources: NDArray[np.intp],
    vectors: NDArray[np.float32],
) -> None:
    """Give the rows of repeated texts what became of the first ones, vectors or reasons."""
    repeated = np.flatnonzero(rows != sources)
    vectors[rows[repeated]] = vectors[sources[repeated]]
    for row, source in zip(rows[repeated].tolist(), sources[repeated].tolist(), strict=True):
        if source in batch.reasons:
            batch.reasons[row] = batch.reasons[source]


def _store(vectors: NDArray[np.float32], batch: MicroBatch) -> NDArray[Any]:
    """Vectors as they are stored; rows that are not finite, or too large for that, have failed."""
    stored = quantise(vectors, batch.spec)
    seen = stored if stored.dtype.kind == "f" else vectors
    for row in np.flatnonzero(~np.isfinite(seen).all(axis=1)).tolist():
        batch.reasons[row] = f"the model gave a vector that is not finite in {seen.dtype}"
    stored[list(batch.reasons)] = 0
    return stored
