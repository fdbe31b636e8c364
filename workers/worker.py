"""One worker: three stages in three threads, and a fourth that renews leases and beats.

    fetch + tokenise -> forward (main thread) -> commit

Each hands over through a queue of one, so that the device always has its next micro-batch in hand
and never more than that. On a stop the current micro-batch is finished and the rest handed back.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import redis

from embedfarm.broker import (
    FIRST_PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    UNAVAILABLE,
    connect,
    host_name,
)
from embedfarm.farm import Farm
from embedfarm.records import Heartbeat, Result
from embedfarm.settings import Settings
from workers.commit import Committer
from workers.embed import Embedder
from workers.fetch import Fetcher
from workers.leases import Holdings, Lease, MicroBatch
from workers.models import Models

QUEUE_SECONDS: Final = 0.5  # a stage that waits for another looks for a stop this often

T = TypeVar("T")
log = logging.getLogger(__name__)
Embedded = tuple[MicroBatch, list[tuple[Lease, Result]]]
Facts = Callable[[], dict[str, float]]


@dataclass
class Worker:
    """A worker on one device.

    Attributes:
        url: The server.
        device: Such as "cpu-0"; with the host's name it is the worker's name.
        torch_device: "cpu" or "cuda:0" (the process sees only its own device).
        settings: The farm's limits.
        stop: Set by a signal, a lost parent or a failed stage.
        facts: Measures the device for heartbeats.
    """

    url: str
    device: str
    torch_device: str
    settings: Settings
    stop: threading.Event
    facts: Facts
    name: str = field(init=False)
    failure: BaseException | None = field(init=False, default=None)
    _current: MicroBatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.name = f"{host_name()}:{self.device}"
        self.incarnation = f"{time.time_ns():020d}-{os.getpid()}"
        farm = Farm(connect(self.url))
        self.holdings = Holdings()
        self.models = Models(farm, self.name, self.torch_device, self.settings)
        self.fetcher = Fetcher(farm, self.name, self.holdings, self.models, self.settings)
        self.embedder = Embedder(
            self.name, self.settings.batch_tokens_max, self.settings.slowdown.get(self.device, 1.0)
        )
        self.committer = Committer(
            Farm(connect(self.url)), self.name, self.holdings, self.settings, self.stop
        )
        self.ready: queue.Queue[MicroBatch | None] = queue.Queue(maxsize=1)
        self.done: queue.Queue[Embedded | None] = queue.Queue(maxsize=1)
        self._ended = threading.Event()
        self.where = {"queue": 0.0, "forward": 0.0}

    def run(self) -> None:
        """Work until `stop` is set, then finish the current micro-batch and hand the rest back.

        Raises:
            BaseException: Whatever made a stage fail.
        """
        stages = [self._thread("fetch", self._fetch), self._thread("commit", self._commit)]
        beating = self._thread("beat", self._beat)
        try:
            self._forward()
        finally:
            self.stop.set()
            self._offer(self.done, None)
            for stage in stages:
                stage.join()
            self._ended.set()
            beating.join()
        self._leave()
        if self.failure is not None:
            raise self.failure

    def _thread(self, name: str, stage: Callable[[], None]) -> threading.Thread:
        """A stage in a thread of its own; its failure stops the worker."""

        def guarded() -> None:
            try:
                stage()
            except BaseException as error:  # noqa: BLE001 # `run` raises it again
                self.failure = self.failure or error
                self.stop.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    # The stages.

    def _fetch(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self.stop.is_set():
            try:
                self.fetcher.tokens_per_second = self.committer.tokens_per_second
                batches = self.fetcher.fetch()
                pause = FIRST_PAUSE_SECONDS
            except UNAVAILABLE as error:
                log.warning("server away, trying again: %s", error)
                self.fetcher.recover()
                self.stop.wait(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            for batch in batches:
                if not self.stop.is_set():  # else the leases stay in `holdings`, to be released
                    self._offer(self.ready, batch)

    def _offer(self, stage: "queue.Queue[T | None]", item: T | None) -> None:
        """Hand an item to the next stage, unless a stage has failed and nobody will take it."""
        while self.failure is None:
            try:
                stage.put(item, timeout=QUEUE_SECONDS)
            except queue.Full:
                if stage is self.ready and self.stop.is_set():
                    return
                continue
            return

    def _forward(self) -> None:
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                batch = self.ready.get(timeout=QUEUE_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                return
            self._current = batch
            self.where["queue"] += time.monotonic() - began
            results = self.embedder.embed(batch)
            self.where["forward"] += batch.forward_seconds
            self._current = None
            self._offer(self.done, (batch, results))

    def _commit(self) -> None:
        while (item := self.done.get()) is not None:
            self.committer.commit(*item)

    def _beat(self) -> None:
        """Renew leases and say that we live, until the stages have ended."""
        farm = Farm(connect(self.url))
        renew_at = 0.0
        while True:
            try:
                if time.monotonic() >= renew_at:
                    self._renew(farm)
                    renew_at = time.monotonic() + self.settings.lease_seconds / 3
                if not farm.beat(self._heartbeat(), self.settings.heartbeat_ttl_seconds):
                    log.warning("another process has taken the name %s; stopping", self.name)
                    self.stop.set()
            except UNAVAILABLE as error:
                log.warning("no heartbeat, server away: %s", error)
            if self._ended.wait(self.settings.heartbeat_seconds):
                return

    def _renew(self, farm: Farm) -> None:
        """Keep our leases; mark those that are lost, so that the device skips them."""
        for (job, stream), leases in self.holdings.by_stream().items():
            try:
                lost = farm.job(job).renew(stream, self.name, [lease.entry.id for lease in leases])
            except redis.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                lost = {lease.entry.id for lease in leases}
            for lease in leases:
                lease.lost = lease.lost or lease.entry.id in lost

    def _heartbeat(self) -> Heartbeat:
        current = self._current
        busy = current is not None
        return Heartbeat(
            worker=self.name,
            incarnation=self.incarnation,
            host=host_name(),
            pid=os.getpid(),
            device=self.device,
            state="draining" if self.stop.is_set() else "busy" if busy else "idle",
            model=self.models.loaded,
            job=current.job if current is not None else "",
            held_tokens=self.holdings.tokens,
            held_seconds=time.monotonic() - current.forward_began if current is not None else 0.0,
            tokens_per_second=self.committer.tokens_per_second,
            tokens_done=self.committer.tokens_done,
            chunks_done=self.committer.chunks_done,
            load_seconds=self.models.load_seconds,
            device_facts=self.facts(),
            where=self.where
            | {
                "tokenise": self.fetcher.tokenise_seconds,
                "commit": self.committer.commit_seconds,
            },
        )

    def _leave(self) -> None:
        """Hand back what was leased and not begun; a server that is away finds out by itself."""
        farm = Farm(connect(self.url))
        try:
            for (job, stream), leases in self.holdings.by_stream().items():
                farm.job(job).release(stream, self.name, [lease.entry.id for lease in leases])
            farm.leave(self.name)
        except (*UNAVAILABLE, redis.ResponseError) as error:
            log.warning("leases not handed back: %s", error)
