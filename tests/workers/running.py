"""Whole workers that run in threads of a test."""

import contextlib
import faulthandler
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.slow_worker import slow_workers
from embedfarm.contract.settings import Settings
from embedfarm.workers.worker import Worker
from tests.support import LiveServer

SETTINGS = Settings(lease_seconds=0.8, heartbeat_seconds=0.1, heartbeat_ttl_seconds=2.0)
END_SECONDS = 9.0  # in which every worker must have ended


def worker_on(server: LiveServer, device: str = "cpu-0", **settings: Any) -> Worker:  # noqa: ANN401 # any setting
    """A worker that is not running yet."""
    changed = SETTINGS.model_copy(update=settings)
    return Worker(server.url, device, "a kind", "cpu", changed, threading.Event(), dict)


class Running:
    """A worker in a thread; an exception that `run` raises is kept."""

    def __init__(self, worker: Worker, name: str | None = None) -> None:
        self.worker = worker
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001 # the test looks at it
            self.error = error
        finally:
            faulthandler.cancel_dump_traceback_later()  # this process goes on

    def end(self) -> None:
        """Wait until the worker has ended by itself."""
        self._thread.join(END_SECONDS)
        assert not self._thread.is_alive(), "run() does not end"

    def stop(self) -> None:
        """Stop the worker, and wait until it has ended."""
        self.worker.stop.set()
        self.end()


@contextlib.contextmanager
def working(worker: Worker, name: str | None = None) -> Iterator[Worker]:
    """Run a worker for the time of the block; it must stop without error.

    Its thread, which drives the device, has this name.
    """
    running = Running(worker, name)
    try:
        yield worker
    finally:
        running.stop()
        if running.error is not None:  # also when the test failed: it may be why
            raise running.error


@contextlib.contextmanager
def slow_process(server: LiveServer) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker process, 100,000 times slower than a null model's name says, and kill it."""
    (child,) = slow_workers(Settings(redis_url=server.url), {"cpu-9": 100_000.0})
    environment = os.environ | child.environment
    with subprocess.Popen(child.command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()
