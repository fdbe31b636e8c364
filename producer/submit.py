"""Blocks into the stream, never more than a bounded window of them.

The producer keeps what is not on disk yet. When the server comes back with a suffix of its log
missing, what it no longer knows is sent again; what it does know is refused by its explicit ID.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from embedfarm.broker import persist
from embedfarm.farm import Farm, model_key
from embedfarm.jobs import Job, JobGone, JobStatus
from embedfarm.records import Block, JobSpec, Rows, encode
from embedfarm.settings import Settings
from producer.blocks import TOKENS_MAX, Blocker

PIPELINE_BYTES: Final = 1 << 20
PIPELINE_BLOCKS: Final = 64
PROBE_TOKENS: Final = 1024  # size of a block while no worker's speed is known
PROBE_BLOCKS: Final = 64  # backlog while no worker's speed is known
PROBE_WAIT_SECONDS: Final = 0.1
ROOM_WAIT_SECONDS: Final = 1.0
VECTOR_BYTES_GUESSED: Final = 4096

log = logging.getLogger(__name__)


class Rewind(RuntimeError):
    """The server has lost blocks that only the source still has; submit again from `start`."""


class JobRefused(RuntimeError):
    """The server takes no more blocks of this job: it was cancelled or deleted."""


@dataclass
class Submitter:
    """Fills one job.

    Attributes:
        farm: On a connection that nobody else uses.
        job: Id of the job.
        spec: What it asks for.
        start: First chunk that is still wanted; once open, the first one that is to be sent.
        stop: Ends all waiting.
    """

    farm: Farm
    job: str
    spec: JobSpec
    start: int
    settings: Settings
    stop: threading.Event
    _kept: deque[tuple[Block, bytes]] = field(default_factory=deque)
    _expected_in: int = 0
    _look_at: float = 0.0
    _speed: float = 0.0

    def __post_init__(self) -> None:
        self._handle: Job = self.farm.job(self.job)
        self._wanted = self.start
        self.attach()

    def attach(self) -> None:
        """Make the job, or find out how far an earlier run has filled it."""
        self._kept.clear()
        persist(self._create, self.stop, self.settings.reconnect_seconds_max)
        status = self._status()
        self._expected_in = status.chunks_in
        self.start = max(self._wanted, status.pushed_upto)

    def submit(self, source: Iterable[Rows]) -> int:
        """Send all rows and close the job; returns the number of chunks in it.

        Raises:
            JobRefused: Somebody cancelled or deleted the job.
            Rewind: The source must be read again, from a new `start`; `attach` first.
            redis.ConnectionError: The server stayed away, or `stop` was set.
        """
        blocker = Blocker(self.start, self.settings, self.spec.max_length or TOKENS_MAX)
        group: list[tuple[Block, bytes]] = []
        size = 0
        for rows in source:
            blocker.tokens_target = self._tokens_target()
            for block in blocker.add(rows):
                group.append((block, encode(block)))
                size += len(group[-1][1])
                if size >= PIPELINE_BYTES or len(group) >= PIPELINE_BLOCKS:
                    self._send(group)
                    group, size = [], 0
                    blocker.tokens_target = self._tokens_target()
            if self.stop.is_set():
                return blocker.start
        group += [(block, encode(block)) for block in blocker.flush()]
        self._send(group)
        self._close(blocker.start)
        return blocker.start

    def watch(self, chunk_count: int) -> None:
        """Until `stop`, see to it that an outage of the server loses nothing of a closed job.

        Raises:
            JobRefused, Rewind: As for `submit`.
        """
        while not self.stop.is_set():
            status = self._status()
            if status.chunks_in < self._expected_in or status.chunk_count != chunk_count:
                self._resend()
                self._close(chunk_count)
            self._wait(ROOM_WAIT_SECONDS)

    # Sending.

    def _send(self, group: Sequence[tuple[Block, bytes]]) -> None:
        """Append blocks as soon as the window has room for them."""
        if not group:
            return
        self._wait_for_room(sum(len(data) for _, data in group))
        self._kept.extend(group)
        answers = persist(
            lambda: self._handle.push(group),
            self.stop,
            self.settings.reconnect_seconds_max,
            recover=self._resend,
        )
        self._expect(group, answers)

    def _expect(self, group: Sequence[tuple[Block, bytes]], answers: Sequence[str]) -> None:
        for (block, _), answer in zip(group, answers, strict=True):
            if answer == "added":
                self._expected_in += len(block.texts)
            elif answer != "exists":
                raise JobRefused(f"job {self.job} takes no more chunks: it is {answer}")

    def _resend(self) -> None:
        """After an outage: send what the server has lost.

        Raises:
            Rewind: It has lost blocks that were sent by an earlier run.
        """
        self._create()
        status = self._handle.status()
        self._expected_in = status.chunks_in
        missing = [(block, data) for block, data in self._kept if block.start >= status.pushed_upto]
        first_kept = self._kept[0][0].start if self._kept else self.start
        if status.pushed_upto < first_kept:
            raise Rewind(f"the server has chunks up to {status.pushed_upto} only")
        log.warning("server back; it has lost %d blocks", len(missing))
        for first in range(0, len(missing), PIPELINE_BLOCKS):
            group = missing[first : first + PIPELINE_BLOCKS]
            self._expect(group, self._handle.push(group))

    def _create(self) -> None:
        self._handle.create(self.spec, self._wanted)

    def _close(self, chunk_count: int) -> None:
        persist(
            lambda: self._handle.close(chunk_count),
            self.stop,
            self.settings.reconnect_seconds_max,
            recover=self._resend,
        )

    # Back-pressure.

    def _wait_for_room(self, size: int) -> None:
        """Wait until `size` more bytes of text fit into the window."""
        while not self.stop.is_set():
            status = self._status()
            self._forget(status.drained_upto)
            if self._has_room(status, size):
                return
            self._wait(ROOM_WAIT_SECONDS if self._speed else PROBE_WAIT_SECONDS)
            self._tokens_target()

    def _has_room(self, status: JobStatus, size: int) -> bool:
        """Whether text and vectors on the server, now and when all of it is embedded, stay bounded.

        What waits is counted as its text and its vectors, what is done as its result.
        """
        if status.state not in {"open", "paused"}:
            raise JobRefused(f"job {self.job} takes no more chunks: it is {status.state}")
        blocks = status.blocks_in - status.blocks_done
        if not self._speed and blocks >= PROBE_BLOCKS:
            return False
        waiting = max(0, status.chunks_in - status.chunks_done)
        vectors = waiting * (status.vector_bytes or VECTOR_BYTES_GUESSED)
        used = status.bytes_in - status.bytes_done + vectors + status.result_bytes
        return blocks == 0 or used + size <= self.settings.window_bytes_max

    def _status(self) -> JobStatus:
        try:
            return persist(
                self._handle.status,
                self.stop,
                self.settings.reconnect_seconds_max,
                recover=self._resend,
            )
        except JobGone as error:
            raise JobRefused(f"job {self.job} was deleted") from error

    def _wait(self, seconds: float) -> None:
        """Wait for the collector to make room."""
        persist(
            lambda: self._handle.wait(self._handle.keys.room, seconds),
            self.stop,
            self.settings.reconnect_seconds_max,
            recover=self._resend,
        )

    def _forget(self, drained_upto: int) -> None:
        """Drop what is on disk."""
        while self._kept and self._kept[0][0].start + len(self._kept[0][0].texts) <= drained_upto:
            block, _ = self._kept.popleft()
            self._wanted = block.start + len(block.texts)

    # Sizing.

    def _tokens_target(self) -> float:
        """Tokens of a block: a short time's work of the slowest live worker."""
        if time.monotonic() >= self._look_at:
            self._speed = persist(
                self._slowest, self.stop, self.settings.reconnect_seconds_max, self._resend
            )
            self._look_at = time.monotonic() + (
                ROOM_WAIT_SECONDS if self._speed else PROBE_WAIT_SECONDS
            )
        return self.settings.block_seconds * self._speed if self._speed else PROBE_TOKENS

    def _slowest(self) -> float:
        """Tokens per second of the slowest live worker, as it says itself or as is remembered."""
        workers = self.farm.workers()
        speeds = [beat.tokens_per_second for beat in workers if beat.tokens_per_second]
        if speeds or not workers:
            return min(speeds, default=0.0)
        history = self.farm.history()
        prefixes = tuple(f"{beat.worker}|{model_key(self.spec)}|" for beat in workers)
        known = [rate.tokens_per_second for k, rate in history.items() if k.startswith(prefixes)]
        return min(known, default=0.0)
