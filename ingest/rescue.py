"""RQ jobs that died with their worker, found and put back into the queue.

A job is first in RQ's intermediate queue, then among the started jobs with the time until which its
worker has it. RQ fails the jobs whose time ran out, unless they were enqueued with retries, and
those that were stranded in the intermediate queue.
"""

import math
import time
from typing import NamedTuple, cast

import redis
from redis.client import Pipeline
from rq import Queue
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.utils import now


class Lost(NamedTuple):
    """A job that no worker has.

    Attributes:
        job: Id of the job.
        entry: Member of the started jobs; b"" for a job stranded in the intermediate queue.
    """

    job: str
    entry: bytes


def find_lost(queue: Queue, seconds: float) -> list[Lost]:
    """Return jobs whose workers were silent for too long, and jobs stranded over `seconds`.

    A job gets from the queue to its start in milliseconds, unless a reply is lost or a worker dies.
    """
    connection, stranded = queue.connection, queue.intermediate_queue
    entries = cast(
        "list[bytes]", connection.zrangebyscore(queue.started_job_registry.key, 0, time.time())
    )
    lost = [Lost(entry.decode().partition(":")[0], entry) for entry in entries]
    for job in stranded.get_job_ids():
        if job in queue.started_job_registry or stranded.set_first_seen(job):
            continue
        if _seen_ago(stranded, job) > seconds:
            lost.append(Lost(job, b""))
    return lost


def _seen_ago(stranded: IntermediateQueue, job: str) -> float:
    """Return the seconds since a stranded job was first seen; infinity if that is unreadable."""
    try:
        seen = stranded.get_first_seen(job)
    except (ValueError, OverflowError, OSError, redis.ResponseError):
        return math.inf
    return 0.0 if seen is None else (now() - seen).total_seconds()


def take(queue: Queue, lost: Lost, *, repeat: bool) -> bool:
    """Remove a lost job from where it is, and queue it again if asked to, in one transaction.

    Returns:
        Whether the job still was lost; of several workers that see it, one is told so.
    """
    started, stranded = queue.started_job_registry.key, queue.intermediate_queue
    answers = list[bool]()

    def move(pipe: Pipeline) -> None:
        if lost.entry:
            score = pipe.zscore(started, lost.entry)
            answers.append(score is not None and score <= time.time())
        else:
            answers.append(pipe.lpos(stranded.key, lost.job) is not None)
        pipe.multi()
        if not answers[-1]:
            return
        pipe.zrem(started, lost.entry)
        pipe.lrem(stranded.key, 0, lost.job)
        pipe.delete(stranded.get_first_seen_key(lost.job))
        if repeat:
            pipe.hset(Job.key_for(lost.job), "status", JobStatus.QUEUED)
            queue.push_job_id(lost.job, pipe, at_front=True)

    queue.connection.transaction(move, started, stranded.key)
    return answers[-1]
