"""The process of one RQ worker: `python -m producer.main`; the server is `EMBEDFARM_REDIS_URL`."""

import logging
import os
import signal
import sys

from embedfarm.processes import watch_lifeline
from embedfarm.redaction import start_logging
from embedfarm.settings import Settings
from producer.ingest import TaskWorker


def main() -> int:
    """Run jobs until SIGTERM, SIGINT or the end of the parent; any other end is an error."""
    start_logging(logging.INFO)
    worker = TaskWorker(Settings())
    watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    worker.work()
    return 0 if worker.asked else 1


if __name__ == "__main__":
    sys.exit(main())
