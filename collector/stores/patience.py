"""Calls of a store that are repeated while it is away, or has no room."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from embedfarm.collector.manifest import OutputError
from embedfarm.collector.stores import open_store
from embedfarm.collector.stores.address import StoreAddress
from embedfarm.collector.stores.store import StoreError
from embedfarm.contract.formatting import format_seconds, one_line
from embedfarm.contract.redaction import hide_secrets
from embedfarm.contract.settings import Settings

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


class PatientStore:
    """A store whose calls wait, within limits, for what may pass.

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

    def attempt(self, call: Callable[[], T]) -> T:
        """Return the answer of a call, which is repeated while the store may yet give one.

        Raises:
            StoreUnavailable: It gave none for `store_seconds_max`.
            StoreError: It refused.
            ExportStopped: `stop` was set.
        """
        deadline = time.monotonic() + self._seconds_max
        pause, said_at = PAUSE_SECONDS_MIN, 0.0
        while True:
            if self._stop.is_set():
                raise ExportStopped(f"the export to {self._name} was stopped")
            try:
                answer = call()
            except OutputError:
                raise
            except Exception as error:
                reason = one_line(hide_secrets(str(error)), REASON_CHARACTERS_MAX)
                if not self.store.may_pass(error):
                    raise StoreError(f"{self._name} refuses: {reason}") from error
                now = time.monotonic()
                if now > deadline:
                    seconds = format_seconds(self._seconds_max)
                    raise StoreUnavailable(
                        f"{self._name} has not answered for {seconds}: {reason}"
                    ) from error
                self.waits = f"waits for {self._name}: {reason}"
                if now >= said_at:
                    log.warning("%s", self.waits)
                    said_at = now + WARNING_SECONDS
            else:
                if self.waits:
                    log.warning("%s answers again", self._name)
                    self.waits = ""
                return answer
            self._stop.wait(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
