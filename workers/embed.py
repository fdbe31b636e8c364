"""Second stage: a micro-batch through the model, device batch by device batch."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedfarm.farm import model_key
from embedfarm.records import ChunkError, Result, text_checksums
from workers.engines import OutOfMemory
from workers.leases import Lease, MicroBatch
from workers.packing import pack, padded_tokens

VECTOR_DTYPES = {"float32": "<f4", "float16": "<f2"}


@dataclass
class Embedder:
    """Runs micro-batches on one device and remembers how much it can take at once.

    Attributes:
        worker: Name that results carry.
        batch_tokens_max: Budget of a device batch in padded tokens; 0 takes the engine's own.
        slowdown: Makes the device this many times slower, for tests.
        budgets: Learned budgets by model.
    """

    worker: str
    batch_tokens_max: int = 0
    slowdown: float = 1.0
    budgets: dict[str, int] = field(default_factory=dict)

    def embed(self, batch: MicroBatch) -> list[tuple[Lease, Result]]:
        """Results of all leases that are still ours; accounts are left in `batch`.

        A chunk that the engine cannot embed is named in its block's result, with a zero vector.
        """
        batch.forward_began = time.monotonic()
        live = _live_rows(batch)
        vectors = np.zeros((len(batch.tokenised.lengths), batch.engine.dimensions), np.float32)
        reasons = dict(batch.reasons)
        self._run(batch, live, vectors, reasons)
        finite = np.isfinite(vectors).all(axis=1)
        for row in np.flatnonzero(~finite):
            reasons[int(row)] = "the model gave a vector that is not finite"
        vectors[sorted(reasons)] = 0.0
        batch.forward_seconds = time.monotonic() - batch.forward_began
        return self._results(batch, vectors, reasons)

    def _run(
        self,
        batch: MicroBatch,
        live: NDArray[np.intp],
        vectors: NDArray[np.float32],
        reasons: dict[int, str],
    ) -> None:
        """Fill `vectors` for the rows in `live`; halve what does not fit or raises."""
        lengths = batch.tokenised.lengths
        todo = self._pack(batch, live)[::-1]
        while todo:
            rows = todo.pop()
            try:
                self._forward(batch, rows, vectors)
            except OutOfMemory as error:
                if len(rows) == 1:
                    reasons[int(rows[0])] = f"does not fit on the device: {error}"
                    continue
                self.budgets[model_key(batch.spec)] = max(1, padded_tokens(lengths[rows]) // 2)
                todo = self._pack(batch, np.concatenate([rows, *todo]))[::-1]
            except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
                if len(rows) == 1:
                    reasons[int(rows[0])] = f"the model raised {type(error).__name__}: {error}"
                    continue
                half = len(rows) // 2
                todo += [rows[half:], rows[:half]]

    def _pack(self, batch: MicroBatch, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Device batches of `rows` within the learned budget."""
        engine = batch.engine
        budget = self.budgets.get(
            model_key(batch.spec), self.batch_tokens_max or engine.batch_tokens
        )
        lengths = batch.tokenised.lengths[rows]
        batches = pack(lengths, budget, engine.launch_tokens, padded=engine.padded)
        return [rows[each] for each in batches]

    def _forward(
        self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]
    ) -> None:
        """One device batch."""
        began = time.monotonic()
        vectors[rows] = batch.engine.forward(batch.tokenised, rows)
        lengths = batch.tokenised.lengths[rows]
        batch.real_tokens += int(lengths.sum())
        batch.padded_tokens += padded_tokens(lengths) if batch.engine.padded else int(lengths.sum())
        if self.slowdown > 1:
            threading.Event().wait((self.slowdown - 1) * (time.monotonic() - began))

    def _results(
        self, batch: MicroBatch, vectors: NDArray[np.float32], reasons: dict[int, str]
    ) -> list[tuple[Lease, Result]]:
        """Cut the micro-batch into the results of its blocks."""
        dtype = VECTOR_DTYPES[batch.spec.vector_dtype]
        stored = vectors.astype(dtype, copy=False)
        seconds_per_token = batch.forward_seconds / max(1, batch.real_tokens)
        results = []
        row = 0
        for lease in batch.leases:
            rows = slice(row, row + len(lease.block.texts))
            row = rows.stop
            if lease.lost:
                continue
            tokens = int(batch.tokenised.lengths[rows].sum())
            failed = [index for index in reasons if rows.start <= index < rows.stop]
            errors = [
                ChunkError(
                    index=lease.block.start + index - rows.start,
                    reason=reasons[index],
                    attempts=lease.deliveries,
                )
                for index in sorted(failed)
            ]
            results.append(
                (
                    lease,
                    Result(
                        start=lease.block.start,
                        count=len(lease.block.texts),
                        dimensions=batch.engine.dimensions,
                        dtype=dtype,
                        vectors=stored[rows].tobytes(),
                        checksums=text_checksums(lease.block.texts),
                        ids=lease.block.ids,
                        errors=errors,
                        token_count=tokens,
                        worker=self.worker,
                        seconds=seconds_per_token * tokens,
                    ),
                )
            )
        return results


def failure(lease: Lease, dimensions: int, dtype: str, worker: str, reason: str) -> Result:
    """The result of a block whose every chunk is given up on."""
    block = lease.block
    count = len(block.texts)
    return Result(
        start=block.start,
        count=count,
        dimensions=dimensions,
        dtype=VECTOR_DTYPES[dtype],
        vectors=bytes(count * dimensions * np.dtype(VECTOR_DTYPES[dtype]).itemsize),
        checksums=text_checksums(block.texts),
        ids=block.ids,
        errors=[
            ChunkError(index=block.start + row, reason=reason, attempts=lease.deliveries)
            for row in range(count)
        ],
        worker=worker,
    )


def _live_rows(batch: MicroBatch) -> NDArray[np.intp]:
    """Rows that need the model: of leases that are ours, and not given up on already."""
    live = np.ones(len(batch.tokenised.lengths), dtype=bool)
    row = 0
    for lease in batch.leases:
        live[row : row + len(lease.block.texts)] = not lease.lost
        row += len(lease.block.texts)
    live[sorted(batch.reasons)] = False
    return np.flatnonzero(live)
