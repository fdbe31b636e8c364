"""A micro-batch's vectors cut into the results of its blocks."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.formatting import HOUR
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import ChunkError, Result
from embedfarm.workers.leases import Lease, Making, MicroBatch
from embedfarm.workers.quantisation import DTYPES, stored_width
from embedfarm.workers.result_storage import PartFile


def results_of(  # noqa: PLR0913, PLR0917 -- the last three are a worker's
    batch: MicroBatch,
    vectors: NDArray[Any],
    worker: str,
    devices: int = 1,
    price: float = 0.0,
    files: Mapping[Making, PartFile] = MappingProxyType({}),
) -> Iterator[tuple[Lease, Result]]:
    """Yield the results of the leases still ours, one at a time: each is a copy of its rows.

    Args:
        batch: An embedded micro-batch.
        vectors: Vectors of its texts as they are stored, shape (n, width); a failed row is zero.
        worker: Name that the results carry.
        devices: Devices of the worker, each of which takes as long.
        price: Price of an hour of each of them.
        files: Where the vectors of jobs are stored already, so that results have receipts for them.
    """
    lengths = batch.tokenised.text_lengths
    seconds_per_token = devices * batch.forward_seconds / max(1, int(lengths.sum()))
    failed = sorted(batch.reasons)
    for lease, rows in batch.rows():
        if lease.lost:
            continue
        tokens = int(lengths[rows].sum())
        first, end = np.searchsorted(failed, (rows.start, rows.stop))
        indices = lease.block.indices()
        errors = [
            ChunkError(
                index=indices[row - rows.start],
                reason=batch.reasons[row],
                attempts=lease.attempts,
            )
            for row in failed[first:end]
        ]
        file = files.get(lease.making)
        result = Result(
            start=lease.block.start,
            count=lease.block.count,
            dimensions=vectors.shape[1],
            dtype=vectors.dtype.str,
            vectors=vectors[rows].tobytes() if file is None else b"",
            checksums=lease.block.checksums(),
            ids=lease.block.ids,
            errors=errors,
            token_count=tokens,
            worker=worker,
            seconds=seconds_per_token * tokens,
            known=lease.block.known,
            cost=seconds_per_token * tokens / HOUR * price,
            receipt=None if file is None else file.receipt(rows),
        )
        yield lease, result


def failure(lease: Lease, spec: JobSpec, dimensions: int, worker: str, reason: str) -> Result:
    """Make the result of a block of which every chunk that was to be embedded is given up on."""
    block = lease.block
    width = stored_width(spec, dimensions)
    dtype = DTYPES[spec.vector_dtype]
    return Result(
        start=block.start,
        count=block.count,
        dimensions=width,
        dtype=dtype,
        vectors=bytes(block.to_embed * width * np.dtype(dtype).itemsize),
        checksums=block.checksums(),
        ids=block.ids,
        errors=[
            ChunkError(index=index, reason=reason, attempts=lease.attempts)
            for index in block.indices()
        ],
        worker=worker,
        known=block.known,
    )
