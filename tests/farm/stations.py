"""Stations of a farm in the thread of a test, which says whose turn it is."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import redis
from fastapi import HTTPException

from embedfarm.collector.collect import Collector
from embedfarm.collector.output import Output
from embedfarm.contract import wire
from embedfarm.contract.entries import read_number
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.lane import Lane
from embedfarm.contract.records import LanePiece
from embedfarm.contract.settings import Recurring, Settings
from embedfarm.ingest.recurring import Timetable, identify
from embedfarm.scheduler.loop import Scheduler
from embedfarm.web.auth.keys import Key, Keyring, Scope
from embedfarm.web.auth.sessions import Sessions
from embedfarm.web.jobs.idempotency import answer_once
from embedfarm.web.services import Passes, Services
from embedfarm.workers.renewal import lose_ended, renew
from embedfarm.workers.worker import Worker
from tests.support import LiveServer

KEY: Final = Key("k", frozenset({Scope.ADMIN}), "0" * 64)
DAY_SECONDS: Final = 86_400
ROUNDS_MAX: Final = 20


@dataclass
class Stations:
    """Stations of a farm, one of each role; a method raises what its role's loop would raise.

    Attributes:
        settings: The settings of all roles.
        home: Directory of an output.
        secret: The secret of a session.
    """

    server: LiveServer
    client: redis.Redis
    settings: Settings
    home: Path
    secret: str = ""
    farm: FarmClient = field(init=False)

    def __post_init__(self) -> None:
        self.farm = FarmClient(self.client)
        self.settings = self.settings.model_copy(
            update={
                "redis_url": self.server.url,
                "recurring": [Recurring(cron="0 0 * * *", task="cleanup")],
            }
        )
        self.timetable = Timetable(self.client, self.settings)
        self.sessions = Sessions(self.client, Keyring([KEY]), 60)
        self.services = Services(
            self.client, self.settings, Passes((), (), lambda _: None), self.client
        )
        self.begin()

    def begin(self) -> None:
        """Make a worker and a scheduler, in place of those that are there."""
        settings, stop = self.settings, threading.Event()
        self.worker = Worker(self.server.url, "cpu-0", "a kind", "cpu", settings, stop, dict)
        self.scheduler = Scheduler(self.server.url, settings, stop)

    def end(self) -> None:
        """Close the connections of the worker and the scheduler."""
        self.worker.client.close()
        self.scheduler.farm.client.close()

    def work(self) -> None:
        """Do a round of what the worker's threads do."""
        worker = self.worker
        assert self.farm.beat(worker._heartbeat(), 60)
        renew(self.farm, worker.name, worker.holdings)
        lose_ended(self.farm, worker.holdings)
        batch = worker.fetcher.fetch()
        if batch is not None:
            worker.committer.commit(batch, worker.embedder.embed(batch))
        for key in worker.lane.lane.asked():
            worker.lane.wake_for(key)
        while worker.embedder.serve():
            pass
        worker.lane.done.put(None)
        worker.lane.send()

    def work_until(self, condition: Callable[[], object]) -> bool:
        """Do some rounds of the worker; return whether a condition holds then."""
        for _ in range(ROUNDS_MAX):
            if condition():
                return True
            self.work()
        return bool(condition())

    def decide(self) -> None:
        """Make the scheduler decide, and assert that no pass fails."""
        scheduler = self.scheduler
        scheduler._step()
        assert scheduler.fence
        assert not scheduler._dropped.keys() & {each.name for each in scheduler.passes}

    def plans(self, job: str) -> bool:
        """Tell whether the last decision gave the worker some of a job."""
        shares = self.scheduler._shares.get(self.worker.name, ())
        return any(share.job == job for share in shares)

    def collect(self, job: str, starts: Iterable[int]) -> None:
        """Look for results as a collector does; a damaged one is made anew."""
        output = Output(self.home, {}, sink="npy", part_bytes_max=1 << 20)
        with contextlib.closing(output):
            for start in starts:
                stop = threading.Event()
                collector = Collector(self.farm.job(job), output, self.settings, stop)
                if collector._look(start) is None and collector._damaged is not None:
                    collector._lose(*collector._damaged)

    def enqueue(self) -> None:
        """Do what the ingest role does about once a second, and check the time that it notes."""
        self.timetable.tick(time.time())
        for entry in self.settings.recurring:
            kept = cast("bytes", self.client.get(wire.recurring_key(identify(entry))))
            assert time.time() - DAY_SECONDS <= read_number(kept, 0) <= time.time()

    def find_session(self) -> Key | None:
        """Return the key of the session, None if there is none."""
        return self.sessions.find(self.secret)

    def answer(self, key: str) -> str:
        """Answer a request under an Idempotency-Key; return the answer, or why there is none."""
        try:
            return answer_once(self.services, KEY, key, "request", lambda _: "{}")[1]
        except HTTPException as error:
            return str(error.detail)

    def ask(self, spec: JobSpec, name: str) -> bool:
        """Send a request for vectors; return whether the worker answers it."""
        piece = LanePiece(id=name, spec=spec, place=0, texts=["a"], timeout_seconds=60)
        Lane(self.client, self.settings).send([piece])
        return self.work_until(lambda: self.client.exists(wire.reply_key(name)))
