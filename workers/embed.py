"""Second stage: a micro-batch through the model, device batch by device batch."""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.farm import model_key
from embedfarm.records import JobSpec
from workers.budgets import Budgets
from workers.costs import BatchCosts
from workers.engines import DeviceFailed, Engine, Finish, OutOfMemory
from workers.engines.windows import pool_windows
from workers.leases import MicroBatch
from workers.packing import batch_tokens, pack
from workers.parity import check_parity
from workers.quantisation import quantise

JOBS_CHECKED_MAX: Final = 64
STARTED_MAX: Final = 2  # device batches at a time: one that runs, and the next in its queue

OpenReference = Callable[[Engine, JobSpec], Engine | None]
log = logging.getLogger(__name__)


@dataclass
class Embedder:
    """Runs micro-batches on one device and remembers how much it can take at once.

    Attributes:
        budgets: Tokens of a device batch.
        open_reference: Gives the same model in float32 on the CPU, None where there is none.
        slowdown: Makes the device this many times slower, for tests.
    """

    budgets: Budgets = field(default_factory=Budgets)
    open_reference: OpenReference = lambda _engine, _spec: None
    slowdown: float = 1.0
    _reference: Engine | None = None
    _referred: Engine | None = None
    _costs: dict[str, BatchCosts] = field(default_factory=lambda: defaultdict(BatchCosts))
    _finished: float = 0.0
    _checked: deque[str] = field(default_factory=lambda: deque(maxlen=JOBS_CHECKED_MAX))

    def embed(self, batch: MicroBatch) -> NDArray[Any]:
        """Vectors of all texts as they are stored, shape (n, width); accounts go to `batch`.

        A text that repeats goes through the model once. A chunk that the engine cannot embed gets a
        zero vector and an entry in `batch.reasons`. Rows of lost leases stay zero. When all leases
        are lost, as after a cancel, the work ends with the device batches that are begun.

        Raises:
            DeviceFailed: Nothing works on this device any more; no chunk is to blame.
        """
        began = time.monotonic()
        tokenised = batch.tokenised
        texts = _live_texts(batch)
        sources = _first_texts(batch, texts)
        rows = tokenised.rows_of(np.unique(sources))
        vectors = np.zeros((len(tokenised.lengths), batch.engine.dimensions), np.float32)
        self._run(batch, rows, vectors)
        rows = rows[:0] if batch.lost else rows
        self._mend(batch, rows, vectors)
        pooled = pool_windows(tokenised, vectors, normalised=batch.engine.normalised)
        _copy_repeated(batch, texts, sources, pooled)
        stored = _store(pooled, batch)
        cost = self._costs[_cost_key(batch)].cost()
        batch.account.cost_seconds = {} if cost is None else cost._asdict()
        batch.account.budget_tokens = self.budgets.tokens(batch.spec, batch.engine)
        batch.account.spend("forward", time.monotonic() - began)
        self._check(batch, rows, vectors)
        return stored

    def _run(self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]) -> None:
        """Fill `vectors` for `rows`; halve what does not fit or raises.

        A device batch is started before the one before it is waited for, so that a device that
        works by itself never waits for the host. None is started once all leases are lost; while
        one is not, its vectors may be those of a lost one's texts.
        """
        todo = self._pack(batch, rows)
        started: deque[tuple[NDArray[np.intp], Finish, float]] = deque()
        while todo or started:
            begins = bool(todo) and len(started) < STARTED_MAX
            rows = todo.pop() if begins else started[0][0]
            try:
                if begins:
                    began = time.monotonic()
                    started.append((rows, self._start(batch, rows), began))
                else:
                    _, finish, began = started.popleft()
                    vectors[rows] = finish()
            except DeviceFailed:
                raise
            except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
                todo = self._try_smaller(batch, rows, todo, error)
            else:
                self._time(batch, rows, began, begins=begins)
                if not begins:
                    self._count(batch, rows)
            if batch.lost:
                todo = []

    def _try_smaller(
        self,
        batch: MicroBatch,
        rows: NDArray[np.intp],
        todo: list[NDArray[np.intp]],
        error: Exception,
    ) -> list[NDArray[np.intp]]:
        """What is left to do after `rows` failed together; a row that fails alone is given up."""
        full = isinstance(error, OutOfMemory)
        batch.account.batches_refused += full
        if len(rows) == 1:
            raised = f"the model raised {type(error).__name__}: {error}"
            _fail(batch, rows, f"does not fit on the device: {error}" if full else raised)
            return todo
        if not full:
            half = len(rows) // 2
            return [*todo, rows[half:], rows[:half]]
        cost = batch_tokens(batch.tokenised.lengths[rows], padded=batch.engine.padded)
        self.budgets.halve(batch.spec, cost)
        return self._pack(batch, np.concatenate([rows, *todo]))

    def _pack(self, batch: MicroBatch, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Device batches of `rows` within the learned budget, the longest chunks last."""
        engine = batch.engine
        budget = self.budgets.tokens(batch.spec, engine)
        lengths = batch.tokenised.lengths[rows]
        batches = pack(lengths, budget, engine.launch_tokens, padded=engine.padded)
        return [rows[each] for each in reversed(batches)]

    def _mend(
        self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]
    ) -> None:
        """Run rows again in float32 that came out as nothing: half precision has narrow limits."""
        rows = _without_reason(batch, rows)
        bad = rows[_unusable(vectors[rows])]
        if not len(bad):
            return
        try:
            reference = self._keep_reference(batch)
            if reference is not None and reference is not batch.engine:
                log.warning("%d vectors are not usable; run again in float32", len(bad))
                batch.account.rows_repeated += len(bad)
                for at, row in enumerate(bad):
                    vectors[row] = reference.forward(batch.tokenised, bad[[at]])[0]
        except Exception as error:  # noqa: BLE001 # a model may raise anything; the chunk pays
            log.warning("not run again in float32: %s", error)
        _fail(batch, bad[~vectors[bad].any(axis=1)], "the model gave the zero vector")

    def _keep_reference(self, batch: MicroBatch) -> Engine | None:
        """The reference, from now on at hand: a model that needs it once will need it again."""
        if self._referred is not batch.engine:
            self._reference = self.open_reference(batch.engine, batch.spec)
            self._referred = batch.engine
        return self._reference

    def _check(
        self, batch: MicroBatch, rows: NDArray[np.intp], vectors: NDArray[np.float32]
    ) -> None:
        """Compare a sample of a job's first vectors with better ones."""
        rows = _without_reason(batch, rows)
        if batch.job in self._checked or not len(rows):
            return
        began = time.monotonic()
        self._checked.append(batch.job)
        batch.account.parity = check_parity(
            batch.engine,
            lambda: self.open_reference(batch.engine, batch.spec),
            batch.tokenised,
            rows,
            vectors,
        )
        if batch.account.parity is not None:
            batch.account.spend("check", time.monotonic() - began)

    def _start(self, batch: MicroBatch, rows: NDArray[np.intp]) -> Finish:
        """Begin a device batch."""
        began = time.monotonic()
        finish = batch.engine.start(batch.tokenised, rows)
        if self.slowdown > 1:
            threading.Event().wait((self.slowdown - 1) * (time.monotonic() - began))
        return finish

    def _time(
        self, batch: MicroBatch, rows: NDArray[np.intp], began: float, *, begins: bool
    ) -> None:
        """Learn what a device batch took: since its start, or since the one before it was done."""
        now = time.monotonic()
        if begins != batch.engine.asynchronous:
            longest = int(batch.tokenised.lengths[rows].max())
            seconds = now - max(began, self._finished)
            self._costs[_cost_key(batch)].observe(len(rows), longest, seconds)
            self._finished = now

    def _count(self, batch: MicroBatch, rows: NDArray[np.intp]) -> None:
        """Take a device batch that is done to account."""
        lengths = batch.tokenised.lengths[rows]
        batch.account.batches += 1
        batch.account.real_tokens += int(lengths.sum())
        batch.account.padded_tokens += batch_tokens(lengths, padded=batch.engine.padded)
        batch.account.flops += batch.engine.flops(lengths)


def _cost_key(batch: MicroBatch) -> str:
    """All that changes what a device batch takes."""
    return f"{model_key(batch.spec)}|{batch.engine.name}"


def _fail(batch: MicroBatch, rows: NDArray[np.intp], reason: str) -> None:
    """Give the texts of some rows up."""
    batch.reasons.update(dict.fromkeys(batch.tokenised.texts_of(rows).tolist(), reason))


def _live_texts(batch: MicroBatch) -> NDArray[np.intp]:
    """Texts that need the model: of leases that are ours, with tokens, not given up on already."""
    lengths = batch.tokenised.text_lengths
    for text in np.flatnonzero(lengths == 0).tolist():
        batch.reasons.setdefault(text, "the tokenizer makes no token of it")
    live = np.ones(len(lengths), dtype=bool)
    for lease, rows in batch.rows():
        live[rows] = not lease.lost
    live[list(batch.reasons)] = False
    return np.flatnonzero(live)


def _without_reason(batch: MicroBatch, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """The rows whose texts have not failed."""
    if not batch.reasons:
        return rows
    return rows[~np.isin(batch.tokenised.texts_of(rows), list(batch.reasons))]


def _unusable(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows have no direction: not finite, or zero."""
    return np.asarray(~np.isfinite(vectors).all(axis=1) | ~vectors.any(axis=1))


def _first_texts(batch: MicroBatch, live: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each live text, the first one that is equal."""
    keys = [key for lease in batch.leases for key in lease.block.identities()]
    first: dict[str | bytes, int] = {}
    found = (first.setdefault(keys[place], place) for place in live.tolist())
    return np.fromiter(found, dtype=np.intp, count=len(live))


def _copy_repeated(
    batch: MicroBatch,
    texts: NDArray[np.intp],
    sources: NDArray[np.intp],
    vectors: NDArray[np.float32],
) -> None:
    """Give repeated texts what became of the first ones, vectors or reasons."""
    repeated = np.flatnonzero(texts != sources)
    vectors[texts[repeated]] = vectors[sources[repeated]]
    for text, source in zip(texts[repeated].tolist(), sources[repeated].tolist(), strict=True):
        if source in batch.reasons:
            batch.reasons[text] = batch.reasons[source]


def _store(vectors: NDArray[np.float32], batch: MicroBatch) -> NDArray[Any]:
    """Vectors as they are stored; rows that are not finite, or too large for that, have failed."""
    stored = quantise(vectors, batch.spec)
    seen = stored if stored.dtype.kind == "f" else vectors
    for row in np.flatnonzero(~np.isfinite(seen).all(axis=1)).tolist():
        batch.reasons[row] = f"the model gave a vector that is not finite in {seen.dtype}"
    stored[list(batch.reasons)] = 0
    return stored
