"""Proofs that a process that was hit is at work again, which the farm as a whole does not show."""

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

from embedfarm.contract.broker import closing_client, host_name, persist
from embedfarm.contract.farm_client import FarmClient
from embedfarm.ingest.tasks import QUEUE
from tests.chaos.tally import Tally
from tests.chaos.watch import Watch, leases

Proof = Callable[[float], bool]  # whether it has worked since some monotonic time

PROBE: Final = "producer.tasks.cleanup"  # begins at once, and finds nothing to do
LOOK_SECONDS_MAX: Final = 60.0


def nothing_to_show(_: float) -> bool:
    """Return True, for a fault that hits no process: that chunks are done is enough."""
    return True


@dataclass(frozen=True)
class Witness:
    """A witness that knows by what each process shows that it works.

    Attributes:
        url: URL of the server.
        watch: The watch that follows the job.
        tally: The tally of the callers by HTTP and RQ.
    """

    url: str
    watch: Watch
    tally: Tally

    def proof(self, name: str, pid: Callable[[], int] = lambda: 0) -> Proof:
        """Return the proof for a role with process `pid`, or for "embed"; call it before the fault.

        A web server has answered; `embed` has written or ended; a scheduler has decided; a child of
        `ingest` has begun a job; and of all that a worker held, nothing lies where it was.
        """
        if name == "web":
            return lambda since: self.tally.served > since
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
            farm = FarmClient(client)
            return farm.plans.has_scheduler() and any(
                each.time > at for each in farm.plans.decisions(1)
            )

    def _has_begun(self, probes: list[str], pid: Callable[[], int], since: float) -> bool:
        """Tell whether an RQ job has begun; enqueue one if there is none to begin.

        An orphan's job does not count: what a process leaves behind may begin one more.
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
        """Tell whether each lease is gone, another one's, or was taken or renewed since then.

        What happens in the very next milliseconds, less than we take to ask, counts as before.
        """
        silent = time.monotonic() - since
        now_held = self._held(worker)
        return not any(idle >= silent for lease, idle in now_held.items() if lease in held)

    def _held(self, worker: str) -> dict[tuple[str, str], float]:
        """Return the idle seconds of a worker's leases, by stream and entry."""
        with closing_client(self.url) as client:
            found = leases(FarmClient(client), worker)
            return {(lease.stream, lease.id): lease.idle_ms / 1000 for lease in found}


def _parent(pid: int) -> int:
    """Return the parent of a process; 1 or so if it is gone, -1 if both are."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return -1
