"""How good a job's vectors are: a sample of them beside float32 and beside other device batches."""

import logging
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.usage import Parity
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Tokenised
from embedfarm.workers.similarity import cosine

SAMPLE_TEXTS: Final = 8
SAMPLE_TOKENS_MAX: Final = 512  # so that it takes a processor a second, even for a larger model

log = logging.getLogger(__name__)


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
