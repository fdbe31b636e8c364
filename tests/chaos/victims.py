"""When is what was hit at work again? The farm as a whole goes on without most of its processes."""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

import psutil
from rq import Queue
from rq.job import Job
from rq.utils import now

from embedfarm.broker import closing_client, host_name, persist
from embedfarm.farm import Farm
from producer.tasks import QUEUE
from tests.chaos.callers import Callers
from tests.chaos.watch import Watch, leases

Proof = Callable[[float], bool]  # whether it has worked since some monotonic time

PROBE: Final = "producer.tasks.cleanup"  # begins at once, and finds nothing to do
LOOK_SECONDS_MAX: Final = 60.0


def nothing_to_show(_: float) -> bool:
    """Of a fault that hits no process of ours: that chunks are done is enough."""
    return True


@dataclass(frozen=True)
class Witness:
    """Knows by what each process shows that it works.

    Attributes:
        url: The server.
        watch: Follows the job.
        callers: Ask by HTTP.
    """

    url: str
    watch: Watch
    callers: Callers

    def proof(self, name: str, pid: Callable[[], int] = lambda: 0) -> Proof:
        """Of a role, whose process is `pid`, or of "embed"; to be asked for before it is hit.

        A web server has answered; `embed` has written or ended; a scheduler has decided; a child of
        `ingest` has begun a job; and of all that a worker held, nothing lies where it was.
        """
        if name == "web":
            return lambda since: self.callers.served > since
        if name == "embed":
            return lambda since: self.watch.written_after > since
        if name == "scheduler":
            return self._has_decided
        if name == "ingest":
            return partial(self._has_begun, [], pid)
        worker = f"{host_name()}:{name.removeprefix('worker-')}"
        held = persist(lambda: self._held(worker), threading.Event(), LOOK_SECONDS_MAX)
        return partial(self._has_settled, worker, held.keys())

    def _has_decided(self, since: float) -> bool:
        at = time.time() - (time.monotonic() - since)
        with closing_client(self.url) as client:
            farm = Farm(client)
            return farm.has_scheduler() and any(each.time > at for each in farm.decisions(1))

    def _has_begun(self, probes: list[str], pid: Callable[[], int], since: float) -> bool:
        """Whether an RQ job has begun; so that there always is one to begin, we enqueue some.

        Not in an orphan: what a process leaves behind may begin one more before it notices.
        """
        at = now() - timedelta(seconds=time.monotonic() - since)
        with closing_client(self.url) as client:
            queue = Queue(QUEUE, client, serializer="json")
            if not queue.job_ids:
                probes.append(queue.enqueue(PROBE).id)
            names = [*probes, *queue.started_job_registry.get_job_ids(cleanup=False)]
            begun = [
                job.worker_name or ""
                for job in Job.fetch_many(names, client, "json")
                if job and job.started_at and job.started_at > at
            ]
        return any(_parent(int(name.rpartition("-")[2] or 0)) == pid() for name in begun)

    def _has_settled(self, worker: str, held: Collection[tuple[str, str]], since: float) -> bool:
        """Whether each lease is gone, another one's, or was taken or renewed since then.

        What happens in the very next milliseconds, less than we take to ask, counts as before.
        """
        silent = time.monotonic() - since
        now_held = self._held(worker)
        return not any(idle >= silent for lease, idle in now_held.items() if lease in held)

    def _held(self, worker: str) -> dict[tuple[str, str], float]:
        """Idle seconds of the leases of a worker, by stream and entry."""
        with closing_client(self.url) as client:
            found = leases(Farm(client), worker)
            return {(lease.stream, lease.id): lease.idle_ms / 1000 for lease in found}


def _parent(pid: int) -> int:
    """The process that started another one; 1 or so if it is gone, -1 if both are."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return -1
