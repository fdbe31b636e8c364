"""Blocks sent into the stream, never more than a bounded window of them.

The producer keeps what it sent last. When the server comes back with a suffix of its log missing,
what it no longer knows is sent again; what it does know is refused by its explicit ID. What is
neither known nor kept, only the source has (`Rewind`).
"""

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from embedfarm.contract.broker import persist
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.contract.jobs import BlocksLost, JobTaken
from embedfarm.contract.records import Block, Rows
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import KNOWN_BYTES, VECTOR_BYTES_GUESSED, used_bytes
from embedfarm.contract.source_places import SourceReference
from embedfarm.contract.status import OVER_STATES, JobGone, JobStatus
from embedfarm.contract.stored_results import StorageRefused
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.contract.window import FarmWindow
from embedfarm.producer.blocks import Blocker

if TYPE_CHECKING:
    from embedfarm.contract.jobs import Job

GROUPS_PER_WINDOW: Final = 16  # a group is sent in one round trip, when there is room for all of it
# Vectors of one block: a server takes several megabytes in one command at half the speed.
RESULT_BYTES_MAX: Final = 1 << 20
PROBE_TOKENS: Final = 1024  # size of a block while no worker's speed is known
PROBE_BLOCKS: Final = 64  # backlog while no worker's speed is known
GONE_SECONDS: Final = 1.0  # time between looks at a job that is not there
CHANGE_NONE: Final = frozenset({"name", "engine", "texts_from"})  # fields of a spec
LOOK_SECONDS: Final = 0.2  # time between looks at the workers, and at a window that is full

T = TypeVar("T")

log = logging.getLogger(__name__)


class Rewind(EmbedfarmError, RuntimeError):
    """Raised when the server lost blocks that only the source has; `attach`, and submit again."""


class JobRefused(EmbedfarmError, RuntimeError):
    """Raised when the server takes no more blocks of a job: cancelled, closed or deleted."""


class SubmissionCancelled(JobRefused):
    """Raised when somebody cancelled the job; what is embedded of it may still be collected."""


class Stale(RuntimeError):
    """Raised when an earlier run has filled the job with other rows than the source has now."""


class Sent(NamedTuple):
    """An encoded block, of the chunks `start` to `end - 1`."""

    start: int
    end: int
    data: bytes


