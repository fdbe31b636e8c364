"""Loading of engines for interactive requests, while the worker has nothing else to do."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane, Taken
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import LaneAnswer, LanePiece
from embedfarm.workers.job_engines import REFUSAL_SECONDS
from embedfarm.workers.model_store import ModelStore

# Before a model is given up for a request that a worker which has it may be about to take.
SWAP_SECONDS: Final = 0.5
ALL_BYTES: Final = 1 << 40

log = logging.getLogger(__name__)


@dataclass
class LaneLoader:
    """Loads engines that requests wait for, and refuses requests that no worker can serve.

    Attributes:
        hear: Called with the key of an engine once it is loaded.
    """

    farm: FarmClient
    lane: Lane
    worker: str
    models: ModelStore
    stop: threading.Event
    hear: Callable[[str], None]
    _refused_until: dict[str, float] = field(default_factory=dict)

    def load_wanted(self) -> bool:
        """Load the engine that requests wait for in vain; tell whether a loading was tried.

        Raises:
            redis.ConnectionError: The server is away.
        """
        for key in self.lane.asked():
            oldest = None if self.models.resident.find(key) else self.lane.oldest(key)
            if oldest is not None and self._consider(key, oldest):
                return True
        return False

    def _consider(self, key: str, oldest: Taken) -> bool:
        """Load an engine for a request, or refuse it; return False if no loading was tried."""
        if time.monotonic() < self._refused_until.get(key, 0.0):
            self._refuse_together(key)
            return False
        try:
            request = decode(LanePiece, oldest.data)
        except RecordError as error:
            refuse_waiting(self.lane, key, self.worker, str(error))
            return False
        patience = SWAP_SECONDS if self.models.has_any else 0.0
        if not patience <= oldest.waited_seconds <= request.timeout_seconds:
            return False
        if self.stop.is_set() or not self.lane.claim_loading(key, self.worker):
            return False
        try:
            self._load(key, request.spec)
        finally:
            self.lane.end_loading(key)
        return True

    def _load(self, key: str, spec: JobSpec) -> None:
        """Load an engine; if that fails, and no other worker can load it, refuse its requests."""
        try:
            self.models.load(spec)
        except ModelError as error:
            log.warning("requests refused: %s", error)
            self._refused_until[key] = time.monotonic() + REFUSAL_SECONDS
            self.lane.refuse(key, self.worker, str(error))
            self._refuse_together(key)
        else:
            if self.models.resident.find(key) is not None:
                self.hear(key)

    def _refuse_together(self, key: str) -> None:
        """Refuse what waits for an engine that no worker of the farm could load."""
        reasons = self.lane.unloaded(key)
        if {beat.worker for beat in self.farm.workers()} <= reasons.keys():
            said = dict.fromkeys(reasons.values())  # most say the same
            reason = f"no worker can load the model: {'; '.join(said)}"
            refuse_waiting(self.lane, key, self.worker, reason)


def refuse_waiting(lane: Lane, key: str, worker: str, reason: str) -> None:
    """Refuse all requests that wait for an engine."""
    answer = LaneAnswer(reason=reason, worker=worker, unserved=True)
    while taken := lane.take(key, worker, ALL_BYTES):
        lane.answer(key, [(each.entry, each.id, answer) for each in taken])
