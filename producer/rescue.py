"""RQ jobs that died with their worker, found and put back into the queue.

A job is in the list of those on their way, then among the started ones with the time until which
its worker has it. RQ fails those whose time ran out, unless they were enqueued with retries, and
those that were stranded on the way.
"""

import time
from typing import NamedTuple, cast

from redis.client import Pipeline
from rq import Queue
from rq.job import Job, JobStatus
from rq.utils import now


class Lost(NamedTuple):
    """A job that no worker has.

    Attributes:
        job: Its id.
        entry: Its place among the started jobs; b"" when it is stranded on the way there.
    """

    job: str
    entry: bytes


def find_lost(queue: Queue, seconds: float) -> list[Lost]:
    """The jobs whose workers were silent for too long, and those stranded for more than `seconds`.

    From the queue to the start takes milliseconds, unless a reply is lost or a worker dies.
    """
    connection, stranded = queue.connection, queue.intermediate_queue
    entries = cast(
        "list[bytes]", connection.zrangebyscore(queue.started_job_registry.key, 0, time.time())
    )
    lost = [Lost(entry.decode().partition(":")[0], entry) for entry in entries]
    for job in stranded.get_job_ids():
        if job in queue.started_job_registry or stranded.set_first_seen(job):
            continue
        seen = stranded.get_first_seen(job)
        if seen is not None and (now() - seen).total_seconds() > seconds:
            lost.append(Lost(job, b""))
    return lost


def take(queue: Queue, lost: Lost, *, repeat: bool) -> bool:
    """Remove a lost job from where it is, and queue it again if asked to, all at once.

    Returns:
        Whether it still was lost; of several workers that see it, one gets this answer.
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
