"""The interactive lane of a worker: requests that its device looks at between device batches.

Beside the device are two threads. One is told by the server when somebody asks, so that a look
costs nothing while nobody does. The other sends answers, and keeps the requests in hand leased.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import redis
from numpy.typing import NDArray

from embedfarm.contract import wire
from embedfarm.contract.broker import FIRST_PAUSE_SECONDS, PAUSE_SECONDS_MAX, UNAVAILABLE
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.lane import Lane, Taken
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import Block, ChunkError, LaneAnswer, LanePiece
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import is_gone
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.lane_loader import refuse_waiting
from embedfarm.workers.leases import Holdings, Lease, MicroBatch
from embedfarm.workers.model_store import ModelStore
from embedfarm.workers.texts import tokenise

LISTEN_SECONDS: Final = 0.5  # a stop, or a request that a dead worker left, waits at most so long
ROUNDS_MAX: Final = 4  # answered and not sent yet
BYTES_PER_TOKEN: Final = 4  # of text; only decides how many pieces share a run

log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """The answer to one piece, with its rows of the vectors."""

    taken: Taken
    answer: LaneAnswer
    vectors: NDArray[Any] | None = None

    def complete(self) -> LaneAnswer:
        """Return the whole answer, with the bytes of its vectors."""
        if self.vectors is None:
            return self.answer
        data = self.vectors.astype("<f4", copy=False).tobytes()
        return msgspec.structs.replace(self.answer, vectors=data)


class Round(NamedTuple):
    """Requests that were answered together: their engine's key, and leases.

    It does not refer to the engine: while answers are on their way, a model may have to go.
    """

    engine: str
    leases: Sequence[Lease]
    replies: Sequence[Reply]


@dataclass
class RequestedEngines:
    """Keys of engines that the device is to look for requests of, first come first; thread-safe.

    Attributes:
        since: Monotonic time at which the list was last empty no longer.
        heard_at: Monotonic time at which a request was last heard of.
    """

    since: float = 0.0
    heard_at: float = -float("inf")
    _keys: dict[str, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str) -> None:
        """Add an engine, unless it is on the list."""
        with self._lock:
            if not self._keys:
                self.since = time.monotonic()
            self._keys[key] = None

    def next(self) -> str | None:
        """Take the engine off the list that was added first; None if there is none."""
        with self._lock:
            key = next(iter(self._keys), None)
            if key is not None:
                del self._keys[key]
        return key


@dataclass
class LaneServer:
    """Takes requests for one device, and answers them.

    Attributes:
        lane: Queue on the server where the requests are.
        wake: Tells a device that has nothing else to do to look.
        tokens_within: Tokens that an engine does in some seconds, given the key of its model.
        done: Rounds to be sent; None ends the sending.
        tally: What was done since the start: "rounds", "pieces", "texts" and "tokens".
    """

    lane: Lane
    worker: str
    models: ModelStore
    settings: Settings
    stop: threading.Event
    wake: Callable[[], None]
    tokens_within: Callable[[float, str, Engine], int]
    done: "queue.Queue[Round | None]" = field(
        default_factory=lambda: queue.Queue(maxsize=ROUNDS_MAX)
    )
    tally: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("rounds", "pieces", "texts", "tokens"), 0.0)
    )
    _requested: RequestedEngines = field(default_factory=RequestedEngines)
    _held: Holdings = field(default_factory=Holdings)
    _round: list[tuple[Taken, LanePiece]] = field(default_factory=list)
    _began: float = 0.0

    # The device's side: all of this is called by the thread that drives it.

    def take(self) -> MicroBatch | None:
        """Take requests that the loaded weights serve; ask the server only if there may be some."""
        try:
            while not self.stop.is_set() and (key := self._requested.next()) is not None:
                batch = self._take(key) if self.models.resident.may_serve(key) else None
                if batch is not None:
                    return batch
        except UNAVAILABLE as error:
            log.warning("requests not looked at, server away: %s", error)
        return None

    def _take(self, key: str) -> MicroBatch | None:
        """Take requests of one engine, None if there are none to embed.

        Raises:
            redis.ConnectionError: The server is away.
        """
        self._began = time.monotonic()
        refused: list[Reply] = []
        with self.models.room.placing:  # until they are leased, nothing says what they need
            engine = self.models.resident.use(key) or self._find(key)
            if engine is None:
                return None
            leases = self._lease(key, engine, refused)
        if refused:
            self._put(Round(key, [], refused))
        if not leases:
            return None
        texts = list(chain.from_iterable(piece.texts for _, piece in self._round))
        watchdog = self.models.watchdog
        with watchdog.watch("the tokenizer", lambda: watchdog.bound(0.0)):
            tokenised, reasons = tokenise(engine, texts)
        plain = self._round[0][1].spec
        spec = msgspec.structs.replace(plain, vector_dtype="float32", ranges=b"")
        return MicroBatch(spec, engine, leases, tokenised, reasons, self._began)

    def _lease(self, key: str, engine: Engine, refused: list[Reply]) -> list[Lease]:
        """Lease requests of one engine, but those that are to be `refused`.

        Raises:
            redis.ConnectionError: The server is away.
        """
        # No more at a time than a short device batch: other devices may take the rest.
        model = self.models.resident.owner(key)
        name = "" if model is None else model.key
        tokens = self.tokens_within(self.settings.lane_batch_seconds, name, engine)
        taken = self.lane.take(key, self.worker, BYTES_PER_TOKEN * tokens)
        if sum(len(each.data) for each in taken) >= BYTES_PER_TOKEN * tokens or _is_retry(taken):
            self._requested.add(key)  # that was not all
        self._round = [(each, piece) for each in taken if (piece := self._open(key, each, refused))]
        leases = [_lease(key, each, piece) for each, piece in self._round]
        self._held.add(leases)
        return leases

    def engines(self) -> set[str]:
        """Return the keys of the engines that requests in hand need."""
        return self._held.engines()

    def _find(self, key: str) -> Engine | None:
        """Find the engine of a key that is new here; None where it needs other weights.

        Raises:
            redis.ConnectionError: The server is away.
        """
        oldest = self.lane.oldest(key)
        if oldest is None:
            return None
        try:
            spec = decode(LanePiece, oldest.data).spec
            return self.models.variant(spec) if engine_key(spec) == key else None
        except RecordError:
            pass  # who is to load for it refuses it
        except ModelError as error:
            refuse_waiting(self.lane, key, self.worker, str(error))
        return None

    def answer(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Have the answers of a round sent, without waiting for it."""
        lengths = batch.tokenised.text_lengths
        self.tally["rounds"] += 1
        self.tally["pieces"] += len(batch.leases)
        self.tally["texts"] += len(lengths)
        self.tally["tokens"] += int(lengths.sum())
        seconds_per_token = (time.monotonic() - self._began) / max(1, int(lengths.sum()))
        replies = []
        for (taken, piece), (_, rows) in zip(self._round, batch.rows(), strict=True):
            answer = LaneAnswer(
                place=piece.place,
                dimensions=vectors.shape[1],
                errors=[
                    ChunkError(index=row - rows.start, reason=reason, attempts=taken.deliveries)
                    for row, reason in sorted(batch.reasons.items())
                    if rows.start <= row < rows.stop
                ],
                worker=self.worker,
                token_count=int(lengths[rows].sum()),
                seconds=seconds_per_token * int(lengths[rows].sum()),
                waited_seconds=taken.waited_seconds,
                fingerprint=batch.engine.fingerprint,
            )
            replies.append(Reply(taken, answer, vectors[rows]))
        self.models.tally.count(
            batch.spec.model,
            requests=sum(piece.place == 0 for _, piece in self._round),
            texts_full=batch.texts_full,
        )
        self._put(Round(batch.leases[0].job, batch.leases, replies))

    def batch_seconds(self) -> float:
        """Return the most seconds of a device batch while requests are coming, else 0: no limit."""
        quiet = time.monotonic() - self._requested.heard_at > self.settings.lane_quiet_seconds
        return 0.0 if quiet else self.settings.lane_batch_seconds

    def gather(self) -> None:
        """Let the first request on an idle device wait a moment for others to share its run."""
        self.stop.wait(
            max(0.0, self._requested.since + self.settings.lane_wait_seconds - time.monotonic())
        )

    def _open(self, key: str, taken: Taken, refused: list[Reply]) -> LanePiece | None:
        """Decode a piece; None for one that was added to `refused`: late, damaged or dangerous."""
        reason, late, piece = "", False, None
        try:
            piece = decode(LanePiece, taken.data)
        except RecordError as error:
            reason = str(error)
        else:
            late = taken.waited_seconds > piece.timeout_seconds
            if late:
                reason = f"no worker was free within {piece.timeout_seconds:g} s"
            elif engine_key(piece.spec) != key:
                reason = "its model is not the one of its lane"
            elif taken.deliveries > self.settings.deliveries_max:
                tries = taken.deliveries - 1
                reason = f"the worker died or hung {tries} times while embedding it"
        if reason:
            refused.append(Reply(taken, LaneAnswer(reason=reason, late=late, worker=self.worker)))
            return None
        return piece

    def _put(self, item: Round) -> None:
        """Hand a round to the sending thread; drop it after a stop if the queue is full."""
        while True:
            try:
                self.done.put(item, timeout=LISTEN_SECONDS)
            except queue.Full:
                if not self.stop.is_set():
                    continue
            return

    # Beside the device.

    def listen(self) -> None:
        """Wake the device for requests of engines that it serves, and for requests left behind."""
        after, look_at, pause = "", 0.0, FIRST_PAUSE_SECONDS
        while not self.stop.is_set():
            try:
                after = after or self.lane.now()
                after, engines = self.lane.wakeups(after, LISTEN_SECONDS)
                pause = FIRST_PAUSE_SECONDS
                if not engines and time.monotonic() >= look_at:
                    look_at = time.monotonic() + LISTEN_SECONDS
                    asked = filter(self.models.resident.may_serve, self.lane.asked())
                    engines = list(filter(self.lane.waiting, asked))
                for key in filter(self.models.resident.may_serve, engines):
                    self.hear(key)
            except UNAVAILABLE as error:
                log.warning("not listening for requests, server away: %s", error)
                self.stop.wait(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def hear(self, key: str) -> None:
        """Note that requests of an engine are coming, and have the device look for them."""
        self._requested.heard_at = time.monotonic()
        self.wake_for(key)

    def wake_for(self, key: str) -> None:
        """Have the device look for requests of an engine, at once if it is idle."""
        self._requested.add(key)
        self.wake()

    def send(self) -> None:
        """Send answers until there is a None; one that the server does not get, others will make.

        A request in hand is kept leased as long as this worker lives.
        """
        while True:
            try:
                item = self.done.get(timeout=self.settings.lane_lease_seconds / 3)
            except queue.Empty:
                self._renew()
                continue
            if item is None:
                return
            try:
                answers = [
                    (each.taken.entry, each.taken.id, each.complete()) for each in item.replies
                ]
                self.lane.answer(item.engine, answers)
            except UNAVAILABLE as error:
                log.warning("requests not answered, server away: %s", error)
            self._held.remove(item.leases)
            del item, answers  # while we wait, their memory may be wanted

    def _renew(self) -> None:
        """Renew the leases of the requests in hand."""
        try:
            for (key, _), leases in self._held.by_stream().items():
                self.lane.renew(key, self.worker, [lease.entry.id for lease in leases])
        except UNAVAILABLE as error:
            log.warning("requests not renewed, server away: %s", error)
        except redis.ResponseError as error:
            if not is_gone(error):
                raise


def _is_retry(taken: Sequence[Taken]) -> bool:
    """Tell whether the pieces are of a request that a dead worker left."""
    return any(each.deliveries > 1 for each in taken)


def _lease(key: str, taken: Taken, piece: LanePiece) -> Lease:
    """Make a lease of a piece, since that is how the device takes blocks."""
    count = len(piece.texts)
    entry = Entry(wire.lane_key(key), taken.entry, b"", count, count)
    block = Block(start=0, texts=piece.texts)
    return Lease(key, entry, block, taken.deliveries, engine=key)
