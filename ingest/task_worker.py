"""The RQ worker: runs the tasks on a list and nothing else, and repeats what a crash cut off.

RQ by itself would run any dotted path, look for the dead after 405 seconds at the earliest, and
fail what they left unless the job was enqueued with retries.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Collection
from functools import partial
from typing import Any, Final, cast

import redis
from rq import Queue, Worker
from rq.command import parse_payload
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)
from rq.utils import now
from rq.worker_registration import clean_worker_registry, register

from embedfarm.contract.broker import UNAVAILABLE, closing_client, host_name
from embedfarm.contract.redaction import hide_job_directories, hide_secrets
from embedfarm.contract.server_url import make_pool
from embedfarm.contract.settings import Settings
from embedfarm.ingest.child_command import name_signal, stop_when_asked
from embedfarm.ingest.job_queue import Submissions
from embedfarm.ingest.rescue import find_lost, take
from embedfarm.ingest.rq_jobs import count_death, fail_request, settle
from embedfarm.ingest.rq_keys import (
    UNREADABLE,
    over_unreadable,
    remove_foreign,
    remove_unreadable,
    remove_unreadable_of,
)
from embedfarm.ingest.task_job import GIVEN_UP, OVER, RESULT_SECONDS, TaskJob
from embedfarm.ingest.tasks import QUEUE
from embedfarm.ingest.webhooks import tell

LOOKED_AT_MAX: Final = 1000  # newest jobs of a registry, for what the farm was not told of them

log = logging.getLogger(__name__)


def worker_name(pid: int) -> str:
    """Return the name of a process of this host among RQ's workers."""
    return f"{host_name()}-ingest-{pid}"


def are_registered(client: redis.Redis, pids: Collection[int]) -> bool:
    """Tell whether RQ knows all these processes of this host as workers."""
    prefix = Worker.redis_worker_namespace_prefix
    keys = [f"{prefix}{worker_name(pid)}" for pid in pids]
    return bool(keys) and client.exists(*keys) == len(keys)


