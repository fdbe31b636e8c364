"""The process of one RQ worker: `python -m embedfarm.ingest.main`, on `EMBEDFARM_REDIS_URL`."""

import logging
import os
import signal
import sys

from embedfarm.contract.broker import name_process
from embedfarm.contract.process_log import send_log
from embedfarm.contract.processes import watch_parent_pipe
from embedfarm.contract.redaction import start_logging
from embedfarm.contract.settings import Settings
from embedfarm.ingest.task_worker import TaskWorker


def main() -> int:
    """Run jobs until SIGTERM, SIGINT or the end of the parent; any other end is an error."""
    start_logging(logging.INFO)
    settings = Settings()
    send_log(settings.redis_url, name_process("ingest"))
    worker = TaskWorker(settings)
    watch_parent_pipe(lambda: os.kill(os.getpid(), signal.SIGTERM))
    worker.work()
    return 0 if worker.asked else 1


if __name__ == "__main__":
    sys.exit(main())
