"""Results out of the server in order of their start index, onto disk, then off the server."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from collector.output import Output
from embedfarm.broker import persist
from embedfarm.jobs import Job, JobGone, JobStatus
from embedfarm.records import Result
from embedfarm.settings import Settings

T = TypeVar("T")

WAIT_SECONDS: Final = 1.0
GONE_SECONDS: Final = 15.0


class JobEnded(RuntimeError):
    """The job was cancelled, or failed, before all its results came."""


@dataclass
class Collector:
    """Moves one job's results into an output; the disk, not the server, knows how far it is.

    Attributes:
        job: On a connection that nobody else uses.
        output: Where results go.
        stop: Ends all waiting.
        on_part: Called after each durable part.
    """

    job: Job
    output: Output
    settings: Settings
    stop: threading.Event
    on_part: Callable[[], object] = lambda: None
    _starts: list[int] = field(default_factory=list)
    _seen_at: float = field(default_factory=time.monotonic)

    def collect(self) -> int | None:
        """Collect until every chunk has its result in the output; None when `stop` came first.

        Returns:
            The number of chunks in the job.

        Raises:
            JobEnded: Somebody cancelled the job.
            JobGone: Somebody deleted it.
            redis.ConnectionError: The server stayed away.
        """
        self._persist(self._forget_stale)
        while not self.stop.is_set():
            result = self._persist(lambda: self.job.result(self.output.buffered.stop))
            if result is not None:
                self._keep(result)
                continue
            status = self._status()
            if status is not None and self._is_complete(status):
                return status.chunk_count
            if not self._persist(lambda: self.job.wait(self.job.keys.bell, WAIT_SECONDS)):
                self._persist(self._take_straddling)
        return None

    def _status(self) -> JobStatus | None:
        """The job's status; None while it may be that a server forgot a job that is just begun.

        Its producer makes it again as soon as it notices.
        """
        try:
            status = self._persist(self.job.status)
        except JobGone:
            if time.monotonic() - self._seen_at > GONE_SECONDS:
                raise
            return None
        self._seen_at = time.monotonic()
        return status

    def _is_complete(self, status: JobStatus) -> bool:
        """Whether the result that is missing never comes, because there are no more chunks."""
        if status.state not in {"open", "closed", "paused"}:
            raise JobEnded(f"the job is {status.state}")
        return status.state == "closed" and self.output.buffered.stop >= status.chunk_count

    def _keep(self, result: Result) -> None:
        """Take one result; when it closes a part, take what is durable off the server."""
        self._starts.append(result.start)
        part = self.output.add(result)
        if part is not None:
            starts, self._starts = self._starts, []
            self._persist(lambda: self.job.drain(part.end, starts))
            self.on_part()

    def _forget_stale(self) -> None:
        """Take results off the server that are on disk already.

        They are there after a crash between the two, and after a server came back that had lost
        the end of its log and let blocks be embedded again.
        """
        upto = self.output.next_index
        stale = [start for start in self.job.result_starts() if start < upto]
        self.job.drain(upto, stale)

    def _take_straddling(self) -> None:
        """Take the rest of a block of which some pieces are on disk.

        It is there when a server came back that had lost a split: then the whole block is embedded
        again, and no result begins at the chunk that is next.
        """
        upto = self.output.buffered.stop
        before = max((s for s in self.job.result_starts() if s < upto), default=None)
        result = None if before is None else self.job.result(before)
        if result is not None and result.start + result.count > upto:
            self._starts.append(result.start)
            self._keep(result.rest(upto))

    def _persist(self, attempt: Callable[[], T]) -> T:
        """`attempt`, over outages of the server."""
        return persist(
            attempt, self.stop, self.settings.reconnect_seconds_max, recover=self._forget_stale
        )
