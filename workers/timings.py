"""Times of device batches on this device, learned from those that ran."""

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.costs import Cost, Costs
from embedfarm.contract.job_spec import JobSpec, model_key
from embedfarm.workers.engines.engine import Engine, OutOfMemory

SHORT_TOKENS: Final = 16  # of a text that people ask about, and such texts in a device batch
WARM_UP: Final = "as short as a text that people ask about, sixteen tokens or so"

log = logging.getLogger(__name__)


@dataclass
class Timings:
    """Times of device batches by model and engine; a batch is given by the tokens of its rows."""

    _costs: dict[str, Costs] = field(default_factory=lambda: defaultdict(Costs))

    def observe(
        self, spec: JobSpec, engine: Engine, lengths: NDArray[np.int64], seconds: float
    ) -> None:
        """Learn from the seconds that a device batch took."""
        self._costs[_key(model_key(spec), engine)].observe(*_size(engine, lengths), seconds)

    def predict(self, spec: JobSpec, engine: Engine, lengths: NDArray[np.int64]) -> float:
        """Predict the seconds that a device batch will take; 0 when none has run yet."""
        return self._costs[_key(model_key(spec), engine)].estimate(*_size(engine, lengths))

    def cost(self, spec: JobSpec, engine: Engine) -> Cost | None:
        """Return the learned cost model; None while too few batches have run."""
        return self._costs[_key(model_key(spec), engine)].cost()

    def tokens_within(self, seconds: float, model: str, engine: Engine) -> int:
        """Return the tokens of short texts that fit a time, at most the engine's own budget.

        There is at least one, or a very slow device would never take a request. There are few while
        the device's speed is not known: too many would be kept from faster devices.

        Args:
            seconds: Time that the device may take.
            model: `embedfarm.contract.farm_client.model_key` of the engine's spec.
            engine: The engine.
        """
        taken = self._costs[_key(model, engine)].estimate(SHORT_TOKENS**2, SHORT_TOKENS**3)
        known = int(SHORT_TOKENS**2 * seconds / taken) if taken else SHORT_TOKENS**2
        return max(1, min(engine.batch_tokens, known))

    def warm_up(self, spec: JobSpec, engine: Engine) -> None:
        """Run an engine that was just loaded on a harmless text, twice.

        So its first device batch of a job, which may hang, is no longer the first one, and what it
        may take is known. The first run may take far longer than any later one: a device is set up
        in it, or this process is stopped. Beside it the second one counts most (`Costs`).

        Raises:
            DeviceFailed: Nothing works on this device any more.
        """
        batch = engine.tokenise([WARM_UP])
        try:
            for _ in range(2):
                began = time.monotonic()
                engine.forward(batch, np.arange(len(batch.lengths)))
                self.observe(spec, engine, batch.lengths, time.monotonic() - began)
        except OutOfMemory as error:
            log.warning("not warmed up: %s", error)


def _key(model: str, engine: Engine) -> str:
    """Return a key of all that changes the time of a device batch."""
    return f"{model}|{engine.name}"


def _size(engine: Engine, lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Count the tokens, and pairs of tokens of one text, of a device batch with any padding."""
    if not engine.padded:
        return int(lengths.sum()), int((lengths**2).sum())
    longest = int(lengths.max())
    return len(lengths) * longest, len(lengths) * longest**2
