"""Results of a feed: read in order off the server, where they stay until they are acknowledged."""

from embedfarm.collector.output_reader import Chunks, chunks_of
from embedfarm.collector.result_span import check_place, layout_of
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Result


def acknowledge(job: Job, upto: int) -> None:
    """Forget the results of the chunks below `upto`; one that goes on behind them stays."""
    begun = sorted(start for start in job.results.starts() if start < upto)
    if begun and (last := job.results.at(begun[-1])) is not None and last.start + last.count > upto:
        begun.pop()
    job.results.drain(upto, begun)


def take(job: Job, start: int, limit: int, bytes_max: int) -> Chunks | None:
    """Return up to `limit` chunks from `start` on; None if `start` has no result yet.

    Args:
        job: Job of the feed.
        start: Index of the first chunk.
        limit: Most chunks to return.
        bytes_max: Bytes of vectors after which no other result is added.

    Raises:
        OutputError: A result contradicts itself.
        RecordError: A result cannot be read.
    """
    results: list[Result] = []
    upto, size = start, 0
    while upto < start + limit and size < bytes_max:
        result = job.results.at(upto) or (None if results else _straddling(job, upto))
        if result is None:
            break
        check_place(result, upto)
        if results and layout_of(result) != layout_of(results[0]):
            break
        results.append(result)
        upto, size = upto + result.count, size + len(result.vectors)
    return chunks_of(results).within(start, limit) if results else None


def _straddling(job: Job, upto: int) -> Result | None:
    """Return the rest, from chunk `upto` on, of a result that begins before it; else None.

    There is one when a client has taken a part of a result, or when the server came back without
    blocks that were then cut in another way.
    """
    before = max((start for start in job.results.starts() if start < upto), default=None)
    result = None if before is None else job.results.at(before)
    if before is None or result is None:
        return None
    check_place(result, before)
    return result.rest(upto) if result.start + result.count > upto else None
