"""Watchdog over what does not end: a text that hangs the device, a driver that is silent.

What may hang is watched while it runs. A thread of its own looks at it, and adds up the time for
which this process really ran: one that was stopped, or a machine that slept, has missed nothing.
Where not even that thread gets to run, because whatever hangs holds the interpreter's lock, a
thread of the C library ends the process (`faulthandler`), whether the lock is held by work or by
a wait. It goes by the clock, so that a process that was stopped for as long ends, too, when it
goes on: its leases have long been others'.
"""

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.settings import Settings
from embedfarm.workers.leases import Lease

HUNG_STATUS: Final = 70  # of a process that gave itself up; its supervisor starts it again
LOOK_SECONDS: Final = 0.5
# What a look adds at most: whoever comes much later than that was not running in between.
LOOK_SECONDS_MAX: Final = 2 * LOOK_SECONDS
STANDARD_ERROR: Final = 2  # a file of Python's in its place may have no descriptor
LOCKED_SECONDS_MIN: Final = 20 * LOOK_SECONDS  # a busy machine lets a thread wait for some seconds


@dataclass(eq=False)
class Watched:
    """Something that has begun and must end.

    Attributes:
        what: Name for people: the subject of "did not finish".
        limit: The longest that it may take, in seconds; asked once it has taken the least one.
        leases: Leases for which it is done.
        hung: Told why, when it has taken too long and the process is about to end.
        stops_others: Whether nothing else goes on meanwhile, so that only its own time counts.
        spent: Seconds that it has had so far.
    """

    what: str
    limit: Callable[[], float]
    leases: Sequence[Lease]
    hung: Callable[[str], object]
    stops_others: bool = False
    spent: float = 0.0
    _seen: float = field(default_factory=time.monotonic)

    def count(self, *, goes_on: bool = True) -> None:
        """Add the time since the last look, if it could go on in it."""
        now = time.monotonic()
        self.spent += min(now - self._seen, LOOK_SECONDS_MAX) if goes_on else 0.0
        self._seen = now


@dataclass
class Watchdog:
    """Watches over the threads of one worker."""

    settings: Settings
    _watched: list[Watched] = field(default_factory=list)

    @contextmanager
    def watch(
        self,
        what: str,
        limit: Callable[[], float],
        leases: Sequence[Lease] = (),
        hung: Callable[[str], object] = lambda _reason: None,
        *,
        stops_others: bool = False,
    ) -> Iterator[None]:
        """Watch over the body, which may take `limit()` seconds; see `Watched`."""
        watched = Watched(what, limit, leases, hung, stops_others)
        self._watched.append(watched)
        try:
            yield
        finally:
            self._watched.remove(watched)

    def bound(self, predicted_seconds: float) -> float:
        """Return the most seconds that something may take, by those predicted, 0 for unknown."""
        settings = self.settings
        predicted = predicted_seconds or settings.hang_seconds
        return max(settings.hang_seconds, settings.hang_factor * predicted)

    def load_limit(self) -> float:
        """Return the most seconds that the loading of a model may take."""
        return self.settings.load_seconds_max

    def lock_limit(self) -> float:
        """Return the most seconds for which no thread may get the interpreter's lock."""
        return max(self.bound(0.0), LOCKED_SECONDS_MIN)

    def look(self) -> Watched | None:
        """Count time; return the first one that has taken too long, None if none has."""
        watched = list(self._watched)
        stopping = [each for each in watched if each.stops_others]
        for each in watched:
            each.count(goes_on=not stopping or each in stopping)
        late = (each for each in watched if each.spent > self.settings.hang_seconds)
        return next((each for each in late if each.spent > each.limit()), None)

    def run(self, ended: threading.Event, give_up: Callable[[Watched], object]) -> None:
        """Look until `ended` is set, or until something has taken too long.

        Meanwhile, and from then on, this process is ended, with the stacks of all its threads on
        its standard error, once no look has been had for `lock_limit()` seconds: a thread that was
        left to itself may hold the interpreter's lock later, and keep the process from its end.
        """
        while not ended.is_set():
            faulthandler.dump_traceback_later(self.lock_limit(), exit=True, file=STANDARD_ERROR)
            late = self.look()
            if late is not None:
                give_up(late)
                return
            ended.wait(LOOK_SECONDS)
