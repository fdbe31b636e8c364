"""Results out of the server in order of their start index, onto disk, then off the server."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from collector.output import Output
from collector.writer import Writer
from embedfarm.broker import UNAVAILABLE, persist
from embedfarm.jobs import Job
from embedfarm.records import Result
from embedfarm.settings import Settings
from embedfarm.status import JobGone, JobStatus

T = TypeVar("T")

WAIT_SECONDS: Final = 1.0
RESULTS_AHEAD: Final = 32
GONE_SECONDS: Final = 15.0


class JobEnded(RuntimeError):
    """The job was cancelled, or failed, before all its results came."""


@dataclass
class Collector:
    """Moves one job's results into an output; the disk, not the server, knows how far it is.

    The results on the server never overlap: blocks tile the job, and a server that lost the end of
    its log has lost all that came of it. But after such a loss, results may begin elsewhere than
    those that were taken before.

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
    _gone_since: float | None = None

    def collect(self) -> int | None:
        """Collect until every chunk has its result in the output; None when `stop` came first.

        Returns:
            The number of chunks in the job.

        Raises:
            JobEnded: Somebody cancelled the job.
            JobGone: Somebody deleted it.
            OutputError, OSError: As for `Output.add`.
            redis.ConnectionError: The server stayed away.
        """
        try:
            self._persist(self._forget_durable)
            with Writer(self._keep, RESULTS_AHEAD) as writer:
                return self._fetch(writer)
        except UNAVAILABLE:
            if not self.stop.is_set():
                raise
        return None

    def _fetch(self, writer: Writer) -> int | None:
        """Fetch results in order until the job is complete on the output; None after `stop`."""
        upto = self.output.buffered.stop
        while not self.stop.is_set():
            result = self._persist(partial(self.job.result, upto))
            if result is not None:
                writer.put(result)
                upto = result.start + result.count
                continue
            writer.flush()
            status = self._status()
            if status is not None and self._is_complete(status):
                return status.chunk_count
            self._wait()
            upto = self.output.buffered.stop
        return None

    # Results.

    def _take_straddling(self) -> None:
        """Take the rest of a result that begins before the chunk that is next, and has it.

        It is there when a server came back that had lost a split, or blocks that were then cut in
        another way, and embedded again what was collected in other pieces.
        """
        upto = self.output.buffered.stop
        before = max((s for s in self.job.result_starts() if s < upto), default=None)
        result = None if before is None else self.job.result(before)
        if result is not None and result.start + result.count > upto:
            self._keep(result.rest(upto))

    def _keep(self, result: Result) -> None:
        """Take one result; when it closes a part, take what is durable off the server."""
        if self.output.add(result) is not None:
            self._persist(self._forget_durable)
            self.on_part()

    def _forget_durable(self) -> None:
        """Take results off the server that are on disk.

        Not the last one, which may go on beyond the disk (see `_take_straddling`); its turn comes
        with the next part.
        """
        upto = self.output.next_index
        begun = sorted(start for start in self.job.result_starts() if start < upto)
        self.job.drain(upto, begun[:-1])

    # The job.

    def _status(self) -> JobStatus | None:
        """The job's status; None while it may be that a server forgot a job that is just begun.

        Its producer makes it again as soon as it notices.
        """
        try:
            status = self._persist(self.job.status)
        except JobGone:
            now = time.monotonic()
            self._gone_since = self._gone_since or now
            if now - self._gone_since > GONE_SECONDS:
                raise
            return None
        self._gone_since = None
        return status

    def _is_complete(self, status: JobStatus) -> bool:
        """Whether the result that is missing never comes, because there are no more chunks."""
        if 0 <= status.chunk_count <= self.output.buffered.stop:
            return True
        if status.state not in {"open", "closed", "paused"}:
            raise JobEnded(f"the job is {status.state}")
        return False

    # Waiting.

    def _wait(self) -> None:
        """Wait for a result; when none comes, see whether what is next is there in another one."""
        if not self._persist(lambda: self.job.wait(self.job.keys.bell, WAIT_SECONDS)):
            self._persist(self._take_straddling)

    def _persist(self, attempt: Callable[[], T]) -> T:
        """`attempt`, over outages of the server."""
        return persist(
            attempt, self.stop, self.settings.reconnect_seconds_max, recover=self._forget_durable
        )
