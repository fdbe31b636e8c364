"""A worker process whose model fails on demand: `python -m tests.chaos.worker --device cpu-0`.

The model fails while the file `memory` or `nan` is in the directory `CHAOS_SWITCHES`.
"""

import os
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers import main as process
from embedfarm.workers import model_store
from embedfarm.workers.engines.engine import Engine, Finish, OutOfMemory, Tokenised
from embedfarm.workers.engines.opening import open_engine

SWITCHES: Final = "CHAOS_SWITCHES"
TOKENS_MAX: Final = 1024  # padded tokens of a device batch, while memory is short
SPOILED: Final = slice(0, None, 7)  # rows that become NaN


class FailingEngine:
    """An engine that runs out of memory, or gives NaN, while a file exists."""

    def __init__(self, engine: Engine, switches: Path) -> None:
        self._engine = engine
        self._switches = switches

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 # whatever the engine has
        return getattr(self._engine, name)

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Start a batch like the engine, unless memory is short; its vectors may become NaN."""
        self._use_memory(batch, rows)
        finish = self._engine.start(batch, rows)
        return lambda: self._spoil(finish())

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed a batch like the engine, unless memory is short; its vectors may become NaN."""
        self._use_memory(batch, rows)
        return self._spoil(self._engine.forward(batch, rows))

    def _use_memory(self, batch: Tokenised, rows: NDArray[np.intp]) -> None:
        large = len(rows) > 1 and len(rows) * int(batch.lengths[rows].max()) > TOKENS_MAX
        if large and (self._switches / "memory").exists():
            raise OutOfMemory(f"{len(rows)} rows are too much now")

    def _spoil(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        if not (self._switches / "nan").exists():
            return vectors
        spoiled = vectors.copy()
        spoiled[SPOILED] = np.nan
        return spoiled


def open_failing(spec: JobSpec, device: str, settings: Settings) -> Engine:
    """Open the engine of a spec, so that it may fail."""
    engine = open_engine(spec, device, settings)
    return cast("Engine", FailingEngine(engine, Path(os.environ[SWITCHES])))


def main() -> int:
    """Run a worker whose engines may fail."""
    vars(model_store)["open_engine"] = open_failing
    return process.main()
