"""The scheduler process: `python -m scheduler.main`; the server's URL is `EMBEDFARM_REDIS_URL`."""

import logging
import sys

from embedfarm.processes import stop_when_asked
from embedfarm.redaction import start_logging
from embedfarm.settings import Settings
from scheduler.loop import run_alone


def main() -> int:
    """Schedule until SIGTERM, SIGINT or the end of the parent."""
    start_logging(logging.INFO)
    settings = Settings()
    stop = stop_when_asked()
    run_alone(settings.redis_url, settings, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
