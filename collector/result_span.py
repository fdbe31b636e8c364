"""Sums over consecutive results: vectors, failures, and the figures of their workers."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from embedfarm.collector.journal import JournalLine
from embedfarm.collector.manifest import (
    CHECKSUM_BYTES,
    Failure,
    Layout,
    OutputError,
    Part,
    WorkerFigures,
    Written,
)
from embedfarm.collector.sinks import PartRows
from embedfarm.collector.source_check import names_sha256
from embedfarm.contract.records import Result

_DTYPES: Final = {"<f4": "float32", "<f2": "float16", "|i1": "int8", "|u1": "uint8"}


def layout_of(result: Result) -> Layout:
    """Return the layout of a result's rows.

    Raises:
        OutputError: The result contradicts itself, or its dtype is not one that is stored.
    """
    if result.dtype not in _DTYPES:
        raise OutputError(f"result {result.start} has vectors of dtype {result.dtype!r}")
    layout = Layout(result.dimensions, _DTYPES[result.dtype], result.ids is not None)
    chunks = range(result.start, result.start + result.count)
    receipt = result.receipt
    elsewhere = receipt.bytes if receipt is not None and result.is_elsewhere else 0
    sound = (
        layout.row_bytes > 0
        and len(chunks) > 0
        and len(result.known) in {0, len(chunks)}
        and len(result.vectors) + elsewhere == result.embedded * layout.row_bytes
        and len(result.checksums) == result.embedded * CHECKSUM_BYTES
        and (result.ids is None or len(result.ids) == len(chunks))
        and all(error.index in chunks for error in result.errors)
    )
    if not sound:
        raise OutputError(f"result {result.start} has not the sizes of {result.count} chunks")
    return layout


def check_place(result: Result, start: int) -> None:
    """Refuse a result that does not begin at chunk `start`, or that `layout_of` refuses.

    Raises:
        OutputError: The result begins elsewhere, contradicts itself, or has a dtype that is not
            stored.
    """
    layout_of(result)
    if result.start != start:
        raise OutputError(f"result {result.start} is where {start} should be")


def gather(results: Sequence[Result]) -> PartRows:
    """Return the rows of consecutive results of one layout, in one copy."""
    first = results[0]
    vectors = np.frombuffer(b"".join(result.vectors for result in results), dtype=first.dtype)
    matrix = vectors.reshape(-1, first.dimensions)
    failed = [error.index - first.start for result in results for error in result.errors]
    good = np.ones(len(matrix), dtype=np.bool_)
    good[np.array(failed, dtype=np.int64)] = False
    ids = [identifier for result in results for identifier in result.ids or ()]
    return PartRows(first.start, None if first.ids is None else ids, matrix, good)


def describe(
    results: Sequence[Result], reused: Sequence[Mapping[str, int]], written: Written
) -> JournalLine:
    """Return the journal's line about consecutive results that were written as one part.

    Args:
        results: The results.
        reused: How many vectors of each were there before, by the output that had them.
        written: The part as it was written.
    """
    count = sum(result.count for result in results)
    failures = [failure for result in results for failure in failures_of(result)]
    checksums = b"".join(result.checksums for result in results)
    with_ids = results[0].ids is not None
    ids = chain.from_iterable(result.ids or () for result in results) if with_ids else None
    part = Part(
        **msgspec.structs.asdict(written),
        start=results[0].start,
        count=count,
        rows=count - len(failures),
        errors=len(failures),
        tokens=sum(result.token_count for result in results),
        texts_sha256=hashlib.sha256(checksums).hexdigest(),
        names_sha256=names_sha256(ids),
    )
    layout = layout_of(results[0])
    sums: Counter[str] = Counter()
    for each in reused:
        sums.update(each)
    return JournalLine(
        part=part,
        layout=layout,
        failures=failures,
        workers=_workers(results, reused),
        reused=dict(sums),
    )


def failures_of(result: Result) -> Iterator[Failure]:
    """Yield the failed chunks of a result, each once and in order."""
    errors = {error.index: error for error in result.errors}
    for index, error in sorted(errors.items()):
        identifier = None if result.ids is None else result.ids[index - result.start]
        yield Failure(index=index, id=identifier, reason=error.reason, attempts=error.attempts)


def _workers(
    results: Sequence[Result], reused: Sequence[Mapping[str, int]]
) -> dict[str, WorkerFigures]:
    """Return what each worker did for these results, by its name; some have none."""
    figures: defaultdict[str, WorkerFigures] = defaultdict(WorkerFigures)
    for result, taken in zip(results, reused, strict=True):
        if result.worker:
            chunks = result.count - sum(taken.values())
            figures[result.worker] += WorkerFigures(
                chunks, result.token_count, result.seconds, result.cost
            )
    return dict(figures)
