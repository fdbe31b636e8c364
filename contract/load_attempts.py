"""Loads of models that end the process they run in: counted, so that none is tried for ever."""

import time
from dataclasses import dataclass
from typing import Final, cast

from embedfarm.contract import wire
from embedfarm.contract.encoding import Amount, Count, Record, encode
from embedfarm.contract.farm_keys import FarmKeys

ATTEMPTS_MAX: Final = 3  # one process that ends meanwhile may have been ended by anybody
WAIT_SECONDS_MIN: Final = 300.0
WAIT_SECONDS_MAX: Final = 3600.0
DOUBLINGS_MAX: Final = 9
KEPT_SECONDS: Final = 86_400


class LoadAttempts(Record):
    """Loads of a model by a worker that have not come to an end.

    Attributes:
        count: How many there were, the one that goes on now included.
        at: Unix time at which the last one began, in seconds.
        reason: Why the last one was given up, "" where nobody can tell.
    """

    count: Count
    at: Amount
    reason: str = ""

    @property
    def wait_seconds(self) -> float:
        """How long the model is left alone after the last attempt, twice as long each time."""
        more = self.count - ATTEMPTS_MAX
        if more < 0:
            return 0.0
        return min(WAIT_SECONDS_MIN * 2.0 ** min(more, DOUBLINGS_MAX), WAIT_SECONDS_MAX)

    def quarantined(self, now: float) -> bool:
        """Tell whether the model is left alone now; a clock that was set back ends that."""
        return 0 <= now - self.at < self.wait_seconds

    def sentence(self) -> str:
        """Say what has happened, and what will."""
        what = self.reason or (
            f"{self.count} times in a row the worker's process ended while it loaded this model, "
            "as it does where memory is short or a library fails"
        )
        again = time.strftime("%H:%M UTC", time.gmtime(self.at + self.wait_seconds))
        return f"{what}; it is tried again at {again}"


@dataclass
class LoadLedger(FarmKeys):
    """The loads of each worker and model that have begun and not ended."""

    def begin(self, worker: str, model: str) -> LoadAttempts | None:
        """Count a load that begins now; where none may, count nothing and return what forbids it.

        Args:
            worker: Name of the worker.
            model: Name of all that decides what is loaded.
        """
        forbidding = self.forbidding(worker, model)
        if forbidding is None:
            count = self.attempts(worker, model).count + 1
            self._set(worker, model, LoadAttempts(count=count, at=time.time()))
        return forbidding

    def forbidding(self, worker: str, model: str) -> LoadAttempts | None:
        """Return what forbids a worker to load a model now; None where nothing does."""
        before = self.attempts(worker, model)
        return before if before.quarantined(time.time()) else None

    def end(self, worker: str, model: str) -> None:
        """Forget the attempts: the last one has come to an end, whatever it was."""
        self.client.unlink(wire.load_key(worker, model))

    def quarantine(self, worker: str, model: str, reason: str) -> None:
        """Leave a model alone for a while at once, since loading it has taken too long already."""
        count = max(self.attempts(worker, model).count, ATTEMPTS_MAX)
        self._set(worker, model, LoadAttempts(count=count, at=time.time(), reason=reason))

    def attempts(self, worker: str, model: str) -> LoadAttempts:
        """Return the loads of a model by a worker that have not come to an end."""
        key = wire.load_key(worker, model)
        data = cast("bytes | None", self.client.get(key))
        return self._read(LoadAttempts, key, data) or LoadAttempts(count=0, at=0.0)

    def _set(self, worker: str, model: str, attempts: LoadAttempts) -> None:
        self.client.set(wire.load_key(worker, model), encode(attempts), ex=KEPT_SECONDS)
