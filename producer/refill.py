"""Chunks that the server has lost in the midst of a job, sent again out of the source."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from embedfarm.contract.broker import persist
from embedfarm.contract.coverage import reconcile
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import VECTOR_BYTES_GUESSED
from embedfarm.producer.blocks import Blocker
from embedfarm.producer.submitter import RESULT_BYTES_MAX

GROUP_BYTES: Final = 4 << 20  # text sent at a time

T = TypeVar("T")


def refill(
    job: Job,
    missing: Sequence[range],
    source: Iterable[Rows],
    settings: Settings,
    stop: threading.Event,
) -> int:
    """Send chunks again that the server still lacks.

    Args:
        job: Job, on a connection that nobody else uses.
        missing: Ranges of the chunks to send, in order.
        source: All rows of the job, from chunk 0 on; it is read as far as is needed.
        settings: Settings with the sizes of blocks.
        stop: Event that ends the reading, and the waiting for the server.

    Returns:
        The number of chunks that the server took.

    Raises:
        JobGone: Somebody deleted the job.
        redis.ConnectionError: The server stayed away, or `stop` was set while it was.
    """

    def again(attempt: Callable[[], T]) -> T:
        return persist(attempt, stop, settings.reconnect_seconds_max)

    vector_bytes = again(job.status).held_vector_bytes or VECTOR_BYTES_GUESSED
    chunks_max = max(1, min(RESULT_BYTES_MAX // vector_bytes, settings.block_chunks_max))
    count = 0
    for group in _groups(_blocks(missing, source, settings, chunks_max)):
        if stop.is_set():
            break
        coverage = again(lambda group=group: reconcile(job, group))  # type: ignore[misc] # mypy#6
        count += sum(map(len, coverage.added))
    return count


def _blocks(
    missing: Sequence[range], source: Iterable[Rows], settings: Settings, chunks_max: int
) -> Iterator[Block]:
    """Yield the missing chunks in blocks as large as may be, since each is a lease of its own."""
    wanted = iter(missing)
    gap = next(wanted, None)
    blocker: Blocker | None = None
    first = 0
    for rows in source:
        end = first + len(rows.texts)
        while gap is not None and gap.start < end:
            if blocker is None:
                blocker = Blocker(gap.start, settings)
                blocker.chunks_max = chunks_max
                blocker.tokens_target = float("inf")
            part = slice(max(gap.start, first) - first, min(gap.stop, end) - first)
            yield from blocker.add(rows.piece(part.start, part.stop))
            if gap.stop > end:
                break
            yield from blocker.flush()
            gap, blocker = next(wanted, None), None
        if gap is None:
            return
        first = end


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield groups of blocks that have about `GROUP_BYTES` of text together."""
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += sum(map(len, block.texts))
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
