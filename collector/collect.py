"""Results out of the server in order of their start index, onto disk, then off the server."""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from collector.manifest import About, Manifest, OutputError
from collector.output import Output
from collector.results import check_place
from collector.writer import Writer
from embedfarm.broker import UNAVAILABLE, persist
from embedfarm.farm import Farm
from embedfarm.jobs import Job
from embedfarm.records import ForeignVersion, RecordError, Result
from embedfarm.settings import Settings
from embedfarm.status import JobGone, JobStatus

T = TypeVar("T")

WAIT_SECONDS: Final = 1.0
RESULTS_AHEAD: Final = 32
GONE_LOOKS: Final = 15  # at a job that is not there, each `WAIT_SECONDS` after the one before
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # what somebody can make room for

log = logging.getLogger(__name__)


class JobEnded(RuntimeError):
    """The job was cancelled, or failed, before all its results came."""


@dataclass
class Collector:
    """Moves one job's results into an output; the disk, not the server, knows how far it is.

    A disk that is full is waited for: results stay on the server, where at `results_bytes_max` no
    more are made, and the job's `reason` says why.

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
    _gone: tuple[str, int] = ("", 0)  # the server that has no such job, and looks at it
    _damaged: tuple[int, str] | None = None  # where a result begins that cannot be read, and why
    _lost_at: int = -1  # where the last one began that was given up for that

    def collect(self) -> int | None:
        """Collect until every chunk has its result in the output; None when `stop` came first.

        Returns:
            The number of chunks in the job.

        Raises:
            JobEnded: Somebody cancelled the job.
            JobGone: Somebody deleted it.
            OutputError, OSError: As for `Output.add`; or a result is of another version, or cannot
                be read, nor can the one that came in its place.
            redis.ConnectionError: The server stayed away.
        """
        try:
            self._persist(self._forget_durable)
            self._persist(self._wait_for_nothing)
            with Writer(self._keep, RESULTS_AHEAD) as writer:
                return self._fetch(writer)
        except (*UNAVAILABLE, OSError):
            if not self.stop.is_set():
                raise
        return None

    def finish(self, count: int, about: About) -> Manifest | None:
        """Finish the output of `count` chunks, as `Output.finish`; None when `stop` came first.

        Raises:
            TilingError, OSError: As for `Output.finish`.
        """
        finish = partial(self.output.finish, count, about)
        try:
            return self._store(finish, finish)
        except (*UNAVAILABLE, OSError):
            if not self.stop.is_set():
                raise
        return None

    def _fetch(self, writer: Writer) -> int | None:
        """Fetch results in order until the job is complete on the output; None after `stop`."""
        upto = self.output.buffered.stop
        while not self.stop.is_set():
            result = self._persist(partial(self._look, upto))
            if result is not None:
                writer.put(result)
                upto = result.start + result.count
                continue
            writer.flush()
            if self._damaged is not None:
                self._persist(partial(self._lose, *self._damaged))
            status = self._status()
            if status is not None and self._is_complete(status):
                return status.chunk_count
            self._wait()
            upto = self.output.buffered.stop
        return None

    # Results.

    def _look(self, start: int) -> Result | None:
        """The result that begins at a chunk; None where there is none yet, or a damaged one.

        Raises:
            OutputError: It is of another version.
        """
        try:
            result = self.job.result(start)
            if result is not None:
                check_place(result, start)
        except ForeignVersion as error:
            raise OutputError(f"result {start} of job {self.job.id}: {error}") from error
        except (RecordError, OutputError) as error:
            self._damaged = start, str(error)
            return None
        return result

    def _lose(self, start: int, reason: str) -> None:
        """Have a damaged result made anew, with all that is not on disk; but not for ever."""
        if start == self._lost_at:
            raise OutputError(f"result {start} of job {self.job.id}, once more: {reason}")
        log.error("result %d of job %s is made anew: %s", start, self.job.id, reason)
        self.job.lose(self.output.next_index)
        self._lost_at, self._damaged = start, None

    def _take_straddling(self) -> None:
        """Take the rest of a result that begins before the chunk that is next, and has it.

        It is there when a server came back that had lost a split, or blocks that were then cut in
        another way, and embedded again what was collected in other pieces.
        """
        upto = self.output.buffered.stop
        before = max((s for s in self.job.result_starts() if s < upto), default=None)
        result = None if before is None else self._look(before)
        if result is not None and result.start + result.count > upto:
            self._keep(result.rest(upto))

    def _keep(self, result: Result) -> None:
        """Take one result; when it closes a part, take what is durable off the server."""
        if self._store(partial(self.output.add, result), self.output.write) is not None:
            self._persist(self._forget_durable)
            self._store(self.on_part, self.on_part)

    def _store(self, write: Callable[[], T], again: Callable[[], T]) -> T:
        """`write`; while the disk is full `again`, once what it left behind is undone.

        Raises:
            OSError: The disk refused for another reason, or `stop` was set.
        """
        reason = ""
        while True:
            try:
                if reason:
                    self.output.recover()
                answer = write()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if not reason:
                    reason = f"waits for room below {self.output.directory}: {error.strerror}"
                    log.warning("job %s %s", self.job.id, reason)
                self._say(reason)
                if self.stop.wait(self.settings.full_disk_seconds):
                    raise
                write = again
                continue
            if reason:
                log.warning("job %s goes on: there is room again", self.job.id)
                self._persist(self._wait_for_nothing)
            return answer

    def _say(self, reason: str) -> None:
        """Let people see what the job waits for; a server that is away hears of it next time."""
        with contextlib.suppress(*UNAVAILABLE):
            self.job.note("reason", reason)

    def _wait_for_nothing(self) -> None:
        """Take back what was said, by this process or one that died."""
        self.job.note("reason", "")

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
        """The job's status; None while it may be that the server forgot it.

        Its producer makes it again as soon as it notices; how long that takes is counted in looks
        at one server, since this process may have been stopped in between, or that server too.
        """
        try:
            status = self._persist(self.job.status)
        except JobGone:
            server = self._persist(Farm(self.job.client).server_id)
            before, looks = self._gone
            self._gone = server, 1 + looks if server == before else 1
            if self._gone[1] > GONE_LOOKS:
                raise
            return None
        self._gone = "", 0
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
        """Wait for a result; when none comes, see what a server may have lost meanwhile.

        The client renews an idle connection without a word, so that an outage is not always met as
        an error. Results that came back with it are on disk, and in the way of new ones.
        """
        if not self._persist(lambda: self.job.wait(self.job.keys.bell, WAIT_SECONDS)):
            self._persist(self._forget_durable)
            self._persist(self._take_straddling)

    def _persist(self, attempt: Callable[[], T]) -> T:
        """`attempt`, over outages of the server."""
        return persist(
            attempt, self.stop, self.settings.reconnect_seconds_max, recover=self._forget_durable
        )
