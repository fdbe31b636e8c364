"""A job's results: read from the server in order, put on disk, then deleted on the server."""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import redis

from embedfarm.collector.known_vectors import FilledResult, KnownVectors
from embedfarm.collector.manifest import About, Manifest, OutputError, Part
from embedfarm.collector.output import Output
from embedfarm.collector.result_span import check_place
from embedfarm.collector.source_check import RowsDiffer, SourceChanged, SourceCheck
from embedfarm.collector.stored_vectors import StoredVectors
from embedfarm.collector.writer import Writer
from embedfarm.contract.broker import UNAVAILABLE, persist
from embedfarm.contract.encoding import ForeignVersion, RecordError
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Result
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import has_room
from embedfarm.contract.status import JobGone, JobStatus, is_gone
from embedfarm.contract.window import FarmWindow

T = TypeVar("T")

WAIT_SECONDS: Final = 1.0
SHORT_WAIT_SECONDS: Final = 0.25  # while the server is short of room, and others wait for this job
RESULTS_AHEAD: Final = 32
GONE_LOOKS: Final = 15  # at a job that is not there, each `WAIT_SECONDS` after the one before
DIFFERS: Final = "the source has other rows there than were embedded"
LOSING: Final = ("open", "paused")  # states of jobs that results can be lost of
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # what somebody can make room for

log = logging.getLogger(__name__)


class JobEnded(EmbedfarmError, RuntimeError):
    """Raised when the job was cancelled, or failed, before all its results came."""


class JobCancelled(JobEnded):
    """Raised when the job was cancelled; what was embedded in order is on the disk."""


