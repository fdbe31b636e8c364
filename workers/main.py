"""The process of one worker: `python -m embedfarm.workers.main --device cpu-0`.

The supervisor starts it with the environment that pins the device, so nothing here may choose one.
The server's URL comes from `EMBEDFARM_REDIS_URL`, where no process list shows its password.
"""

import argparse
import atexit
import logging
import os
from typing import Final, NoReturn

from embedfarm.contract import tracing
from embedfarm.contract.broker import name_worker
from embedfarm.contract.process_log import send_log
from embedfarm.contract.processes import stop_when_asked
from embedfarm.contract.redaction import start_logging
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.workers import devices
from embedfarm.workers.cores import bind
from embedfarm.workers.engines.group import FORMED, Group
from embedfarm.workers.worker import Worker

NAME_TAKEN: Final = 2  # a supervisor starts it no more, or the two would end each other in turn
GROUP_ENDED: Final = 71  # as another rank has ended; a supervisor starts all of them again

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Run a worker until SIGTERM, SIGINT, the end of its parent, or another one of its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--cores", default="", help="bind to the NUMA nodes of these cores")
    arguments = parser.parse_args()
    start_logging(logging.INFO)
    settings = Settings()
    send_log(settings.redis_url, name_worker(arguments.device))
    stop = stop_when_asked()
    tracing.start(settings.traces, "worker")
    bind([int(core) for core in arguments.cores.split(",") if core])
    device = devices.pinned(arguments.device)
    if device.ranks > 1:
        FORMED.append(Group(device.kind, device.ranks, settings.load_seconds_max, _end))
    notifier = Notifier()
    worker = Worker(
        settings.redis_url,
        device.label,
        device.product,
        device.torch_device,
        settings,
        stop,
        lambda: _facts(device),
        lambda state: notifier.stop() if stop.is_set() else notifier.tick(state),
        device.ranks,
    )
    worker.run()
    notifier.stop()  # should it have ended before its next heartbeat
    # The interpreter's end frees for 0.3 s what the system frees at once, and ends a thread that
    # still loads a model inside a library, which may abort the process.
    atexit._run_exitfuncs()  # noqa: SLF001 # as always: they end logs and traces
    os._exit(NAME_TAKEN if worker.superseded else 0)


def _end(reason: str) -> None:
    """End this process at once, since another rank of its group has ended."""
    log.critical("%s; all of the group start again", reason)
    os._exit(GROUP_ENDED)


def _facts(device: devices.Device) -> dict[str, float]:
    """Return the device's figures for a heartbeat; none while NVML fails."""
    try:
        return devices.facts(device)
    except devices.DeviceError as error:
        log.warning("no device facts: %s", error)
        return {}


if __name__ == "__main__":
    main()
