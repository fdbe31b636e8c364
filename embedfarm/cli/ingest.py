"""`embedfarm ingest`: the RQ door."""

import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from embedfarm.broker import UNAVAILABLE, closing_client, hide_password, wait_until_ready
from embedfarm.cli.options import (
    USAGE,
    RedisUrl,
    fail,
    need_server,
    plain_errors,
    read_settings,
    stop_on_signals,
)
from embedfarm.processes import Child, Supervisor, watch_lifeline
from embedfarm.settings import Settings

if TYPE_CHECKING:
    from producer.recurring import Timetable

TICK_SECONDS: Final = 0.5

log = logging.getLogger(__name__)

Workers = Annotated[int, typer.Option(min=1, help="Jobs at a time.")]


def ingest(redis: RedisUrl = "", workers: Workers = 1) -> None:
    """Run jobs that programs enqueue with RQ, and those of the setting `recurring`."""
    settings = read_settings(redis)
    url = need_server(settings)
    stop = stop_on_signals()
    watch_lifeline(stop.set)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with plain_errors(), closing_client(url) as client:
        from producer.recurring import RecurringError, Timetable

        try:
            timetable = Timetable(client, settings)
        except RecurringError as error:
            fail(str(error), USAGE)
        wait_until_ready(url, stop, settings.reconnect_seconds_max)
        logs = settings.state_directory.expanduser() / "logs"
        with Supervisor(_children(workers, settings), logs, settings.drain_seconds) as supervisor:
            console = Console(highlight=False, soft_wrap=True)
            console.print(f"{workers} at a time for {hide_password(url)}; logs in {logs}")
            while not stop.wait(TICK_SECONDS):
                if supervisor.failed is not None:
                    fail(str(supervisor.failed))
                _tick(timetable)


def _children(count: int, settings: Settings) -> list[Child]:
    """The RQ workers; the server is `settings.redis_url`."""
    command = [sys.executable, "-m", "producer.main"]
    return [Child(f"ingest-{n}", command, settings.environment()) for n in range(count)]


def _tick(timetable: "Timetable") -> None:
    """Enqueue what is due; a server that is away now is asked again."""
    try:
        timetable.tick(time.time())
    except UNAVAILABLE as error:
        log.warning("the server is away: %s", hide_password(str(error)))
