"""Loading of engines for interactive requests: beside the worker's models, or in their place."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from embedfarm.contract.broker import UNAVAILABLE
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import NOT_NOW
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane, Taken
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import LaneAnswer, LanePiece
from embedfarm.contract.settings import Settings
from embedfarm.workers.job_engines import REFUSAL_SECONDS, reason_of
from embedfarm.workers.model_store import ModelStore

# How long a request is left to a worker that has its model, or that has nothing else to do.
IDLE_SECONDS: Final = 0.5
BUSY_SECONDS: Final = 1.0
LOADS_WORTH: Final = 10.0  # times its loading that a model is kept at most for requests, and others
TURN_SECONDS_MIN: Final = 1.0
RETURN_SECONDS: Final = 3.0  # in which a caller comes back that was told when
WITHDRAWN_SECONDS: Final = 0.5  # between a caller's time being up and the look that finds it gone
BUSY: Final = "its device works for jobs"  # begins the reason of a worker that may load it later
ALL_BYTES: Final = 1 << 40

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """The time for which a model that was loaded for requests stays for them.

    Attributes:
        engine: Key of the engine that they wait for.
        began: Monotonic time at which it was loaded.
        seconds: Time that the loading took, or in which a caller comes back, at least
            `TURN_SECONDS_MIN`.
        yielded: Whether work in hand had to end for it.
    """

    engine: str
    began: float
    seconds: float
    yielded: bool


class Wish(NamedTuple):
    """A model that somebody asked for, and that fits only in the place of others.

    Attributes:
        engine: Key of the engine that was asked for.
        spec: What it is to do.
        due: Monotonic time from which the worker ends what it holds for it.
        until: Monotonic time at which the caller's own time is up.
    """

    engine: str
    spec: JobSpec
    due: float
    until: float


@dataclass
class LaneLoader:
    """Loads engines that requests wait for, and refuses requests that no worker can serve.

    What fits beside the models that are in use is loaded beside them. For what does not, requests
    wait up to `lane_swap_seconds`; then the worker ends what it holds, and the model has a turn: as
    long as its loading took, and up to ten times that while requests come. Then jobs have theirs,
    for ten times as long as the loading took. A caller that cannot wait for so long is told when to
    come again, and finds the model then.

    Attributes:
        is_idle: Tells whether the worker holds no work of jobs.
        hear: Called with the key of an engine once it is loaded.
    """

    farm: FarmClient
    lane: Lane
    worker: str
    models: ModelStore
    settings: Settings
    stop: threading.Event
    is_idle: Callable[[], bool]
    hear: Callable[[str], None]
    _turn: Turn | None = None
    _wish: Wish | None = None
    _yields: bool = False  # whether the worker ends what it holds for it
    _yields_since: float = 0.0
    _took_to_yield: float | None = None  # seconds, when it was seen last
    _yields_at: float = 0.0  # monotonic time from which it may
    _refused_until: dict[str, float] = field(default_factory=dict)

    def look(self) -> bool:
        """Have the engine loaded that requests wait for; tell whether work in hand must end first.

        Raises:
            redis.ConnectionError: The server is away.
        """
        self._end_turn()
        self._forget_wish()
        if not self.models.is_loading and not self._grant_wish():
            for key in self.lane.asked():
                oldest = None if self.models.resident.find(key) else self.lane.oldest(key)
                if oldest is not None and self._consider(key, oldest):
                    break
        return self._yields

    def engines(self) -> set[str]:
        """Return the key of the engine whose turn it is."""
        return set() if self._turn is None else {self._turn.engine}

    def yields_in_seconds(self, held_tokens: int = 0, tokens_per_second: float = 0.0) -> float:
        """Return the time after which this worker can load a model in the place of others.

        How long it takes to end what it holds is what it took last; if that was never seen, it is
        what the tokens in hand take at its rate.
        """
        held = held_tokens / tokens_per_second if tokens_per_second else 0.0
        now = time.monotonic()
        due = now + self.settings.lane_swap_seconds if self._wish is None else self._wish.due
        if self._yields:
            due = self._yields_since  # the work that is held is all that is left to wait for
        took = held if self._took_to_yield is None else self._took_to_yield
        return max(0.0, max(due, self._yields_at) + took - now)

    def _end_turn(self) -> None:
        """End the turn of a model that was loaded for requests, so that another one may come."""
        turn = self._turn
        if turn is None:
            return
        lasted = time.monotonic() - turn.began
        served = lasted >= turn.seconds and not self.lane.waiting(turn.engine)
        if served or lasted >= LOADS_WORTH * turn.seconds:
            self._turn = None
            if turn.yielded:
                self._yields_at = time.monotonic() + LOADS_WORTH * turn.seconds

    def _forget_wish(self) -> None:
        """Forget a wish that others have granted, or whose caller left before its time was up."""
        wish = self._wish
        if wish is None:
            return
        early = time.monotonic() < wish.until - WITHDRAWN_SECONDS
        over = early and self.lane.oldest(wish.engine) is None
        if over or self.models.resident.find(wish.engine):
            if self._yields:
                self.lane.end_loading(wish.engine)
            self._wish, self._yields = None, False

    def _grant_wish(self) -> bool:
        """Load the model that is wished for, or end what is held for it, if its time has come."""
        wish = self._wish
        if wish is None or self.stop.is_set() or time.monotonic() < max(wish.due, self._yields_at):
            return False
        if not self._yields and not self.lane.claim_loading(wish.engine, self.worker):
            self._wish = None  # another worker has begun
            return False
        now = time.monotonic()
        self._yields_since = self._yields_since if self._yields else now
        begun = self._load(wish.engine, wish.spec, yields=True)
        self._yields = begun is False
        if not self._yields:
            self._wish, self._took_to_yield = None, now - self._yields_since
        return True

    def _consider(self, key: str, oldest: Taken) -> bool:
        """Load an engine for a request, or refuse it; return False if there is nothing to do."""
        if time.monotonic() < self._refused_until.get(key, 0.0):
            self._refuse_together(key)
            return False
        try:
            request = decode(LanePiece, oldest.data)
        except RecordError as error:
            refuse_waiting(self.lane, key, self.worker, str(error))
            return False
        patient = self._patience() <= oldest.waited_seconds <= request.timeout_seconds
        if not patient or self.stop.is_set():
            return False
        if not self.lane.claim_loading(key, self.worker):
            return False
        begun = self._load(key, request.spec)
        if begun is False:
            self._wish_for(key, request, oldest.waited_seconds)
        return bool(begun)

    def _wish_for(self, key: str, request: LanePiece, waited_seconds: float) -> None:
        """Note that a model has to come in the place of others, and when."""
        came = time.monotonic() - waited_seconds
        due, until = came + self.settings.lane_swap_seconds, came + request.timeout_seconds
        if self._wish is None:
            self._wish = Wish(key, request.spec, due, until)
        late = self._seconds_until_turn() > request.timeout_seconds
        if late and self._put_off(key) and self._wish.engine == key:
            self._wish = self._wish._replace(until=0.0)

    def _seconds_until_turn(self) -> float:
        """Return the time after which this worker can have loaded a model in place of another."""
        loads = [model.load_seconds for model in self.models.resident]
        return self._yields_at - time.monotonic() + max(loads, default=0.0)

    def _patience(self) -> float:
        """Return how long a request waits before this worker loads its model."""
        if not self.models.has_any:
            return 0.0
        return IDLE_SECONDS if self.is_idle() else BUSY_SECONDS

    def _load(self, key: str, spec: JobSpec, *, yields: bool = False) -> bool | None:
        """Begin to load an engine whose loading this worker has claimed.

        Args:
            key: Key of the engine.
            spec: What it is loaded for.
            yields: Whether what is in its way goes for it.

        Returns:
            Whether the load was begun; None if the engine does not load.
        """
        begun: bool | None = None
        try:
            begun = self.models.load_beside(spec, partial(self._loaded, key, yielded=yields))
        except ModelError as error:
            self._refuse(key, error)
        if begun is None or not (begun or yields):
            self.lane.end_loading(key)
        return begun

    def _loaded(self, key: str, *, yielded: bool) -> None:
        """Give a model that is loaded now its turn; if it failed, the next look learns why."""
        model = self.models.resident.owner(key)
        if model is not None:
            seconds = max(TURN_SECONDS_MIN, model.came_seconds)
            self._turn = Turn(key, time.monotonic(), seconds, yielded)
            self.hear(key)
        try:
            if model is not None and not self.lane.waiting(key):  # whoever asked has left
                seconds = max(RETURN_SECONDS, model.came_seconds)
                self._turn = Turn(key, time.monotonic(), seconds, yielded)
            self.lane.end_loading(key)
        except UNAVAILABLE as error:
            log.warning("others are kept from loading for a while, server away: %s", error)

    def _refuse(self, key: str, error: ModelError) -> None:
        """Leave an engine that does not load here to others; if there are none, refuse requests."""
        log.warning("requests refused: %s", error)
        now = time.monotonic()
        self._refused_until = {k: until for k, until in self._refused_until.items() if until > now}
        self._refused_until[key] = now + REFUSAL_SECONDS
        self.lane.refuse(key, self.worker, reason_of(error))
        self._refuse_together(key)

    def _put_off(self, key: str) -> bool:
        """Leave requests that cannot be answered in time to others; say so if there are none.

        Returns:
            Whether it was said.
        """
        again = f"loads it in {self._seconds_until_turn():.0f} s at the earliest"
        self.lane.refuse(key, self.worker, f"{BUSY}, and {again}")
        return self._refuse_together(key)

    def _refuse_together(self, key: str) -> bool:
        """Refuse what waits for an engine that no worker of the farm could load, or not in time.

        Returns:
            Whether it was refused.
        """
        reasons, alive = self.lane.unloaded(key), {beat.worker for beat in self.farm.workers()}
        # Where a server was away for a while, nobody is known to be alive, and that is no reason.
        together = self.worker in alive and alive <= reasons.keys()
        if together:
            said = dict.fromkeys(reasons.values())  # most say the same
            late = any(each.startswith((BUSY, NOT_NOW)) for each in said)
            what = "no worker loads the model in time" if late else "no worker can load the model"
            reason = f"{what}: {'; '.join(said)}"
            refuse_waiting(self.lane, key, self.worker, reason, late=late)
        return together


def refuse_waiting(lane: Lane, key: str, worker: str, reason: str, *, late: bool = False) -> None:
    """Refuse all requests that wait for an engine: for good, or since none is answered in time."""
    answer = LaneAnswer(reason=reason, worker=worker, unserved=not late, late=late)
    while taken := lane.take(key, worker, ALL_BYTES):
        lane.answer(key, [(each.entry, each.id, answer) for each in taken])
