"""Chunks that a server has lost in the midst of a job: found while it runs, and sent again."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from embedfarm.collector.manifest import OutputError, Part
from embedfarm.collector.output import Output
from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.coverage import describe_ranges, is_waiting, reconcile
from embedfarm.contract.jobs import Job
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.producer.refill import refill
from embedfarm.runs.request import read_again, same_rows

LOOK_SECONDS: Final = 1.0
PATIENCE_SECONDS_MAX: Final = 600.0

log = logging.getLogger(__name__)


@dataclass
class Reconciler:
    """Looks for lost chunks after an outage, and when the next result does not come for long.

    Attributes:
        job: Job to look at, on a connection that nobody else uses.
        output: Output that the job fills.
        identity: `Request.identity` of the output, its sources as they were given.
        stop: Event that ends the watch.
        outage: Event that is set when the server was away.
    """

    job: Job
    output: Output
    identity: Mapping[str, Any]
    settings: Settings
    stop: threading.Event
    outage: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Send lost chunks again, until `stop` is set.

        Raises:
            OutputError: The source has changed, or cannot be read again.
            CorpusError: The source cannot be read.
        """
        upto, since = -1, 0.0
        patience = patience_least = self.settings.reconcile_seconds
        while not self.stop.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self.output.buffered.stop != upto:
                upto, since, patience = self.output.buffered.stop, now, patience_least
            if self.outage.is_set() or now - since >= patience:
                # Most wait for a worker, and for that there may be many jobs.
                since, patience = now, min(2 * patience, PATIENCE_SECONDS_MAX)
                with contextlib.suppress(*UNAVAILABLE, JobGone):  # as in the watcher
                    self._look(upto)

    def _look(self, upto: int) -> None:
        """Look for lost chunks, if the chunk `upto` may be one or the server was away."""
        if not self.outage.is_set() and is_waiting(self.job, upto):
            return
        missing = reconcile(self.job).missing(self.output.next_index)
        self.outage.clear()
        if missing:
            log.warning("the server has lost chunks: %s", describe_ranges(missing))
            parts = list(self.output.parts)
            count = send_again(self.job, missing, self.identity, parts, self.settings, self.stop)
            log.warning("%d chunks were sent again", count)


def send_again(  # noqa: PLR0913, PLR0917 -- two callers, who have each of them in hand
    job: Job,
    missing: Sequence[range],
    identity: Mapping[str, Any],
    parts: Iterable[Part],
    settings: Settings,
    stop: threading.Event,
) -> int:
    """Send lost chunks again out of the source, and return how many the server took.

    Args:
        job: Job that lost them, on a connection that nobody else uses.
        missing: Ranges of the lost chunks, in order.
        identity: `Request.identity` of the output.
        parts: Parts of the output that are on disk.
        settings: The farm's limits.
        stop: Event that ends the reading, and the waiting for the server.

    Raises:
        OutputError: The source has changed, or cannot be read again.
        CorpusError: The source cannot be read.
        JobGone: Somebody deleted the job.
        redis.ConnectionError: The server stayed away, or `stop` was set while it was.
    """
    sources = identity["sources"]
    if "-" in sources:
        raise OutputError("standard input cannot be read again for the chunks that were lost")
    rows = same_rows(read_again(identity, sources, settings), parts)
    return refill(job, missing, rows, settings, stop)
