"""A watch that looks at the farm ten times a second: does it move, and what of its leases?"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import redis

from embedfarm.contract.broker import UNAVAILABLE, connect
from embedfarm.contract.entries import Pending
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import JobGone, is_gone

LOOK_SECONDS: Final = 0.1
LEASES_SECONDS: Final = 1.0
LEASES_MAX: Final = 10_000
HANDED_BACK_SECONDS: Final = 86_400  # what `release` hands back seems that old
PATIENCE_SECONDS: Final = 2.0


def leases(farm: FarmClient, worker: str | None = None) -> Iterator[Pending]:
    """Yield the leases of one worker or of all, on all jobs."""
    for name in farm.job_ids():
        job = farm.job(name)
        for stream in (job.keys.blocks, job.keys.retry):
            try:
                yield from job.stream.pending(stream, worker, LEASES_MAX)
            except redis.ResponseError as error:
                if not is_gone(error):
                    raise


@dataclass
class Watch:
    """A thread that follows one job after the other.

    A change between two looks happened after the first look and before the second.

    Attributes:
        url: URL of the server.
        job: Id of the job that is followed.
        chunks_done: Chunks of the job that are done.
        moved_after: Monotonic time after which `chunks_done` or `drained_upto` grew.
        written_after: Monotonic time after which `drained_upto` grew, or a job was followed by
            another one.
        idle_seconds_max: Longest time for which a lease was seen that nobody renewed.
        idle_longest: Which lease that was, and when.
        deliveries_max: Most deliveries that were seen of a block.
    """

    url: str
    job: str = ""
    chunks_done: int = 0
    moved_after: float = field(default_factory=time.monotonic)
    written_after: float = field(default_factory=time.monotonic)
    idle_seconds_max: float = 0.0
    idle_longest: str = ""
    deliveries_max: int = 0
    _before: tuple[str, int, int] = ("", 0, 0)
    _looked_at: float = field(default_factory=time.monotonic)
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

    def recovery_seconds(
        self, since: float, seconds_max: float, proof: Callable[[float], bool]
    ) -> float:
        """Wait until chunks are done and `proof` holds again; return the seconds since `since`.

        Raises:
            TimeoutError: It takes longer than `seconds_max`.
        """
        works = False
        while not (works and self.moved_after > since):
            seconds = time.monotonic() - since
            if seconds > seconds_max:
                missing = "no chunk is done" if works else "what was hit does not work"
                raise TimeoutError(f"{missing} again within {seconds_max:.0f} s")
            with suppress(*UNAVAILABLE):
                works = works or proof(since)
            self._ended.wait(LOOK_SECONDS)
        return time.monotonic() - since

    def _run(self) -> None:
        farm = FarmClient(self._client)
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

    def _look(self, farm: FarmClient) -> None:
        name, at = self.job, time.monotonic()
        status = farm.job(name).status()
        self.chunks_done = 0 if status.ended else status.first_chunk + status.chunks_done
        now = (name, self.chunks_done, status.drained_upto)
        _, done, drained = self._before if self._before[0] == name else (name, 0, 0)
        if now[1] > done or now[2] > drained:
            self.moved_after = self._looked_at
        if now[2] > drained or self._before[0] != name:
            self.written_after = self._looked_at
        self._before, self._looked_at = now, at

    def _look_at_leases(self, farm: FarmClient) -> None:
        for lease in leases(farm):
            idle = lease.idle_ms / 1000 % HANDED_BACK_SECONDS
            if idle > self.idle_seconds_max:
                self.idle_seconds_max = idle
                self.idle_longest = f"{lease}, at {time.strftime('%X')}"
            self.deliveries_max = max(self.deliveries_max, lease.deliveries)
