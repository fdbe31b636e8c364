"""A worker with a null model that cannot embed some texts: `python -m tests.web.frail_worker …`."""

import numpy as np
from numpy.typing import NDArray

from embedfarm.workers.engines.engine import Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.main import main

TOKENS_MAX = 50  # a longer text has a vector of nothing, which no chunk may have

forward = NullEngine.forward


def frail(engine: NullEngine, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the vectors of rows, zero for long ones."""
    vectors = forward(engine, batch, rows)
    return np.where(batch.lengths[rows, None] > TOKENS_MAX, np.float32(0), vectors)


if __name__ == "__main__":
    NullEngine.forward = frail  # type: ignore[assignment,method-assign] # as a faulty device would do
    main()
