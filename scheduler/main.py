"""The scheduler process: `python -m embedfarm.scheduler.main`, on `EMBEDFARM_REDIS_URL`."""

import logging
import sys

from embedfarm.contract.broker import name_process
from embedfarm.contract.process_log import send_log
from embedfarm.contract.processes import stop_when_asked
from embedfarm.contract.redaction import start_logging
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.scheduler.loop import run_alone


def main() -> int:
    """Schedule until SIGTERM, SIGINT or the end of the parent."""
    start_logging(logging.INFO)
    settings = Settings()
    send_log(settings.redis_url, name_process("scheduler"))
    stop = stop_when_asked()
    run_alone(settings.redis_url, settings, stop, Notifier())
    return 0


if __name__ == "__main__":
    sys.exit(main())