@dataclass
class Submitter:
    """Fills one job with blocks.

    Attributes:
        farm: Farm, on a connection that nobody else uses.
        job: Id of the job.
        spec: Specification of the job.
        start: First chunk that is still wanted; once open, the next one to send.
        drained_upto: What the server has last been told to be on disk.
        stop: Ends all waiting.
        tokenizer: Directory of the model, so that token ids are sent in place of texts as soon as
            the workers have said how to make them; None sends texts.
        terms: Terms of the job, if it is made here; one that exists keeps its own.
        notes: Fields that are kept with the job if it is made here.
        owner: Owner of the output that is filled; "" acts for any owner.
        on_disk: Returns how many chunks are on disk. The server's word for it counts up to there
            only: a crash may bring back the record of an earlier try that was further on.
        cuts: Rows before which blocks end, in order.

    Raises:
        FarmFull: The farm takes no new job now.
        redis.ConnectionError: The server stayed away, or `stop` was set while it was.
    """

    farm: FarmClient
    job: str
    spec: JobSpec
    start: int
    settings: Settings
    stop: threading.Event
    tokenizer: Path | None = None
    terms: Terms = USUAL
    notes: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    on_disk: Callable[[], int] = lambda: sys.maxsize
    cuts: Sequence[int] = ()
    drained_upto: int = field(init=False)
    _encoder: TokenEncoder | None = None
    _refers: bool = False
    _kept: deque[Sent] = field(default_factory=deque)
    _kept_bytes: int = 0
    _vector_bytes: int = VECTOR_BYTES_GUESSED
    _look_at: float = 0.0
    _speed: float = 0.0
    _server: str = ""

    def __post_init__(self) -> None:
        self._handle: Job = self.farm.job(self.job, self.owner)
        self._window = FarmWindow(self.farm.client, self.settings)
        self._wanted = self.start
        self.attach()

    def attach(self) -> None:
        """Make the job, or find out how far an earlier run has filled it.

        Raises:
            FarmFull: The farm takes no new job now.
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        while self._kept:
            self._drop()
        status = persist(self._create, self.stop, self.settings.reconnect_seconds_max)
        self.start = status.pushed_upto
        self.drained_upto = status.drained_upto

    def start_over(self, upto: int) -> None:
        """Have the server forget all from chunk `upto` on, so that it can be submitted again.

        Raises:
            FarmFull: The farm takes no new job now.
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        self._wanted = upto
        persist(
            partial(self._handle.results.lose, upto), self.stop, self.settings.reconnect_seconds_max
        )
        self.attach()

    def submit(self, source: Iterable[Rows], files: Sequence[SourceReference] = ()) -> int:
        """Send the rows, which begin at chunk `start`, and close the job.

        Args:
            source: The rows.
            files: Beginnings of the source's files, if blocks are to refer to them (`Blocker`).

        Returns:
            The number of chunks in the job. When `stop` comes first the job stays open, and the
            number means nothing.

        Raises:
            JobRefused: Somebody cancelled or deleted the job.
            Stale: An earlier run closed the job before this many rows, or had sent more;
                `start_over`.
            Rewind: The source must be read again, from a new `start`; `attach` first.
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        self._refers = bool(files)
        counter = TokenCounter.of_job(self.spec, self.tokenizer)
        blocker = Blocker(self.start, self.settings, counter, cuts=self.cuts, files=files)
        try:
            self._persist(self._check_cancelled)  # first, since the source may say that it is Stale
            for rows in source:
                self._size(blocker)
                self._send(blocker.add(rows, None if self._refers else self._encoder))
            self._send(blocker.flush())
            # Whoever sets `stop` may also have ended the source early.
            if not self.stop.is_set():
                self._close(blocker.start)
        except JobGone as error:
            raise JobRefused(f"job {self.job} was deleted") from error
        return blocker.start

    def watch(self, chunk_count: int) -> None:
        """Send again what outages of the server lose of a closed job, until `stop` is set.

        Raises:
            JobRefused: Somebody cancelled the job.
            Stale: An earlier run is back, which had sent more; `start_over`.
            Rewind: The source must be read again, from a new `start`; `attach` first.
            redis.ConnectionError: The server stayed away, or `stop` was set while it was.
        """
        while not self.stop.is_set():
            try:
                self._close(chunk_count)
                self.stop.wait(LOOK_SECONDS)  # not for room: `stop` ends this at once
            except JobGone:
                # It is finished, or somebody deleted it. The collector knows, and ends the run,
                # unless a server comes back that has it still.
                self.stop.wait(GONE_SECONDS)

    # Sending.

    def _send(self, blocks: Iterable[Block]) -> None:
        """Append blocks as soon as the windows have room for them; not after `stop`."""
        for group in self._groups(blocks):
            left = group
            while left:
                count = self._wait_for_room(left)
                if not count:
                    return
                self._keep(left[:count])
                self._persist(partial(self._push, left[:count]))
                left = left[count:]

    def _groups(self, blocks: Iterable[Block]) -> Iterator[list[tuple[Block, bytes]]]:
        """Yield blocks with their bytes, in groups that each take a small part of the window."""
        group: list[tuple[Block, bytes]] = []
        cost = 0
        for block in blocks:
            data = encode(block)
            group.append((block, data))
            cost += self._cost(block, data)
            if cost >= self._group_bytes:
                yield group
                group, cost = [], 0
        if group:
            yield group

    @property
    def _group_bytes(self) -> int:
        return self.settings.window_bytes_max // GROUPS_PER_WINDOW

    def _cost(self, block: Block, data: bytes) -> int:
        """Return the bytes of a block, and of its vectors when it is embedded."""
        known = block.count - block.to_embed
        return len(data) + block.to_embed * self._vector_bytes + known * KNOWN_BYTES

    def _push(self, group: Sequence[tuple[Block, bytes]]) -> None:
        for answer in self._handle.push(group):
            self._check(answer, {"added", "exists"})

    def _close(self, chunk_count: int) -> None:
        """Tell the server that all chunks are in, unless it knows.

        A crash may have brought back the record of an earlier try, which had as many and has ended.

        Raises:
            Stale: It has brought back one that had more.
        """

        def close() -> None:
            self._check(self._handle.close(chunk_count), {"closed", "paused"})

        status = self._status()
        if status.pushed_upto > chunk_count and not status.over:
            raise Stale(
                f"job {self.job} has {chunk_count} chunks; an earlier run had sent "
                f"{status.pushed_upto}, and is back"
            )
        if status.chunk_count != chunk_count or status.ended:
            self._persist(close)

    def _check(self, state: str, allowed: set[str]) -> None:
        """Raise unless the job is in a state that lets us go on."""
        if state == "gone":
            self._check_server()
            raise JobGone(self.job)
        if state in OVER_STATES:
            self._check_server()  # a crash may have brought back the record of an earlier one
        if state == "closed" and state not in allowed:
            raise Stale(f"job {self.job} was closed by an earlier run")
        if state == "cancelled":
            raise SubmissionCancelled(f"job {self.job} is cancelled")
        if state not in allowed:
            raise JobRefused(f"job {self.job} takes no more chunks: it is {state}")

    def _check_cancelled(self) -> None:
        """Raise if somebody cancelled the job."""
        if self._look_at_job().cancelled:
            self._check("cancelled", set())

    def _create(self) -> JobStatus:
        """Make the job unless it is there, and return its status."""
        self.farm.admit(self.job, self.settings.jobs_max)
        self._server = self.farm.server_id()
        self._handle.create(self.spec, self._wanted, self.terms, self.notes)
        self._check_spec()
        self._check_server()  # not a job of one server, and the name of the next
        return self._look_at_job()

    def _check_spec(self) -> None:
        """Refuse a job of this name that asks for other vectors, or has them stored elsewhere.

        Raises:
            JobTaken: The job that is there asks for other vectors.
            StorageRefused: It has them stored in another place.
            BlocksLost: The server has started again since the job was made.
        """
        with contextlib.suppress(JobGone):  # which is noticed next
            there = self._handle.spec()
            differing = _differing(there, self.spec)
            if differing:
                self._check_server()  # a crash may have brought back the record of an earlier one
            if differing == ["stored"]:
                raise StorageRefused(
                    f"job {self.job} has its vectors stored in {there.stored or 'Redis'}: go on "
                    f"with that, or remove the job first: embedfarm jobs rm {self.job} --force"
                )
            if differing:
                raise JobTaken(f"job {self.job} asks for other vectors: {', '.join(differing)}")

    def _check_server(self) -> None:
        """Raise if the job was lost with its server, and not deleted.

        Raises:
            BlocksLost: The server has started again since the job was made, or is another one.
        """
        if self.farm.server_id() != self._server:
            raise BlocksLost(f"the server has lost job {self.job}")

    # After an outage.

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Make an attempt, again after outages of the server, once lost blocks are sent again."""
        return persist(attempt, self.stop, self.settings.reconnect_seconds_max, self._resend)

    def _resend(self) -> None:
        """Send again the blocks that the server has lost.

        Raises:
            Rewind: The server has lost blocks that are not kept.
        """
        status = self._create()
        missing = [sent for sent in self._kept if sent.start >= status.pushed_upto]
        if status.pushed_upto < (missing[0].start if missing else self.start):
            raise Rewind(f"the server has lost the chunks from {status.pushed_upto} on")
        log.warning("the server was away; it has lost %d blocks", len(missing))
        for group in self._groups(decode(Block, sent.data) for sent in missing):
            self._push(group)

    def _status(self) -> JobStatus:
        """Return the job's status, after sending again what the server may have lost.

        The client renews an idle connection without a word, so that an outage is not always met as
        an error.

        Raises:
            JobGone: The job was deleted. (One that an outage has lost is made again.)
        """
        while (status := self._persist(self._look_at_job)).pushed_upto < self.start:
            self._persist(self._resend)
        self._vector_bytes = status.held_vector_bytes or VECTOR_BYTES_GUESSED
        self._forget(status.drained_upto)
        return status

    def _look_at_job(self) -> JobStatus:
        try:
            return self._handle.status()
        except JobGone:
            self._check_server()
            raise

    # What is kept.

    @property
    def _kept_from(self) -> int:
        """Index of the first chunk that was sent and is kept, else of the next one to send."""
        return self._kept[0].start if self._kept else self.start

    def _keep(self, group: Sequence[tuple[Block, bytes]]) -> None:
        """Keep a group, but no more than a window of text that is embedded and not on disk."""
        while self._kept_bytes > self.settings.window_bytes_max:
            self._drop()
        self._kept.extend(Sent(b.start, b.end, data) for b, data in group)
        self._kept_bytes += sum(len(data) for _, data in group)
        self.start = self._kept[-1].end

    def _drop(self) -> None:
        self._kept_bytes -= len(self._kept.popleft().data)

    def _forget(self, drained_upto: int) -> None:
        """Drop the kept blocks whose vectors are on disk."""
        upto = min(drained_upto, self.on_disk())
        while self._kept and self._kept[0].end <= upto:
            self._drop()
        # A block that is on disk in part is wanted whole, because it is sent whole.
        self._wanted = max(self._wanted, min(upto, self._kept_from))

    # Back-pressure.

    def _wait_for_room(self, group: Sequence[tuple[Block, bytes]]) -> int:
        """Wait for room, and return how many blocks of a group there is room for; 0 after `stop`.

        The job's own window must have room for the whole group. The farm's, which others may fill,
        may have room for a part of it. What the server has already needs none: who collects may
        wait until the source has been read that far, and the window be full until he goes on.
        """
        costs = list(starmap(self._cost, group))
        while not self.stop.is_set():
            status = self._status()
            self._check(status.state, {"open", "paused"})
            if there := sum(block.end <= status.pushed_upto for block, _ in group):
                return there
            if self._has_room(status, sum(costs)) and (count := self._reserve(status, costs)):
                return count
            self._wait()
            self._look()
        return 0

    def _reserve(self, status: JobStatus, costs: Sequence[int]) -> int:
        """Reserve room in the farm's window for the first of some blocks; return how many fit."""
        return self._persist(partial(self._window.reserve, status, self._vector_bytes, costs))

    def _has_room(self, status: JobStatus, cost: int) -> bool:
        """Tell whether all stays bounded on the server and past it, also once all is embedded.

        When nothing waits there is room for a group, since the collector may need more to fill a
        part; workers stop at `results_bytes_max`.
        """
        blocks = status.blocks_in - status.blocks_done
        if not self._speed and blocks >= PROBE_BLOCKS:
            return False
        used = used_bytes(status, self._vector_bytes)
        if self._refers:  # blocks are small then, but whoever collects keeps something of each row
            used += KNOWN_BYTES * max(0, status.chunks_in - status.chunks_done)
        fits = used + cost <= self.settings.window_bytes_max
        return blocks <= 0 or (fits and status.stored_bytes < self.settings.stored_bytes_max)

    def _wait(self) -> None:
        """Wait a moment for the collector to make room."""
        self._persist(partial(self._handle.wait, self._handle.keys.room, LOOK_SECONDS))

    # Sizing.

    def _size(self, blocker: Blocker) -> None:
        """Set the size of blocks: a short time's work of the slowest worker, with small results."""
        self._look()
        speed = self._speed or PROBE_TOKENS / self.settings.block_seconds
        blocker.tokens_target = speed * self.settings.block_seconds
        chunks = min(self._group_bytes, RESULT_BYTES_MAX) // self._vector_bytes
        blocker.chunks_max = max(1, min(chunks, self.settings.block_chunks_max))

    def _look(self) -> None:
        """Look at how fast the workers are, if it is time to."""
        if time.monotonic() >= self._look_at:
            self._speed = self._persist(self._slowest)
            if self.tokenizer is not None and self._encoder is None:
                self._persist(partial(self._learn_tokenisation, self.tokenizer))
            self._look_at = time.monotonic() + LOOK_SECONDS

    def _learn_tokenisation(self, directory: Path) -> None:
        """Make token ids from now on, if the workers have said how and the tokenizer is theirs."""
        try:
            tokenisation = self.farm.reports.tokenisation(self.job)
            if tokenisation is not None:
                self._encoder = TokenEncoder.open(directory, tokenisation)
        except (OSError, ValueError) as error:
            log.warning("texts are sent, and no token ids: %s", error)
            self.tokenizer = None

    def _slowest(self) -> float:
        """Return the slowest live worker's tokens per second, as it says or as is remembered."""
        workers = self.farm.workers()
        speeds = [beat.tokens_per_second for beat in workers if beat.tokens_per_second]
        if speeds or not workers:
            return min(speeds, default=0.0)
        history = self.farm.statistics.history()
        prefixes = tuple(f"{beat.worker}|{model_key(self.spec)}|" for beat in workers)
        known = [rate.tokens_per_second for k, rate in history.items() if k.startswith(prefixes)]
        return min(known, default=0.0)


def _differing(there: JobSpec, ours: JobSpec) -> list[str]:
    """Return in which fields two specs ask for other vectors; some fields change none."""
    names = [name for name in JobSpec.__struct_fields__ if name not in {*CHANGE_NONE, "model"}]
    differing = [name for name in names if getattr(there, name) != getattr(ours, name)]
    same_model = Path(there.model).resolve() == Path(ours.model).resolve()
    return differing if same_model else ["model", *differing]
