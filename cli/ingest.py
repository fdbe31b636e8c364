"""`embedfarm ingest`: runs the jobs that programs enqueue with RQ."""

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from embedfarm.cli.options import (
    USAGE,
    RedisUrl,
    fail,
    plain_errors,
    settings_with_queue,
    stop_on_signals,
)
from embedfarm.cli.supervision import keep
from embedfarm.contract.broker import UNAVAILABLE, closing_client, wait_until_ready
from embedfarm.contract.processes import RUN_ROLE, Child, Supervisor, watch_parent_pipe
from embedfarm.contract.redaction import hide_password, start_logging
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier

if TYPE_CHECKING:
    from redis import Redis

    from embedfarm.ingest.recurring import Timetable

log = logging.getLogger(__name__)

Workers = Annotated[int, typer.Option(min=1, help="RQ jobs to run at a time.")]


def ingest(redis: RedisUrl = "", workers: Workers = 1) -> None:
    """Run jobs that programs enqueue with RQ, and those of the setting `recurring`."""
    settings = settings_with_queue(redis)
    url, queue = settings.redis_url, settings.queue_server
    stop = stop_on_signals()
    watch_parent_pipe(stop.set)
    notifier = Notifier()
    start_logging(logging.WARNING)
    with plain_errors(), closing_client(url) as client, closing_client(queue) as rq:
        from embedfarm.ingest.recurring import RecurringError, Timetable

        try:
            timetable = Timetable(client, settings)
        except RecurringError as error:
            fail(str(error), USAGE)
        for each in {url, queue}:
            wait_until_ready(each, stop, settings.reconnect_seconds_max)
        logs = settings.state_directory.expanduser() / "logs"
        with Supervisor(_children(workers, settings), logs, settings.drain_seconds) as supervisor:
            console = Console(highlight=False, soft_wrap=True)
            console.print(f"{workers} at a time for {hide_password(url)}; logs in {logs}")
            ready = partial(_all_wait, rq, supervisor, workers)
            tick = partial(notifier.tick, f"{workers} at a time")
            keep(stop, lambda: supervisor.failed, ready, tick, lambda: _tick(timetable))
            notifier.stop()


def _all_wait(client: "Redis", supervisor: Supervisor, count: int) -> bool:
    """Tell whether all RQ workers run, and are known to RQ."""
    from embedfarm.ingest.task_worker import are_registered

    pids = supervisor.pids.values()
    return len(pids) == count and are_registered(client, pids)


def _children(count: int, settings: Settings) -> list[Child]:
    """Return the RQ workers to start; their servers are those of `settings`."""
    command = [*RUN_ROLE, "embedfarm.ingest.main"]
    return [Child(f"ingest-{n}", command, settings.environment()) for n in range(count)]


def _tick(timetable: "Timetable") -> None:
    """Enqueue jobs that are due; when the server is away, the next tick tries again."""
    try:
        timetable.tick(time.time())
    except UNAVAILABLE as error:
        log.warning("the server is away: %s", error)
