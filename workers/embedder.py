"""Second stage: a micro-batch through the model, device batch by device batch."""

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Parity
from embedfarm.workers.budgets import Budgets
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Finish, OutOfMemory
from embedfarm.workers.engines.windows import pool_windows
from embedfarm.workers.leases import JobPart, MicroBatch
from embedfarm.workers.packing import STARTED_MAX, batch_tokens, pack
from embedfarm.workers.parity import Receipts, check_parity
from embedfarm.workers.quantisation import quantise, unusable
from embedfarm.workers.texts import (
    copy_repeated,
    first_texts,
    give_up,
    live_texts,
    without_reason,
)
from embedfarm.workers.timings import Timings
from embedfarm.workers.watchdog import Watchdog

ROUNDING: Final = 0.1  # a device batch this much too long is better than two

OpenReference = Callable[[Engine, JobSpec], Engine | None]
log = logging.getLogger(__name__)


class Requests(Protocol):
    """Source of interactive requests, which go before the rest of a micro-batch."""

    def take(self) -> MicroBatch | None:
        """Take the requests that wait and that the loaded weights serve; called often."""

    def answer(self, batch: MicroBatch, vectors: NDArray[Any]) -> None:
        """Answer the requests that were taken last; called soon after."""

    def batch_seconds(self) -> float:
        """Return the most seconds of a micro-batch's device batch, 0 for no limit."""


@dataclass(eq=False)
class ModelRun:
    """A micro-batch, or requests, on the way through the model.

    Attributes:
        batch: Micro-batch, or requests in the form of one.
        texts: Texts that need the model.
        sources: For each of `texts` the first one that is equal, which is run in its place.
        rows: Rows of all sources.
        vectors: Vectors of all rows of the batch, zero where there is none yet.
        todo: Device batches to be started, the next one last.
        tokens: Tokens of all sources.
        left: Tokens of `todo`.
        asked: Whether these are requests, whose device batches are as long as they like.
        started: Number of device batches that are started and not finished.
    """

    batch: MicroBatch
    texts: NDArray[np.intp]
    sources: NDArray[np.intp]
    rows: NDArray[np.intp]
    vectors: NDArray[np.float32]
    todo: list[NDArray[np.intp]]
    tokens: int
    left: int
    asked: bool = False
    started: int = 0

    @property
    def over(self) -> bool:
        """Whether the device has nothing to do for this run any more."""
        return not self.todo and not self.started


class Started(NamedTuple):
    """A device batch that was started: its rows, when, and what waits for its vectors."""

    run: ModelRun
    rows: NDArray[np.intp]
    finish: Finish
    began: float


