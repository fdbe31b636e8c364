"""Calls of a store that are repeated while it is away, or has no room."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final, TypeVar

from embedfarm.collector.manifest import OutputError
from embedfarm.collector.stores import open_store
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import StoreError
from embedfarm.contract.formatting import format_seconds, one_line
from embedfarm.contract.redaction import hide_secrets
from embedfarm.contract.settings import Settings

LOOK_SECONDS: Final = 0.25  # between looks whether a call is to be waited for
PAUSE_SECONDS_MIN: Final = 0.25
PAUSE_SECONDS_MAX: Final = 15.0
WARNING_SECONDS: Final = 15.0
REASON_CHARACTERS_MAX: Final = 300
T = TypeVar("T")

log = logging.getLogger(__name__)


class StoreUnavailable(StoreError):
    """Raised when a store did not answer, or had no room, for too long."""

    exit_status = 1


class ExportStopped(StoreError):
    """Raised when an export was stopped; the same command goes on from there."""

    exit_status = 130


class CallThread:
    """A thread that makes calls in their order, and ends with the process in the middle of one.

    So whoever waits for an answer that never comes may cease to. Clients of stores have limits of
    time for some calls, or none, and poolers of PostgreSQL refuse those that a session sets.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store calls", daemon=True)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called when those before have returned."""
        answer: Future[T] = Future()

        def make() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 # whoever waits raises it
                answer.set_exception(error)

        self._calls.put(make)
        if self._thread.ident is None:
            self._thread.start()
        return answer

    def end(self) -> None:
        """Let the thread end when all calls have returned."""
        self._calls.put(None)

    def _run(self) -> None:
        while make := self._calls.get():
            make()


class PatientStore:
    """A store whose calls wait, within limits, for what may pass, and for answers.

    Attributes:
        store: The store; what is called on it goes through `attempt`.
        waits: Why a call waits; "" while none does. Any thread may read it.

    Args:
        address: Where the collection is.
        settings: The limits of waiting.
        stop: Event that ends the waiting.
    """

    def __init__(self, address: StoreAddress, settings: Settings, stop: threading.Event) -> None:
        self.store = open_store(address)
        self.waits = ""
        self._name = address.shown
        self._seconds_max = settings.store_seconds_max
        self._stop = stop
        self._thread = CallThread()
        self._answered_at = 0.0
        self._hangs = False

    def attempt(self, call: Callable[[], T], *, limited: bool = True) -> T:
        """Return the answer of a call, which is repeated while the store may yet give one.

        Args:
            call: The call.
            limited: Whether it is given up when it alone takes longer than `store_seconds_max`.

        Raises:
            StoreUnavailable: The store gave no answer for `store_seconds_max`.
            StoreError: It refused.
            ExportStopped: `stop` was set.
        """
        self.note_answer()
        pause, said_at = PAUSE_SECONDS_MIN, 0.0
        while True:
            self._raise_if_stopped()
            try:
                answer = self._wait(self._thread.call(call), limited=limited)
            except OutputError:
                raise
            except Exception as error:
                reason = one_line(hide_secrets(str(error)), REASON_CHARACTERS_MAX)
                if not self.store.may_pass(error):
                    raise StoreError(f"{self._name} refuses: {reason}") from error
                if self._is_late():
                    raise self._unavailable(f": {reason}") from error
                self.waits = f"waits for {self._name}: {reason}"
                if (now := time.monotonic()) >= said_at:
                    log.warning("%s", self.waits)
                    said_at = now + WARNING_SECONDS
            else:
                if self.waits:
                    log.warning("%s answers again", self._name)
                    self.waits = ""
                return answer
            self._stop.wait(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def note_answer(self) -> None:
        """Note that the store has answered, in a call that asks it more than once."""
        self._answered_at = time.monotonic()

    def close(self) -> None:
        """Let go of the store; of one that still hangs in a call when that returns, if ever."""
        closed = self._thread.call(self.store.close)
        self._thread.end()
        if not self._hangs:
            closed.result()

    def _wait(self, answer: Future[T], *, limited: bool) -> T:
        """Return the answer of a call when it is there."""
        self._hangs, answered = True, threading.Event()
        answer.add_done_callback(lambda _: answered.set())
        while not answered.wait(LOOK_SECONDS):
            self._raise_if_stopped()
            if limited and self._is_late():
                raise self._unavailable("")
        self._hangs = False
        return answer.result()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise ExportStopped(f"the export to {self._name} was stopped")

    def _is_late(self) -> bool:
        return time.monotonic() > self._answered_at + self._seconds_max

    def _unavailable(self, reason: str) -> StoreUnavailable:
        """Return the error that a store which has not answered for too long is given up with."""
        seconds = format_seconds(self._seconds_max)
        return StoreUnavailable(f"{self._name} has not answered for {seconds}{reason}")