class TaskWorker(Worker):
    """Forks a process per job, keeps the job's lease, and looks for jobs whose lease ran out.

    Args:
        settings: Limits; the server is `queue_server`, on a connection of its own, since RQ changes
            its waiting times.

    Attributes:
        asked: Whether it was asked to stop.
    """

    asked = False

    def __init__(self, settings: Settings) -> None:
        connection = redis.Redis.from_pool(make_pool(settings.queue_server))
        self._settings = settings
        self._lease_seconds = settings.ingest_lease_seconds
        tick = self._lease_seconds // 3
        super().__init__(
            [Queue(QUEUE, connection, serializer="json", job_class=TaskJob)],
            name=worker_name(os.getpid()),
            connection=connection,
            job_class=TaskJob,
            serializer="json",
            default_result_ttl=RESULT_SECONDS,
            maintenance_interval=self._lease_seconds,
            job_monitoring_interval=tick,
            worker_ttl=15 + tick,  # RQ waits 15 s less for a job before it looks around
        )

    @property
    def _queue(self) -> Queue:
        return self.queues[0]

    # What cannot be read, for which no other job must pay.

    def register_birth(self) -> None:
        """Register this worker, after removing jobs of its queue that cannot be read."""
        remove_unreadable(self._queue)
        super().register_birth()  # type: ignore[no-untyped-call] # RQ is typed in part

    def run_maintenance_tasks(self) -> None:
        """Run RQ's maintenance, also where something cannot be read."""
        remove_foreign(self._queue)
        over_unreadable(self._queue, super().run_maintenance_tasks)

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """Wait for the next job that can be read, and return it with its queue."""
        wait = partial(super().dequeue_job_and_maintain_ttl, timeout, max_idle_time)
        return over_unreadable(self._queue, wait)

    def handle_payload(self, message: Any) -> None:  # noqa: ANN401 -- as RQ has it
        """Obey an order to stop a job; ignore all other orders, readable or not."""
        try:
            if parse_payload(message)["command"] == "stop-job":
                super().handle_payload(message)  # type: ignore[no-untyped-call] # as above
        except UNREADABLE as error:
            log.warning("an order that cannot be read is left out: %r", error)

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Run a job, after removing what RQ cannot read in the keys beside its own."""
        remove_unreadable_of(job)
        super().execute_job(job, queue)

    def get_heartbeat_ttl(self, job: Job) -> int:
        """Return the seconds after which a silent worker has lost its job."""
        del job
        return self._lease_seconds

    # Stopping.

    def handle_warm_shutdown_request(self) -> None:
        """Hand the running job back instead of waiting for its end."""
        self.asked = True
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call] # as above
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def setup_work_horse_signals(self) -> None:
        """Have a job's process stop its command when asked, or when the worker is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_when_asked(self.pid or 0)

    def wait_for_horse(self) -> tuple[int | None, int | None, Any]:
        """Wait for the end of a job's process as RQ does, and lose none.

        RQ waits under an alarm. One that rang when the end had been taken and not yet told would
        leave a process without an end, whose job RQ calls failed, whatever it has said itself.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.horse_pid, os.WEXITED | os.WNOWAIT)
            signal.alarm(0)
        return super().wait_for_horse()

    # What fails, and what a crash leaves.

    def handle_job_failure(
        self,
        job: Job,
        queue: Queue,
        started_job_registry: StartedJobRegistry | None = None,
        exc_string: str = "",
    ) -> None:
        """End the farm's job, and tell of a failure, if the job is not tried again.

        A job that was cancelled and has then ended by itself counts as stopped.

        Both come first: a failed job has a reason, and once it has failed it may be deleted or
        enqueued again at any moment, by the same name.
        """
        job = cast("TaskJob", job)
        exc_string = hide_secrets(job.given_up or exc_string)
        exc_string = hide_job_directories(exc_string, self._settings.jobs_path)
        cancelled = job.get_meta().get("state") == "cancelled"
        if (cancelled or not job.should_retry) and self._stopped_job_id != job.id:
            reason = _last_sentence(exc_string) or "no reason is known"
            fail_request(job, reason, self._settings)
            tell(job, "cancelled" if cancelled else "failed", reason)
        if cancelled:
            self._stopped_job_id = job.id
        try:
            super().handle_job_failure(job, queue, started_job_registry, exc_string)
        except UNREADABLE as error:
            log.warning("job %s cannot even fail: %r", job.id, error)
            job.forget()

    # What a crash leaves.

    def handle_work_horse_killed(
        self,
        job: TaskJob,
        retpid: int | None,
        ret_val: int | None,
        rusage: Any,  # noqa: ANN401 -- as RQ has it
    ) -> None:
        """Repeat a job whose process was killed, by the system for its memory for example."""
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)  # type: ignore[no-untyped-call] # as above
        if retpid is None:  # RQ has killed it, a minute after its time was up
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(retpid, signal.SIGKILL)  # the job's command
        if self._forgive(job, f"its process was {_describe_end(ret_val or 0)}"):
            job.retries_left = (job.retries_left or 0) + 1

    def _forgive(self, job: TaskJob, how: str) -> bool:
        """Count a run that died; tell whether it may be repeated: not after too many in a row."""
        if count_death(job) < self._settings.deliveries_max:
            return True
        job.given_up = f"{GIVEN_UP}: {how}"
        return False

    def clean_registries(self) -> None:
        """Clean RQ's registries, repeat what was lost, and tell the farm what it does not know.

        RQ's lock, which a worker that dies in here would hold for a quarter of an hour, is not
        taken: each step is atomic.
        """
        queue = self._queue
        for registry in (FinishedJobRegistry, FailedJobRegistry, DeferredJobRegistry):
            registry(queue=queue, job_class=TaskJob).cleanup()
        clean_worker_registry(queue)
        register(self)  # whoever may enqueue may have removed it
        self._repeat_lost(queue)
        try:
            self._settle_ended(queue)
            self._enqueue_forgotten()
        except UNAVAILABLE as error:
            log.warning("what the farm's jobs need waits for their server: %s", error)
        self.last_cleaned_at = now()  # type: ignore[assignment] # RQ types what it begins with

    def _repeat_lost(self, queue: Queue) -> None:
        """Repeat the jobs of dead workers, but not for ever."""
        for lost in find_lost(queue, self._lease_seconds):
            try:
                job = cast("TaskJob", TaskJob.fetch(lost.job, self.connection, "json"))
            except NoSuchJobError:
                take(queue, lost, repeat=False)
                continue
            over = job.get_status() in OVER
            repeat = not over and self._forgive(job, "its worker was lost")
            if take(queue, lost, repeat=repeat) and not over:
                log.warning("job %s was lost with its worker", lost.job)
                if not repeat:
                    self.handle_job_failure(job, queue)

    def _settle_ended(self, queue: Queue) -> None:
        """Tell the farm of jobs that were cancelled in the queue, or ended while it was away."""
        for registry in (CanceledJobRegistry(queue=queue), FailedJobRegistry(queue=queue)):
            for name in registry.get_job_ids(0, LOOKED_AT_MAX - 1, desc=True):
                with contextlib.suppress(NoSuchJobError):
                    settle(TaskJob.fetch(name, self.connection, "json"), self._settings)

    def _enqueue_forgotten(self) -> None:
        """Enqueue the farm's jobs by HTTP that were made and never enqueued."""
        with closing_client(self._settings.redis_url) as farm:
            submissions = Submissions(farm, self._settings, self.connection)
            for job in submissions.enqueue_forgotten():
                log.warning("job %s was made and not enqueued: it is now", job)


def _describe_end(status: int) -> str:
    """Describe how a process of that status, as `os.wait` has it, came to its end."""
    if os.WIFSIGNALED(status):
        return f"ended by {name_signal(os.WTERMSIG(status))}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"


def _last_sentence(trace: str) -> str:
    """Return an exception's message, without its class and traceback."""
    lines = trace.strip().splitlines()
    name, separator, said = lines[-1].partition(": ") if lines else ("", "", "")
    return said if separator and " " not in name else "".join(lines[-1:])
