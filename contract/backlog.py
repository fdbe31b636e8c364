"""Backlog of the farm: every job with its counters and the blocks that each worker holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import redis

from embedfarm.contract import wire
from embedfarm.contract.status import JobGone, JobStatus, JobUnreadable, status_from
from embedfarm.contract.unreadable_records import Report, name_once


class Backlog(NamedTuple):
    """Backlog of one job, as the server has it.

    Attributes:
        job: Id of the job.
        status: State, counters and terms.
        waiting_blocks: Blocks that nobody has leased.
        held_blocks: Blocks leased and not committed, by worker.
    """

    job: str
    status: JobStatus
    waiting_blocks: int
    held_blocks: Mapping[str, int]


def read_backlogs(
    client: redis.Redis, jobs: Sequence[str], report: Report = name_once
) -> list[Backlog]:
    """Return the backlogs of those of the given jobs that exist, read in one round trip.

    A job whose keys hold what no program of ours wrote is reported and left out.

    Raises:
        redis.ResponseError: The server reports any other error.
    """
    fields = list(JobStatus.__dataclass_fields__)
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        keys = wire.JobKeys(job)
        pipe.hmget(keys.meta, fields)
        for stream in (keys.blocks, keys.retry):
            pipe.xlen(stream)
            pipe.xpending(stream, wire.GROUP)
    answers = pipe.execute(raise_on_error=False)
    parts = (answers[5 * place : 5 * place + 5] for place in range(len(jobs)))
    found = []
    for job, part in zip(jobs, parts, strict=True):
        try:
            found.append(_backlog(job, fields, part))
        except JobUnreadable as error:
            report(f"job {job}", str(error))
        except JobGone:
            continue
    return found


def _backlog(job: str, fields: Sequence[str], answers: Sequence[Any]) -> Backlog:
    """Make a job's backlog out of the server's answers about it.

    Raises:
        JobGone: The job was deleted before or between these answers.
    """
    for answer in answers:
        if isinstance(answer, redis.ResponseError) and "NOGROUP" in str(answer):
            raise JobGone(job)
        if isinstance(answer, redis.ResponseError) and "WRONGTYPE" in str(answer):
            raise JobUnreadable(str(answer))
        if isinstance(answer, Exception):
            raise answer
    values, blocks, blocks_held, retry, retry_held = answers
    status = status_from(fields, values)
    held: Counter[str] = Counter()
    for pending in (blocks_held, retry_held):
        for consumer in pending["consumers"]:
            held[consumer["name"].decode()] += consumer["pending"]
    return Backlog(job, status, max(0, blocks + retry - held.total()), held)
