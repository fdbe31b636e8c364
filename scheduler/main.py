"""The scheduler process: `python -m scheduler.main`; the server's URL is `EMBEDFARM_REDIS_URL`."""

import logging
import signal
import sys
import threading

from embedfarm.processes import watch_lifeline
from embedfarm.settings import Settings
from scheduler.loop import Scheduler


def main() -> int:
    """Schedule until SIGTERM, SIGINT or the end of the parent."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    watch_lifeline(stop.set)
    Scheduler(settings.redis_url, settings, stop).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