@dataclass
class Embedder:
    """Runs micro-batches on one device and remembers how much it can take at once.

    Attributes:
        budgets: Tokens of a device batch.
        open_reference: Gives the same model in float32 on the CPU, None where there is none.
        timings: Times that device batches take.
        watchdog: Watches over device batches.
        requests: Requests that go before the rest of a micro-batch, None for a worker without.
        progress: Told before each device batch which part of a micro-batch is left to do.
        lane_seconds: Time that went to requests so far.
    """

    budgets: Budgets = field(default_factory=Budgets)
    open_reference: OpenReference = lambda _engine, _spec: None
    timings: Timings = field(default_factory=Timings)
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(Settings()))
    requests: Requests | None = None
    progress: Callable[[MicroBatch, float], None] = lambda _batch, _left: None
    lane_seconds: float = 0.0
    _reference: Engine | None = None
    _referred: "weakref.ref[Engine] | None" = None
    _finished: float = 0.0
    _receipts: Receipts = field(default_factory=Receipts)

    def embed(self, batch: MicroBatch) -> NDArray[Any]:
        """Embed all texts, to vectors as they are stored, shape (n, width); accounts go to `batch`.

        A text that repeats goes through the model once, and one whose vector is cached not at all.
        A chunk that the engine cannot embed gets a zero vector and an entry in `batch.reasons`.
        Rows of lost leases stay zero. When all leases are lost, as after a cancel, the work ends
        with the device batches that are begun.

        Raises:
            DeviceFailed: Nothing works on this device any more; no chunk is to blame.
        """
        began = time.monotonic()
        run = self._open(batch)
        lane_seconds_before = self.lane_seconds
        self._run(run)
        if batch.lost:
            run.rows = run.rows[:0]
        stored = self._close(run)
        if batch.cached is not None:
            spared = self._pack(batch, batch.tokenised.rows_of(batch.cached.texts))
            batch.cached.spared_seconds = sum(self._predict(batch, rows) for rows in spared)
        lane_seconds = self.lane_seconds - lane_seconds_before
        cost = self.timings.cost(batch.spec, batch.engine)
        batch.account.cost_seconds = {} if cost is None else cost._asdict()
        batch.account.budget_tokens = self.budgets.tokens(batch.spec, batch.engine)
        batch.account.spend("forward", time.monotonic() - began - lane_seconds)
        if lane_seconds:
            batch.account.spend("lane", lane_seconds)
        self._check(run)
        return stored

    def serve(self) -> bool:
        """Answer the requests that wait, on a device without other work; return False without any.

        Raises:
            DeviceFailed: Nothing works on this device any more.
        """
        began = time.monotonic()
        run = self._look()
        if run is None:
            return False
        started: deque[Started] = deque()
        while not run.over:
            self._step(run, started)
        self._answer(run)
        self.lane_seconds += time.monotonic() - began
        return True

    def _open(self, batch: MicroBatch, *, asked: bool = False) -> ModelRun:
        """Pack what needs the model into a run."""
        texts = live_texts(batch)
        sources = first_texts(batch, texts)
        rows = batch.tokenised.rows_of(texts[texts == sources])
        vectors = np.zeros((len(batch.tokenised.lengths), batch.engine.dimensions), np.float32)
        tokens = batch.tokenised.tokens_of(rows)
        return ModelRun(
            batch, texts, sources, rows, vectors, self._pack(batch, rows), tokens, tokens, asked
        )

    def _close(self, run: ModelRun) -> NDArray[Any]:
        """Return the vectors of a run that is over, as they are stored."""
        batch = run.batch
        self._mend(batch, run.rows, run.vectors)
        unit = batch.engine.normalised
        pooled = pool_windows(batch.tokenised, run.vectors, normalised=unit)
        copy_repeated(batch, run.texts, run.sources, pooled)
        batch.take_cached(pooled)
        stored = _store(pooled, batch)
        batch.note_made(run.sources, pooled)
        return stored

    def _look(self) -> ModelRun | None:
        """Take the requests that wait as a run, None if there are none."""
        batch = None if self.requests is None else self.requests.take()
        return None if batch is None else self._open(batch, asked=True)

    def _answer(self, run: ModelRun) -> None:
        """Answer the requests of a run."""
        if self.requests is not None:
            self.requests.answer(run.batch, self._close(run))

    def _run(self, run: ModelRun) -> None:
        """Run device batches until none is left, first those of requests.

        A device batch is started before the one before it is waited for, so that a device that
        works by itself never waits for the host. None is started once all leases are lost; while
        one is not, its vectors may be those of a lost one's texts.
        """
        started: deque[Started] = deque()
        lane: ModelRun | None = None
        clock = time.monotonic()
        while True:
            lane = served = lane or self._look()
            if lane is not None and lane.over:
                self._answer(lane)
                lane = None
            else:
                following = lane if lane is not None and lane.todo else run
                if following.over and not started:
                    return
                served = self._step(following, started)
            if run.batch.lost:
                run.todo = []
            now = time.monotonic()
            self.lane_seconds += 0.0 if served is run else now - clock
            clock = now

    def _step(self, run: ModelRun, started: deque[Started]) -> ModelRun:
        """Start the next device batch of `run`, or finish the oldest; halve one that raises.

        Returns:
            The run for which the device worked, or was given work.
        """
        # Where a start does all the work, a second batch would only delay the result of the first.
        depth = STARTED_MAX if run.batch.engine.asynchronous else 1
        begins = bool(run.todo) and len(started) < depth
        if begins:
            if not run.asked:
                self.progress(run.batch, run.left / run.tokens)
            rows = self._next(run)
            run.left -= run.batch.tokenised.tokens_of(rows)
            began = time.monotonic()
        else:
            run, rows, finish, began = started.popleft()
            run.started -= 1
        try:
            with self._watch(run.batch, rows):
                if begins:
                    finish = run.batch.engine.start(run.batch.tokenised, rows)
                    started.append(Started(run, rows, finish, began))
                    run.started += 1
                else:
                    run.vectors[rows] = finish()
        except DeviceFailed:
            raise
        except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
            run.todo = self._try_smaller(run.batch, rows, run.todo, error)
            run.left = sum(map(run.batch.tokenised.tokens_of, run.todo))
        else:
            self._time(run.batch, rows, began, begins=begins)
            if not begins:
                self._count(run.batch, rows)
        return run

    def _next(self, run: ModelRun) -> NDArray[np.intp]:
        """Take the rows of the next device batch, cut short while requests may come in."""
        rows = run.todo.pop()
        limit = 0.0 if self.requests is None or run.asked else self.requests.batch_seconds()
        if not limit:
            return rows
        seconds = self._predict(run.batch, rows)
        # Two in the queue of a device that works by itself are together in front of a request.
        seconds *= STARTED_MAX if run.batch.engine.asynchronous else 1
        count = min(len(rows), math.ceil(seconds / limit - ROUNDING))
        if count > 1:
            first, *rest = np.array_split(rows, count)
            run.todo += reversed(rest)
            return first
        return rows

    def _try_smaller(
        self,
        batch: MicroBatch,
        rows: NDArray[np.intp],
        todo: list[NDArray[np.intp]],
        error: Exception,
    ) -> list[NDArray[np.intp]]:
        """Return the device batches left after `rows` failed together; a single row fails."""
        full = isinstance(error, OutOfMemory)
        batch.account.batches_refused += full
        if len(rows) == 1:
            raised = f"the model raised {type(error).__name__}: {error}"
            give_up(batch, rows, f"does not fit on the device: {error}" if full else raised)
            return todo
        if not full:
            half = len(rows) // 2
            return [*todo, rows[half:], rows[:half]]
        cost = batch_tokens(batch.tokenised.lengths[rows], padded=batch.engine.padded)
        self.budgets.halve(batch.spec, cost)
        return self._pack(batch, np.concatenate([rows, *todo]))

    def _pack(self, batch: MicroBatch, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Pack `rows` into device batches within the learned budget, the longest chunks last."""
        engine = batch.engine
        budget = self.budgets.tokens(batch.spec, engine)
        lengths = batch.tokenised.lengths[rows]
        batches = pack(lengths, budget, engine.launch_tokens, padded=engine.padded)
        return [rows[each] for each in reversed(batches)]

    def _mend(
        self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]
    ) -> None:
        """Run rows without a usable vector again in float32: half precision has narrow limits."""
        rows = without_reason(batch, rows)
        bad = rows[unusable(vectors[rows])]
        if not len(bad):
            return
        try:
            with self._watch_reference(batch):
                reference = self._keep_reference(batch)
                if reference is not None:
                    log.warning("%d vectors are not usable; run again in float32", len(bad))
                    batch.account.rows_repeated += len(bad)
                    for at, row in enumerate(bad):
                        vectors[row] = reference.forward(batch.tokenised, bad[[at]])[0]
        except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
            log.warning("not run again in float32: %s", error)
        give_up(batch, bad[~vectors[bad].any(axis=1)], "the model gave the zero vector")

    def _keep_reference(self, batch: MicroBatch) -> Engine | None:
        """Return the reference, and keep it: a model that needs it once will need it again.

        None where there is none, or the engine computes in float32 itself.
        """
        if self._referred is None or self._referred() is not batch.engine:
            reference = self.open_reference(batch.engine, batch.spec)
            self._reference = None if reference is batch.engine else reference
            # Its model may have to go, and this one with it.
            self._referred = weakref.ref(batch.engine, self._drop_reference)
        return self._reference

    def _drop_reference(self, engine: "weakref.ref[Engine]") -> None:
        """Drop the reference of an engine that is gone."""
        if engine is self._referred:
            self._reference = None

    def _check(self, run: ModelRun) -> None:
        """Compare a sample of each job's first vectors with better ones."""
        for part in run.batch.parts:
            rows = without_reason(run.batch, _rows_of(run, part))
            if len(rows) and not part.lost and self._receipts.due(part.making, len(rows)):
                shared = self._receipts.shared(part.making, run.batch.engine)
                part.account.parity = shared or self._own_parity(run, part, rows)

    def _own_parity(self, run: ModelRun, part: JobPart, rows: NDArray[np.intp]) -> Parity | None:
        """Make the receipt of a job's own texts."""
        batch = run.batch
        began = time.monotonic()
        with self._watch_reference(batch):
            parity = check_parity(
                batch.engine,
                lambda: self.open_reference(batch.engine, batch.spec),
                batch.tokenised,
                rows,
                run.vectors,
            )
        self._receipts.keep(part.making, batch.engine, parity)
        if parity is not None:
            batch.account.spend("check", time.monotonic() - began)
        return parity

    def _watch(self, batch: MicroBatch, rows: NDArray[np.intp]) -> AbstractContextManager[None]:
        """Watch over a device batch."""
        bound = self.watchdog.bound
        return self.watchdog.watch(
            "the device", lambda: bound(self._predict(batch, rows)), batch.leases
        )

    def _watch_reference(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Watch over a reference, which may have to be loaded first."""
        return self.watchdog.watch("the reference", self.watchdog.load_limit, batch.leases)

    def _predict(self, batch: MicroBatch, rows: NDArray[np.intp]) -> float:
        """Predict the seconds that a device batch will take; 0 when nothing is known."""
        return self.timings.predict(batch.spec, batch.engine, batch.tokenised.lengths[rows])

    def _time(
        self, batch: MicroBatch, rows: NDArray[np.intp], began: float, *, begins: bool
    ) -> None:
        """Learn the time of a device batch: since its start, or since the end of the one before."""
        now = time.monotonic()
        if begins != batch.engine.asynchronous:
            seconds = now - max(began, self._finished)
            lengths = batch.tokenised.lengths[rows]
            self.timings.observe(batch.spec, batch.engine, lengths, seconds)
            self._finished = now

    def _count(self, batch: MicroBatch, rows: NDArray[np.intp]) -> None:
        """Add a device batch that is done to the micro-batch's account."""
        lengths = batch.tokenised.lengths[rows]
        batch.account.batches += 1
        batch.account.real_tokens += int(lengths.sum())
        batch.account.padded_tokens += batch_tokens(lengths, padded=batch.engine.padded)
        batch.account.flops += batch.engine.flops(lengths)


def _rows_of(run: ModelRun, part: JobPart) -> NDArray[np.intp]:
    """Return the rows that were run for a job, be it for texts of another one that are equal."""
    if len(run.batch.parts) == 1:
        return run.rows
    own = (part.texts.start <= run.texts) & (run.texts < part.texts.stop)
    return run.batch.tokenised.rows_of(np.unique(run.sources[own]))


def _store(vectors: NDArray[np.float32], batch: MicroBatch) -> NDArray[Any]:
    """Quantise vectors to be stored; fail rows that are not finite, or become so by it."""
    stored = quantise(vectors, batch.spec)
    seen = stored if stored.dtype.kind == "f" else vectors
    for row in np.flatnonzero(~np.isfinite(seen).all(axis=1)).tolist():
        batch.reasons[row] = f"the model gave a vector that is not finite in {seen.dtype}"
    stored[list(batch.reasons)] = 0
    return stored