@dataclass
class Collector:
    """Moves one job's results into an output; the disk, not the server, knows how far it is.

    A disk that is full is waited for: results stay on the server, where at `results_bytes_max` no
    more are made, and the job's `reason` says why.

    Where others wait for room on the server, or this job itself does, a part is closed as soon as
    nobody works on what would fill it: otherwise many jobs, each with a part begun, could fill the
    server together, and none would go on.

    The results on the server never overlap: blocks tile the job, and a server that lost the end of
    its log has lost all that came of it. But after such a loss, results may begin elsewhere than
    those that were taken before.

    Attributes:
        job: Job whose results are collected, on a connection that nobody else uses.
        output: Output that the results go into.
        stop: Event that ends all waiting.
        on_part: Function that is called after each durable part.
        source: Check of which results were made of the source; None trusts the server.
        known: Vectors that workers need not make; None where they make all.
        settle: Learns which model makes the results, keeps that for runs to come, and tells whether
            it is known. What a server has of results it has of their model; it may lose both.
    """

    job: Job
    output: Output
    settings: Settings
    stop: threading.Event
    on_part: Callable[[], object] = lambda: None
    source: SourceCheck | None = None
    known: KnownVectors | None = None
    settle: Callable[[], bool] = lambda: True
    stored: StoredVectors | None = None
    _settled: bool = False
    _window: FarmWindow = field(init=False)
    _short: bool = False  # whether the server was short of room when no result came
    _gone: tuple[str, int] = ("", 0)  # the server that has no such job, and looks at it
    _damaged: tuple[int, str] | None = None  # where a result begins that cannot be read, and why
    # The server that had the last result that was made anew, where it began, and whether the source
    # had other rows there: what is damaged then was not damaged before.
    _lost_at: tuple[str, int, bool] = ("", -1, False)
    _reading: int = 0  # number of the source's reading that all not on disk was compared with

    def __post_init__(self) -> None:
        self._window = FarmWindow(self.job.client, self.settings)

    def collect(self) -> int | None:
        """Collect until every chunk has its result in the output; None when `stop` came first.

        Returns:
            The number of chunks in the job.

        Raises:
            JobCancelled: Somebody cancelled the job.
            JobEnded: Somebody ended the job in another way.
            JobGone: Somebody deleted the job.
            OutputError: `Output.add` refused a result; or one is of another version, or cannot be
                read, nor can the one that came in its place.
            OSError: The disk refused for another reason than being full.
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

    def close_part(self) -> None:
        """Put what was collected on the disk, as a part that may be small."""
        early = partial(self.output.write, early=True)
        self._close(early, early)

    def close_last_part(self) -> bool:
        """Put the end of the job on the disk, before `finish`; False when `stop` came first.

        Raises:
            OSError: The disk refused for another reason than being full.
        """
        try:
            self.close_part()
        except (*UNAVAILABLE, OSError):
            if not self.stop.is_set():
                raise
            return False
        return True

    def finish(self, count: int, about: About) -> Manifest | None:
        """Finish the output of `count` chunks with its manifest; None when `stop` came first.

        Raises:
            TilingError: Not all of `count` chunks were added; nothing has changed.
            OSError: The disk refused for another reason than being full.
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
        last_look = False
        while not self.stop.is_set():
            if self.source is not None and self.source.reading != self._reading:
                writer.flush()
                self._read_anew(self.source)
                upto = self.output.buffered.stop
            result = self._persist(partial(self._look, upto))
            while result is not None and not self._settled:
                before, settle = result, partial(self._persist, self.settle)
                is_known = bool(self._store(settle, settle))
                result = self._persist(partial(self._look, upto))
                if result == before:  # else the server may have lost what its worker said first
                    # Whoever gave chunks up had perhaps no model, and said nothing of it.
                    self._settled = is_known and len(result.errors) < result.embedded
                    break
            if result is not None and (result := self._check(result)) is not None:
                writer.put(result)
                upto = result.start + result.count
                continue
            writer.flush()
            if self._damaged is not None:
                self.close_part()  # what came before it is good, and need not be made anew
                self._persist(partial(self._lose, *self._damaged))
            status = self._status()
            if status is not None and self._is_complete(status) and self._closes():
                return self.output.buffered.stop
            if last_look:
                self._cut_short()
            if self._is_cancelled(status):  # no more is committed now
                self._persist(self._take_straddling)
                last_look = True
            else:
                self._wait(status)
            upto = self.output.buffered.stop
        return None

    def _cut_short(self) -> None:
        """Put what was collected of a cancelled job on the disk.

        Raises:
            JobCancelled: It is done.
        """
        self.close_part()
        upto = self.output.next_index
        raise JobCancelled(f"job {self.job.id} is cancelled; it is on disk up to chunk {upto:,}")

    def _read_anew(self, source: SourceCheck) -> None:
        """Forget what is not on disk: it was compared with an earlier reading of the source."""
        with source.held:
            self.output.forget()
            self._reading = source.reading

    # Results.

    def _look(self, start: int, upto: int = 0) -> Result | None:
        """Return the result that begins at a chunk; None where none is yet, or a damaged one.

        Args:
            start: Index of the chunk.
            upto: Index of a chunk behind which it has to go on, else it is as if none were there.

        Raises:
            OutputError: The result is of another version.
        """
        try:
            result = self.job.results.at(start)
            if result is None or result.start + result.count <= upto:
                return None
            if self.stored is not None:
                # What fills a result, or cuts it, needs the vectors that it has.
                carried = self.output.listed is None or self.known is not None or upto > 0
                result = self.stored.fill(result) if carried else self.stored.take(result)
            check_place(result, start)
        except ForeignVersion as error:
            raise OutputError(f"result {start} of job {self.job.id}: {error}") from error
        except (RecordError, OutputError) as error:
            self._damaged = start, str(error)
            return None
        return result

    def _check(self, result: Result) -> Result | None:
        """Return the result if it was made of the source's rows; None if not, or not read yet."""
        if self.source is None:
            return result
        try:
            return self.source.accept(result)
        except RowsDiffer:
            if not self.source.abandoned:
                self._damaged = result.start, DIFFERS
        return None

    def _lose(self, start: int, reason: str) -> None:
        """Have a wrong or damaged result made anew, with all that is not on disk.

        A server that has lost the end of its log may bring the result back, so that only what one
        server has twice is no better when it is made anew.

        Raises:
            OutputError: The result is damaged a second time.
            SourceChanged: The result is of other rows than the source's a second time.
        """
        here = FarmClient(self.job.client).server_id(), start, reason == DIFFERS
        if here == self._lost_at and reason == DIFFERS:
            raise SourceChanged(f"row {start}: {reason}, twice: it changes while it is read")
        if here == self._lost_at:
            raise OutputError(f"result {start} of job {self.job.id}, once more: {reason}")
        log.error("result %d of job %s is made anew: %s", start, self.job.id, reason)
        self._damaged = None
        if self.job.results.lose(self.output.next_index) in LOSING:
            self._lost_at = here

    def _take_straddling(self) -> None:
        """Take the rest of a result that begins before the next chunk and contains it.

        There is one when a server came back that had lost a split, or blocks that were then cut in
        another way, and what was collected in other pieces was embedded again.
        """
        upto = self.output.buffered.stop
        before = max((s for s in self.job.results.starts() if s < upto), default=None)
        result = None if before is None else self._look(before, upto)
        if result is not None:
            rest = self._check(result.rest(upto))
            if rest is not None:
                self._keep(rest)

    def _keep(self, result: Result) -> None:
        """Add a result to the output; if it closes a part, delete durable results on the server."""

        def fill() -> FilledResult:
            if self.source is None or self.known is None or not result.known:
                return FilledResult(result, {})
            return self.known.fill(result, self.source.places(result), self.output)

        def add() -> Part | None:
            filled = self._store(fill, fill)
            digests = b""
            if self.source is not None:
                digests = self.source.digests(result)
                self.source.keep_sampled(filled.result, digests)
            return self.output.add(filled.result, digests, filled.reused)

        self._close(add, self.output.write)

    def _close(self, write: Callable[[], Part | None], again: Callable[[], Part | None]) -> None:
        """Call `write` by `_store`; if it closes a part, delete durable results on the server."""
        source = self.source
        with contextlib.nullcontext() if source is None else source.held:
            if source is not None and source.reading != self._reading:
                return  # of an earlier reading; it is looked at again
            part = self._store(write, again)
            if source is not None:
                source.forget(self.output.buffered.stop)
        if part is not None:
            self._persist(self._forget_durable)
            self._store(self.on_part, self.on_part)

    def _store(self, write: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the answer of `write`; while the disk is full, undo its remains and call `again`.

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
        """Note on the server what the job waits for; do nothing while the server is away."""
        with contextlib.suppress(*UNAVAILABLE):
            self.job.note("reason", reason)

    def _wait_for_nothing(self) -> None:
        """Clear the reason for waiting that this process, or one that died, has given."""
        self.job.note("reason", "")

    def _forget_durable(self) -> None:
        """Delete results on the server that are on disk.

        The last one stays, since it may go on beyond the disk (see `_take_straddling`); its turn
        comes with the next part. What the server takes for drained and is not on disk is lost.
        """
        upto = self.output.next_index
        begun = sorted(start for start in self.job.results.starts() if start < upto)
        if self.job.results.drain(upto, begun[:-1]) == "behind":
            log.warning("job %s: an earlier try is back, and begins again at %d", self.job.id, upto)
            self.job.results.lose(upto)
        if self.stored is not None:
            generation = partial(self.job.noted, "generation")
            self.stored.sweep(upto, generation, self.output.listed or ())

    # The job.

    def _status(self) -> JobStatus | None:
        """Return the job's status; None while it may be that the server forgot the job.

        A crash may also bring back the record of an earlier job of that name, which had ended. Its
        producer makes it again as soon as it notices; how long that takes is counted in looks at
        one server, since this process may have been stopped in between, or that server too.
        """
        try:
            status = self._persist(self.job.status)
            if not status.ended:
                self._gone = "", 0
                return status
            gone: Exception = JobEnded(f"the job is {status.state}")
        except JobGone as error:
            gone = error
        server = self._persist(FarmClient(self.job.client).server_id)
        before, looks = self._gone
        self._gone = server, 1 + looks if server == before else 1
        if self._gone[1] > GONE_LOOKS:
            raise gone
        return None

    def _is_complete(self, status: JobStatus) -> bool:
        """Tell whether the missing result never comes, because there are no more chunks."""
        count = status.chunk_count if self.source is None else self.source.count
        if self.source is not None and self.source.reading != self._reading:
            return False
        return count is not None and 0 <= count <= self.output.buffered.stop

    def _is_cancelled(self, status: JobStatus | None) -> bool:
        """Tell whether somebody has cancelled the job, by the server or by the producer's word."""
        abandoned = self.source is not None and self.source.abandoned
        return abandoned or (status is not None and status.cancelled)

    def _closes(self) -> bool:
        """Write the last part if it takes columns of the source, and tell whether that is done.

        It is not if the source is read anew by now: they are those of the reading that goes on.
        """
        if not self.output.keeps_columns:
            return True
        self.close_part()
        return not self.output.buffered

    # Waiting.

    def _wait(self, status: JobStatus | None) -> None:
        """Wait for a result; when none comes, see what a server may have lost meanwhile.

        The client renews an idle connection without a word, so that an outage is not always met as
        an error. Results that came back with it are on disk, and in the way of new ones.
        """
        seconds = SHORT_WAIT_SECONDS if self._short else WAIT_SECONDS
        if not self._persist(lambda: self.job.wait(self.job.keys.result_wakeup, seconds)):
            self._persist(self._forget_durable)
            self._persist(self._take_straddling)
            if self._persist(partial(self._holds_up, status)):
                self.close_part()

    def _holds_up(self, status: JobStatus | None) -> bool:
        """Tell whether the part begun takes the room for more, on which nobody works therefore."""
        self._short = bool(self.output.buffered) and self._lacks_room(status)
        if not self._short:
            return False
        try:
            return self.job.stream.backlog()[1] == 0
        except redis.ResponseError as error:
            if not is_gone(error):
                raise
            self._short = False
            return False  # its status will say so

    def _lacks_room(self, status: JobStatus | None) -> bool:
        """Tell whether producers wait for the farm's window, or workers for this job's results."""
        room = self._window.seen()
        return room.short or (status is not None and not has_room(status, self.settings, room))

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Return the answer of `attempt`, which is repeated over outages of the server."""
        return persist(
            attempt, self.stop, self.settings.reconnect_seconds_max, recover=self._forget_durable
        )
