"""Texts of a feed: a job whose texts clients send over time."""

from collections.abc import Sequence
from typing import Final

from embedfarm.contract.encoding import encode
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import BlocksLost, Job
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import VECTOR_BYTES_GUESSED, used_bytes
from embedfarm.contract.status import JobStatus
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.contract.window import FarmWindow
from embedfarm.producer.blocks import Blocker
from embedfarm.producer.submitter import PROBE_TOKENS, RESULT_BYTES_MAX, JobRefused

NOTE: Final = "feed"  # the note of a job that says that it is a feed


class OutOfPlace(RuntimeError):
    """Raised when texts do not go on where the feed ends.

    Attributes:
        expected: Index of the text that is wanted next.
    """

    def __init__(self, expected: int) -> None:
        super().__init__(f"text {expected} is expected next")
        self.expected = expected


class WindowFull(RuntimeError):
    """Raised when there is no room for texts, in the window of the feed or of the farm."""


def is_feed(job: Job) -> bool:
    """Tell whether a job is a feed, whose results stay until they are acknowledged."""
    return bool(job.noted(NOTE))


def extend(job: Job, settings: Settings, start: int, rows: Rows, read: int = 0) -> int:
    """Take texts into a feed, as many as its window and the farm's have room for.

    Args:
        job: The feed.
        settings: Limits.
        start: Index of the first text. Those that the feed has are not looked at again.
        rows: The texts.
        read: Texts below this index are not wanted any more, even if the server has lost them.

    Returns:
        Index of the text that is wanted next.

    Raises:
        OutOfPlace: The feed ends before `start`: texts were left out, or the server lost some.
        WindowFull: There is no room for any of the texts.
        JobRefused: The feed takes no more.
        JobGone: There is no such feed.
    """
    status = job.status()
    _check(status.state in {"open", "paused"}, status.state)
    if status.pushed_upto < read:
        job.create(job.spec(), read)
        status = job.status()
    known = status.pushed_upto - start
    if known < 0:
        raise OutOfPlace(status.pushed_upto)
    if known >= len(rows.texts):
        return status.pushed_upto
    wanted = Rows(rows.texts[known:], rows.ids and rows.ids[known:])
    window = FarmWindow(job.client, settings)
    blocks = _fitting(_cut(job.spec(), status, wanted, settings), status, window)
    try:
        answers = job.push(blocks)
    except BlocksLost as error:
        raise OutOfPlace(job.status().pushed_upto) from error
    _check({*answers} <= {"added", "exists"}, answers[-1])
    return job.status().pushed_upto


def close(job: Job, count: int) -> None:
    """Say that a feed has all its texts; closing it again changes nothing.

    Raises:
        OutOfPlace: The feed has not `count` texts: the server lost some, or took more.
        JobRefused: It was cancelled, or closed with another count.
        JobGone: There is no such feed.
    """
    status = job.status()
    if status.chunk_count == count and status.state != "cancelled":
        return
    _check(status.state in {"open", "paused"} and status.chunk_count < 0, status.state)
    if status.pushed_upto != count:
        raise OutOfPlace(status.pushed_upto)
    try:
        state = job.close(count)
    except BlocksLost as error:
        raise OutOfPlace(job.status().pushed_upto) from error
    _check(state in {"closed", "paused"}, state)


def _check(allowed: bool, state: str) -> None:  # noqa: FBT001 -- what is checked
    if not allowed:
        raise JobRefused(f"the feed takes no more texts: it is {state}")


def _cut(
    spec: JobSpec, status: JobStatus, rows: Rows, settings: Settings
) -> list[tuple[Block, bytes]]:
    """Cut rows into blocks that any worker does in a moment; return them with their bytes."""
    counter = TokenCounter.of_job(spec, None)
    blocker = Blocker(status.pushed_upto, settings, counter, tokens_target=PROBE_TOKENS)
    chunks = RESULT_BYTES_MAX // _vector_bytes(status)
    blocker.chunks_max = max(1, min(chunks, settings.block_chunks_max))
    blocks = [*blocker.add(rows), *blocker.flush()]
    return [(block, encode(block)) for block in blocks]


def _fitting(
    blocks: Sequence[tuple[Block, bytes]], status: JobStatus, window: FarmWindow
) -> Sequence[tuple[Block, bytes]]:
    """Return the first blocks, as many as have room; an empty window takes at least one."""
    vector_bytes = _vector_bytes(status)
    used = used_bytes(status, vector_bytes)
    costs: list[int] = []
    for block, data in blocks:
        cost = len(data) + block.count * vector_bytes
        if used and used + cost > window.settings.window_bytes_max:
            break
        costs.append(cost)
        used += cost
    if not costs:
        raise WindowFull("the window of the feed is full: acknowledge results, then send again")
    count = window.reserve(status, vector_bytes, costs)
    if not count:
        raise WindowFull("other jobs fill the window of the farm: send again later")
    return blocks[:count]


def _vector_bytes(status: JobStatus) -> int:
    return status.held_vector_bytes or VECTOR_BYTES_GUESSED
