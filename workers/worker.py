"""One worker: three stages in three threads; a fourth renews leases and beats, a fifth watches.

    fetch + tokenise -> forward (main thread) -> commit
                       listen ─┘ └─ answer

Each hands over through a queue of one, so that the device always has its next micro-batch in hand
and never more than that. Two more threads bring it interactive requests, past the queue, and take
the answers away. On a stop the current micro-batch is finished and the rest handed back.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

from embedfarm.contract.broker import (
    FIRST_PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    UNAVAILABLE,
    connect,
    host_name,
    name_worker,
)
from embedfarm.contract.device_kinds import name_kind
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.lane import Lane
from embedfarm.contract.processes import restarts
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.workers.budgets import Budgets
from embedfarm.workers.canary_keeper import CanaryKeeper, ComputesWrongly
from embedfarm.workers.commit import Committer
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.fetch import Fetcher
from embedfarm.workers.job_engines import JobEngines
from embedfarm.workers.lane_loader import LaneLoader
from embedfarm.workers.lane_server import LaneServer
from embedfarm.workers.leases import Holdings, MicroBatch
from embedfarm.workers.model_store import ModelStore, start_thread
from embedfarm.workers.next_lease import IN_HAND, NextLease, time_to_lease
from embedfarm.workers.renewal import hand_back, lose_ended, renew
from embedfarm.workers.text_cache import TextCache
from embedfarm.workers.timings import Timings
from embedfarm.workers.watchdog import HUNG_STATUS, Watchdog, Watched

QUEUE_SECONDS: Final = 0.5  # a stage that waits for another looks for a stop this often
FETCH_SECONDS_MAX: Final = 2.0  # a stop waits no longer for the first stage: it may load a model

T = TypeVar("T")

log = logging.getLogger(__name__)
Embedded = tuple[MicroBatch, NDArray[Any]]
MeasureDevice = Callable[[], dict[str, float]]


@dataclass
class Worker:
    """A worker on one device.

    Attributes:
        url: URL of the server.
        device: Label of the device, such as "cpu-0"; with the host's name it is the worker's name.
        device_kind: Name that like devices share, such as "NVIDIA L4, 22 GiB".
        torch_device: "cpu" or "cuda:0" (the process sees only its own device).
        settings: The farm's limits.
        stop: Set by a signal, a lost parent or a failed stage.
        facts: Measures the device for heartbeats.
        tick: Told the worker's state after each heartbeat, from the first one that the server got.
        devices: Number of devices that work as this one.
    """

    url: str
    device: str
    device_kind: str
    torch_device: str
    settings: Settings
    stop: threading.Event
    facts: MeasureDevice
    tick: Callable[[str], object] = lambda _state: None
    devices: int = 1
    name: str = field(init=False)
    failure: BaseException | None = field(init=False, default=None)
    superseded: bool = field(init=False, default=False)
    _current: MicroBatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.name = name_worker(self.device)
        self.incarnation = f"{time.time_ns():020d}-{os.getpid()}"
        self.client = connect(self.url)  # its pool gives each thread a connection of its own
        farm = FarmClient(self.client)
        self.holdings = Holdings()
        settings, stop = self.settings, self.stop
        self.watchdog = Watchdog(settings)
        timings = Timings()
        self.models = ModelStore(
            farm, self.name, self.torch_device, settings, self.watchdog, timings.warm_up,
            self._start,
        )  # fmt: skip
        self.engines = JobEngines(farm, self.name, self.models)
        lane = Lane(self.client, settings)
        self.lane = LaneServer(
            lane, self.name, self.models, settings, stop, self._wake, timings.tokens_within
        )
        is_idle = partial(self.holdings.wait_empty, 0)
        self.lane_loader = LaneLoader(
            farm, lane, self.name, self.models, settings, stop, is_idle, self.lane.hear
        )
        self.models.room.in_use = self._engines_in_use
        budgets = Budgets(farm, self.device_kind, settings.batch_tokens_max)
        self.embedder = Embedder(
            budgets, self.models.open_reference, timings, self.watchdog, self.lane, self._progress
        )
        self.canaries = CanaryKeeper()
        self.cache = TextCache.open(settings)
        self.committer = Committer(
            farm, self.name, self.holdings, settings, stop, self.incarnation, self.device_kind,
            self.devices, self.engines.agree_again, self.engines.refuse,
        )  # fmt: skip
        self.fetcher = Fetcher(
            farm, self.name, self.holdings, self.engines, settings, stop, self.committer.rate,
            self.lane_loader.look,
        )  # fmt: skip
        # None wakes an idle device for a request.
        self.ready: queue.Queue[MicroBatch | None] = queue.Queue(maxsize=1)
        self.done: queue.Queue[Embedded | None] = queue.Queue(maxsize=1)
        self._next = NextLease()
        self._ended = threading.Event()

    def run(self) -> None:
        """Work until `stop` is set, then finish the current micro-batch and hand the rest back.

        A model that is being loaded then, which nothing can interrupt, is left behind in a daemon
        thread that leases nothing any more.

        Raises:
            BaseException: Whatever made a stage fail first.
        """
        fetching = self._start("fetch", self._fetch)
        committing = self._start("commit", self._commit)
        listening = self._start("listen", self.lane.listen)
        answering = self._start("answer", self.lane.send)
        beating = self._start("beat", self._beat)
        ending = self._start("end", self._end_waits)
        watching = self._start("watch", lambda: self.watchdog.run(self._ended, self._give_up))
        self._guard(lambda: self._forward(committing))
        self.stop.set()
        self._offer(self.done, None, committing.is_alive)
        self._offer(self.lane.done, None, answering.is_alive)
        for stage in (committing, answering, listening, ending):
            stage.join()
        fetching.join(FETCH_SECONDS_MAX)
        self._ended.set()
        self.committer.measured.set()  # the thread that beats may wait for either
        beating.join()
        watching.join()
        self._guard(self._leave)
        self.client.close()
        if self.failure is not None:
            raise self.failure

    def _start(self, name: str, stage: Callable[[], None]) -> threading.Thread:
        return start_thread(name, lambda: self._guard(stage))

    def _guard(self, stage: Callable[[], None]) -> None:
        """Run a stage; its failure stops the worker."""
        try:
            stage()
        except BaseException as error:  # noqa: BLE001 # `run` raises it again
            self.failure = self.failure or error
            self.stop.set()

    # The stages.

    def _fetch(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self.stop.is_set():
            try:
                self.fetcher.look()
                if not self._next.wait(QUEUE_SECONDS):
                    continue
                batch = self.fetcher.fetch()
                pause = FIRST_PAUSE_SECONDS
            except UNAVAILABLE as error:
                log.warning("server away, trying again: %s", error)
                self.fetcher.recover()
                self.stop.wait(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            if batch is not None:
                self.cache.look_up(batch, self.canaries.of(batch.engine))
                self._next.set(IN_HAND)
                self._offer(self.ready, batch, lambda: not self.stop.is_set())
            del batch  # as in `_forward`

    def _engines_in_use(self) -> set[str]:
        """Return the keys of the engines whose models may not go now."""
        turn = self.lane_loader.engines()
        return self.holdings.engines() | self.lane.engines() | turn

    def _offer(self, stage: "queue.Queue[T]", item: T, wanted: Callable[[], bool]) -> None:
        """Hand an item to the next stage, as long as there is one that may take it."""
        while wanted():
            try:
                stage.put(item, timeout=QUEUE_SECONDS)
            except queue.Full:
                continue
            return

    def _wake(self) -> None:
        """Have an idle device look at the lane; one that is at work does so by itself."""
        with contextlib.suppress(queue.Full):
            self.ready.put_nowait(None)

    def _end_waits(self) -> None:
        """Have stages that wait for work look for a stop as soon as there is one."""
        self.stop.wait()
        self._wake()
        self.fetcher.wake()

    def _serve(self) -> None:
        """Answer requests until there is other work."""
        self.lane.gather()
        while self.embedder.serve() and self.ready.empty():
            pass

    def _forward(self, committing: threading.Thread) -> None:
        jobs, ended, lane_before = set[str](), 0.0, 0.0
        while not self.stop.is_set():
            try:
                batch = self.ready.get(timeout=QUEUE_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                self._serve()
                continue
            idle_since = batch.fetch_began if jobs.isdisjoint(batch.jobs) else ended
            batch.begin_forward(idle_since, self.embedder.lane_seconds - lane_before)
            self._current = batch
            self._next.set(time_to_lease(batch, 1.0, self.committer.tokens_per_second))
            with batch.trying():
                self.canaries.attach(batch, self.watchdog)
                self.cache.look_up(batch, batch.canaries)
                vectors = self.embedder.embed(batch)
                self.canaries.check(batch, self.watchdog)
            self._next.want(0.0)
            self._current = None
            jobs, ended = batch.jobs, time.monotonic()
            lane_before = self.embedder.lane_seconds
            self._offer(self.done, (batch, vectors), committing.is_alive)
            del batch, vectors  # while we wait, their memory and model may be wanted

    def _progress(self, batch: MicroBatch, left: float) -> None:
        """Correct the time of the next lease while the share `left` of a micro-batch is to do."""
        self._next.want(time_to_lease(batch, left, self.committer.tokens_per_second))

    def _commit(self) -> None:
        while (item := self.done.get()) is not None:
            try:
                self.committer.commit(*item)
                self.cache.keep(item[0])
                self.models.tally.count(item[0].spec.model, texts_full=item[0].texts_full)
            except UNAVAILABLE as error:
                if not self.stop.is_set():
                    raise
                log.warning("results not committed, server away; others will: %s", error)
            del item

    def _beat(self) -> None:
        """Renew leases and say that we live, until the stages have ended."""
        farm = FarmClient(self.client)
        renew_at, beaten = 0.0, False
        while not self._ended.is_set():
            # The first speed is told at once: producers wait for it, to size blocks.
            news = self._ended if self.committer.measured.is_set() else self.committer.measured
            try:
                if lose_ended(farm, self.holdings) or time.monotonic() >= renew_at:
                    renew(farm, self.name, self.holdings)
                    renew_at = time.monotonic() + self.settings.lease_seconds / 3
                alive = farm.beat(self._heartbeat(), self.settings.heartbeat_ttl_seconds)
                if not (alive or self.superseded):
                    log.error("another process works as %s now: rename or stop one", self.name)
                    self.superseded = True
                    self.stop.set()
                beaten = True
            except UNAVAILABLE as error:
                log.warning("no heartbeat, server away: %s", error)
            if beaten:
                self.tick(self._state(self._current))
            news.wait(self.settings.heartbeat_seconds)

    def _give_up(self, hung: Watched) -> None:
        """End this process, in which something hangs: another one can go on.

        What hangs was tried; if it cannot be tried again, that is settled while it is known why.
        """
        reason = f"{hung.what} did not finish within {hung.limit():.0f} s"
        try:
            log.critical("%s; giving up %d blocks with this process", reason, len(hung.leases))
            self.stop.set()
            self.fetcher.tries.conclude(hung.leases, reason)
            hand_back(FarmClient(self.client), self.name, self.holdings)
            hung.hung(reason)
        except Exception:
            log.exception("leases not handed back")
        finally:
            os._exit(HUNG_STATUS)

    def _heartbeat(self) -> Heartbeat:
        current, total = self._current, self.committer.total
        # Chunks before what is held: what counts as done is held no more.
        lane_seconds, chunks_done = self.embedder.lane_seconds, total.chunks
        model, rate = self.models.resident.last, self.committer.tokens_per_second
        return Heartbeat(
            worker=self.name,
            incarnation=self.incarnation,
            host=host_name(),
            pid=os.getpid(),
            device=self.device,
            state=self._state(current),
            model="" if model is None else model.key,
            job="" if current is None else current.job,
            held_tokens=self.holdings.tokens,
            held_seconds=0.0 if current is None else time.monotonic() - current.forward_began,
            tokens_per_second=rate,
            tokens_done=total.real_tokens,
            chunks_done=chunks_done,
            load_seconds=0.0 if model is None else model.load_seconds,
            device_facts=self._facts(),
            where=total.seconds | ({"lane": lane_seconds} if lane_seconds else {}),
            lane=self.lane.tally | {"seconds": lane_seconds},
            refused=self.engines.refusals(),
            model_bytes=0 if model is None else model.bytes,
            trying_engines=self.models.trying_engines,
            restarts=restarts(),
            loading=self.models.loading,
            models=self.models.states(),
            yields_in_seconds=self.lane_loader.yields_in_seconds(self.holdings.tokens, rate),
            device_cost_per_hour=self.settings.device_cost_per_hour,
            devices=self.devices,
            kind=self.settings.device_kind or name_kind(self.device, self.device_kind),
        )

    def _facts(self) -> dict[str, float]:
        """Return what the device's driver says; the watchdog watches, since it may never answer."""
        with self.watchdog.watch("the device's driver", lambda: self.settings.hang_seconds):
            return self.facts()

    def _state(self, current: MicroBatch | None) -> str:
        if self.stop.is_set():
            return "draining"
        if current is not None:
            return "busy"
        return "loading" if self.models.loading else "idle"

    def _leave(self) -> None:
        """Release leases that were not begun; if the server is away, they expire by themselves."""
        if self.superseded:
            return  # name and leases are the other process's
        farm = FarmClient(self.client)
        try:
            farm.leave(self.name)
            if isinstance(self.failure, ComputesWrongly):
                note = str(self.failure)
                farm.timeline.add(FarmEvent(kind="computes wrongly", worker=self.name, note=note))
            self.models.leave()
            hand_back(farm, self.name, self.holdings)
        except UNAVAILABLE as error:
            log.warning("leases not handed back: %s", error)
