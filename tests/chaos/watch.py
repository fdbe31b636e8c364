"""Looks at the farm ten times a second: is it moving, and what do its leases say?"""

import threading
import time
from dataclasses import dataclass, field
from typing import Final, Self

import redis

from embedfarm.broker import UNAVAILABLE, connect
from embedfarm.farm import Farm
from embedfarm.status import JobGone, is_gone
from tests.support import wait_until

LOOK_SECONDS: Final = 0.1
LEASES_SECONDS: Final = 1.0
LEASES_MAX: Final = 10_000
HANDED_BACK_SECONDS: Final = 86_400  # what `release` hands back seems that old
PATIENCE_SECONDS: Final = 2.0


@dataclass
class Watch:
    """Follows one job after the other, in a thread.

    Attributes:
        url: The server.
        job: The one that is followed.
        chunks_done: Of it.
        moved_at: Monotonic time at which `chunks_done` or `drained_upto` last grew.
        idle_seconds_max: Longest time for which a lease was seen that nobody renewed.
        deliveries_max: Most deliveries that were seen of a block.
    """

    url: str
    job: str = ""
    chunks_done: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    idle_seconds_max: float = 0.0
    deliveries_max: int = 0
    _before: tuple[str, int, int] = ("", 0, 0)
    _leases_at: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._client = connect(self.url)
        # A server that hangs must not hide when it is back.
        self._client.connection_pool.connection_kwargs["socket_timeout"] = PATIENCE_SECONDS
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def recovery_seconds(self, since: float, seconds_max: float) -> float:
        """Time from `since` until chunks are done again.

        Raises:
            TimeoutError: It takes longer than `seconds_max`.
        """
        wait_until(lambda: self.moved_at > since, seconds_max)
        return self.moved_at - since

    def _run(self) -> None:
        farm = Farm(self._client)
        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._look(farm)
                if time.monotonic() >= self._leases_at:
                    self._look_at_leases(farm)
                    self._leases_at = time.monotonic() + LEASES_SECONDS
            except (*UNAVAILABLE, JobGone):
                continue
            except redis.ResponseError as error:
                if not is_gone(error):  # it ended between two of our commands
                    raise

    def _look(self, farm: Farm) -> None:
        name = self.job
        status = farm.job(name).status()
        self.chunks_done = 0 if status.ended else status.first_chunk + status.chunks_done
        now = (name, self.chunks_done, status.drained_upto)
        _, done, drained = self._before if self._before[0] == name else (name, 0, 0)
        if now[1] > done or now[2] > drained:
            self.moved_at = time.monotonic()
        self._before = now

    def _look_at_leases(self, farm: Farm) -> None:
        job = farm.job(self.job)
        for stream in (job.keys.blocks, job.keys.retry):
            if farm.client.exists(stream):
                for lease in job.pending(stream, None, LEASES_MAX):
                    idle = lease.idle_ms / 1000 % HANDED_BACK_SECONDS
                    self.idle_seconds_max = max(self.idle_seconds_max, idle)
                    self.deliveries_max = max(self.deliveries_max, lease.deliveries)
