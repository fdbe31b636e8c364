"""How good a job's vectors are: a sample of them beside float32 and beside other device batches."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.similarity import cosine
from embedfarm.contract.usage import Parity
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Tokenised
from embedfarm.workers.leases import Making

SAMPLE_TEXTS: Final = 8
OWN_TEXTS: Final = 1000  # of a job, from which on it has a sample of its own
SHARED_SECONDS: Final = 600.0  # for which a receipt stands for jobs of fewer
KEPT_MAX: Final = 64  # jobs, and engines, of which is known when they were checked
SAMPLE_TOKENS_MAX: Final = 512  # so that it takes a processor a second, even for a larger model

log = logging.getLogger(__name__)
Kind: TypeAlias = tuple[object, ...]  # an engine's name and its fingerprint


@dataclass
class Receipts:
    """The parity receipts of a worker's jobs.

    Each job has one: of its own texts where it has many of them, or where the last one of its
    engine is old; else that one.
    """

    _texts: OrderedDict[Making, int] = field(default_factory=OrderedDict)  # of jobs, so far
    _last: OrderedDict[Kind, tuple[float, Parity]] = field(default_factory=OrderedDict)
    _own: OrderedDict[Making, None] = field(
        default_factory=OrderedDict
    )  # jobs with one of their own

    def due(self, job: Making, texts: int) -> bool:
        """Count texts of a job that were embedded; tell whether it has no receipt of its own."""
        self._texts[job] = self._texts.pop(job, 0) + texts
        _forget_oldest(self._texts)
        return job not in self._own

    def shared(self, job: Making, engine: Engine) -> Parity | None:
        """Return the receipt of another job for one of few texts, None where it needs its own.

        Args:
            job: The job, after `due`.
            engine: What embeds it: another one of the same files has other receipts.
        """
        checked_at, parity = self._last.get(_kind(engine), (0.0, None))
        if parity is None or self._texts.get(job, 0) >= OWN_TEXTS:
            return None
        recent = time.monotonic() - checked_at < SHARED_SECONDS
        return msgspec.structs.replace(parity, shared=True) if recent else None

    def keep(self, job: Making, engine: Engine, parity: Parity | None) -> None:
        """Keep the receipt of a job's own texts, None where there could be none."""
        self._own[job] = None
        _forget_oldest(self._own)
        if parity is not None:
            self._last.pop(_kind(engine), None)
            self._last[_kind(engine)] = time.monotonic(), parity
            _forget_oldest(self._last)


def _kind(engine: Engine) -> Kind:
    return engine.name, *sorted(engine.fingerprint.items())


def _forget_oldest(known: OrderedDict[Any, Any]) -> None:
    if len(known) > KEPT_MAX:
        known.popitem(last=False)


def check_parity(
    engine: Engine,
    open_reference: Callable[[], Engine | None],
    batch: Tokenised,
    rows: NDArray[np.intp],
    vectors: NDArray[np.float32],
) -> Parity | None:
    """Make the receipt for a sample of rows; None where there is nothing to compare with.

    Args:
        engine: Engine that made the vectors.
        open_reference: Gives the same model in float32, where the engine has no twin at hand.
        batch: Texts, the same for both engines.
        rows: Rows that have a vector.
        vectors: Vectors of all rows, shape (n, dimensions).

    Raises:
        DeviceFailed: Nothing works on the device any more.
    """
    sample = sample_rows(batch.lengths, rows)
    try:
        reference = engine.exact_twin or open_reference()
        if reference is None or not len(sample):
            return None
        each = np.split(sample, len(sample))  # one by one, since they differ much in length
        alone = np.concatenate([engine.forward(batch, row) for row in each])
        exact = np.concatenate([reference.forward(batch, row) for row in each])
    except DeviceFailed:
        raise
    except Exception as error:  # noqa: BLE001 # a model may raise anything; a receipt is no result
        log.warning("no parity receipt: %s", error)
        return None
    cosines = cosine(vectors[sample], exact)
    return Parity(
        texts=len(sample),
        reference_mean=float(cosines.mean()),
        reference_least=float(cosines.min()),
        composition_least=float(cosine(vectors[sample], alone).min()),
        reference=f"{reference.name} float32",
    )


def sample_rows(lengths: NDArray[np.int64], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Choose some of `rows`, spread over their lengths, with few tokens together."""
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    places = np.linspace(0, len(ordered) - 1, min(SAMPLE_TEXTS, len(ordered))).astype(np.intp)
    sample = ordered[places]
    fits = np.cumsum(lengths[sample]) <= SAMPLE_TOKENS_MAX
    fits[:1] = True
    return sample[fits]
