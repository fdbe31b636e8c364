"""Coverage of a job: the chunks that the server has, and those that it should have but lacks.

Nothing is lost between the stations: a server that forgets the end of its log forgets it
everywhere, and the producer sends it again. A gap in the midst comes from a change by hand, a
server that evicts keys, or an old backup. Only the source can fill it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block
from embedfarm.contract.status import JobGone, is_gone

SEQUENCE_MAX: Final = (1 << 64) - 1  # in an entry's ID


@dataclass(frozen=True)
class Coverage:
    """The chunks of a job that the server has at one moment.

    Attributes:
        drained_upto: All chunks below this index are on disk.
        pushed_upto: All chunks below this index were pushed.
        results: Ranges of chunks that are embedded and not on disk.
        waiting: Ranges of chunks that nobody has leased.
        leased: Ranges of chunks that a worker holds.
        added: Ranges of chunks that the server was given again just now.
    """

    drained_upto: int
    pushed_upto: int
    results: Sequence[range]
    waiting: Sequence[range]
    leased: Sequence[range]
    added: Sequence[range]

    def missing(self, first: int = 0) -> list[range]:
        """Return ranges of pushed chunks, from `first` on, that neither disk nor server has."""
        there = chain(self.results, self.waiting, self.leased, self.added)
        upto = max(first, self.drained_upto)
        gaps = []
        for each in sorted(there, key=lambda each: each.start):
            if each.start > upto:
                gaps.append(range(upto, min(each.start, self.pushed_upto)))
            upto = max(upto, each.stop)
        if upto < self.pushed_upto:
            gaps.append(range(upto, self.pushed_upto))
        return [each for each in gaps if each]


def reconcile(job: Job, blocks: Iterable[Block] = ()) -> Coverage:
    """Return what the server has of a job, after giving it those of the blocks that it lacked.

    Blocks that the server has, in whole or in part, are left out, so that a call may be repeated,
    and may run beside other calls and the job's producer. When blocks are given, the job's counters
    are set to what is there.

    Args:
        job: Handle on the job, with a connection of the caller's own.
        blocks: Blocks of chunks that `Coverage.missing` named.

    Raises:
        JobGone: There is no such job.
    """
    keys = job.keys
    words = [word for b in blocks for word in (encode(b), b.start, b.count, b.token_count)]
    answer = job.client.register_script(wire.script("reconcile"))(
        keys=[keys.blocks, keys.retry, keys.results, keys.meta], args=[job.owner, *words]
    )
    if answer is None:
        raise JobGone(job.id)
    (drained, pushed), *lists = cast("list[list[Any]]", answer)
    coverage = Coverage(drained, pushed, *map(_ranges, lists))
    if coverage.added:
        job.announce()
    return coverage


def is_waiting(job: Job, index: int) -> bool:
    """Tell whether chunk `index` is in a block that nobody has begun, or that a worker holds.

    This is a quick look: False may also mean that the chunk is in a piece of a block, or embedded,
    or that the job or its consumer group is gone, which `reconcile` finds out.
    """
    client, stream = job.client, job.keys.blocks
    found = client.xrevrange(stream, f"{index + 1}-{SEQUENCE_MAX}", count=1)
    for name, _ in cast("list[tuple[bytes, Any]]", found):
        start, count = _numbers(name)
        try:
            held = client.xpending_range(stream, wire.GROUP, name, name, 1)
            groups = client.xinfo_groups(stream)
        except redis.ResponseError as error:
            if is_gone(error):
                return False
            raise
        waits = any(_numbers(each["last-delivered-id"]) < (start, count) for each in groups)
        return start - 1 <= index < start - 1 + count and (bool(held) or waits)
    return False


def _numbers(name: bytes) -> tuple[int, int]:
    """Return both numbers of an entry's ID."""
    first, _, second = name.partition(b"-")
    return int(first), int(second)


def _ranges(flat: Sequence[int]) -> list[range]:
    """Return the ranges, in order, of a list in which starts and counts alternate."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return sorted((range(start, start + count) for start, count in pairs), key=lambda r: r.start)


def describe_ranges(ranges: Sequence[range]) -> str:
    """Describe ranges for people, both ends as indices of chunks: "4 to 9, 12 to 12"."""
    return ", ".join(f"{each.start} to {each.stop - 1}" for each in ranges)
