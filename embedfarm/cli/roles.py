"""`embedfarm up | schedule | work`: the long-running roles."""

import logging

from rich.console import Console

from embedfarm.broker import hide_password, wait_until_ready
from embedfarm.cli.options import (
    CpuWorkers,
    Devices,
    RedisUrl,
    fail,
    need_server,
    plain_errors,
    read_settings,
    stop_on_signals,
)
from embedfarm.processes import Supervisor

WATCH_SECONDS = 0.5


def up(
    workers: CpuWorkers = 0,
    devices: Devices = "all",
) -> None:
    """Run a whole farm on this machine until it is stopped."""
    from embedfarm.cli.local import run_local_farm

    settings = read_settings()
    stop = stop_on_signals()
    place = settings.state_directory.expanduser()
    with plain_errors(), run_local_farm(place, settings, devices, workers) as farm:
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"up: {', '.join(sorted(farm.stations.pids))}; logs in {place / 'logs'}")
        console.print(f"embed with --redis {farm.url}")
        while not stop.wait(WATCH_SECONDS):
            if farm.failed is not None:
                raise farm.failed


def schedule(redis: RedisUrl = "") -> None:
    """Run a scheduler; of several, one is active and the others stand by."""
    from scheduler.loop import run_alone

    settings = read_settings(redis)
    url = need_server(settings)
    stop = stop_on_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with plain_errors():
        wait_until_ready(url, stop, settings.reconnect_seconds_max)
        run_alone(url, settings, stop)


def work(redis: RedisUrl = "", devices: Devices = "all", workers: CpuWorkers = 0) -> None:
    """Run one worker process per device of this host."""
    from workers.devices import discover
    from workers.supervisor import children

    settings = read_settings(redis)
    url = need_server(settings)
    stop = stop_on_signals()
    with plain_errors():
        chosen = discover(devices, workers)
        wait_until_ready(url, stop, settings.reconnect_seconds_max)
        console = Console(highlight=False, soft_wrap=True)
        logs = settings.state_directory.expanduser() / "logs"
        with Supervisor(children(chosen, settings), logs, settings.drain_seconds) as supervisor:
            labels = ", ".join(device.label for device in chosen)
            console.print(f"working on {labels} for {hide_password(url)}; logs in {logs}")
            while not stop.wait(WATCH_SECONDS):
                if supervisor.failed is not None:
                    fail(str(supervisor.failed))
