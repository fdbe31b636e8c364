"""What other programs leave on the server, of other versions or damaged: every role goes on."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import pytest
import redis

from embedfarm import wire
from embedfarm.cli.inspection import examine_records
from embedfarm.farm import Farm, engine_key
from embedfarm.lane import Lane, LaneError
from embedfarm.overview import read_page
from embedfarm.records import RecordError
from embedfarm.settings import Settings
from embedfarm.status import JobGone
from embedfarm.view import FarmReader
from scheduler import loop
from scheduler.loop import Scheduler
from tests.contract.little_job import SPEC, heartbeat, make_job, push, run_everything
from tests.support import LiveServer
from workers import fetch
from workers.fetch import Fetcher
from workers.leases import Holdings
from workers.models import Models
from workers.watchdog import Watchdog

SETTINGS: Final = Settings(lease_seconds=3600, plan_ttl_seconds=0.1)
JUNK: Final = {
    "newer": b"\x02\x93\x01\x02\x03",
    "damaged": b"\x01\x9f\xff\xc1",
    "huge": b"9" * 400,
    "words": b"something else",
}


def spoil(client: redis.Redis, key: bytes, junk: bytes) -> None:
    """Put something else into every part of a key that a program of its type may write."""
    kind = cast("bytes", client.type(key)).decode()
    if kind == "string":
        client.set(key, junk)
    elif kind == "hash":
        fields = [*cast("list[bytes]", client.hkeys(key)), b"\xff\xfe", b"account:w#1"]
        client.hset(key, mapping=dict.fromkeys(cast("list[str]", fields), junk))
    elif kind == "list":
        client.lpush(key, junk)
    elif kind == "zset":
        client.zadd(key, {junk: 1e18, b"\xff\xfe": 0})
    else:
        names = ("done", "sample", "block", "id", "piece", "engine", "index", "count")
        for entry in (dict.fromkeys(names, junk), {"nothing": b"known"}):
            client.xadd(key, cast("Any", entry))


def read_everything(client: redis.Redis) -> Iterator[Callable[[], object]]:
    """All that roles, commands and pages read; each may say that a job is gone, or unreadable."""
    farm, lane = Farm(client), Lane(client, SETTINGS)
    worker = Models(farm, "w", "cpu", SETTINGS, Watchdog(SETTINGS))
    fetcher = Fetcher(farm, "w", Holdings(), worker, SETTINGS, threading.Event())
    yield farm.workers
    yield lambda: farm.plan("one")
    yield farm.policy
    yield lambda: farm.decisions(9)
    yield farm.scheduler_stats
    yield farm.history
    yield lambda: farm.events("0", 0.001)
    yield lambda: farm.recent_batches(60)
    yield lambda: farm.samples(60)
    yield farm.statuses
    yield lambda: farm.admit("new", 99)
    yield lambda: farm.budget("cpu", "null:2")
    yield lambda: read_page(farm, "", 50)
    yield FarmReader(farm).read
    yield lambda: dict(examine_records(farm))
    for name in ("little", "other"):
        job = farm.job(name)
        yield from (job.status, job.spec, job.result_starts)
        yield partial(job.failures, 99)
        yield from (partial(read, name) for read in (farm.accounts, farm.refusals, farm.recipe))
        yield partial(farm.fingerprint, name)
    yield from (fetcher.fetch for _ in range(3))
    yield lambda: lane.unloaded(engine_key(SPEC))
    yield lambda: lane.oldest(engine_key(SPEC))
    yield lambda: lane.take(engine_key(SPEC), "w", 1 << 20)
    yield lambda: lane.bells("0", 0.001)
    yield lambda: lane.ask(SPEC, ["a"], 0.01)


def step(server: LiveServer) -> None:
    """A decision of a scheduler that has just begun; none of its passes fails."""
    scheduler = Scheduler(server.url, SETTINGS, threading.Event())
    scheduler._step()
    assert not {
        name for name in scheduler._dropped if name in {each.name for each in scheduler.passes}
    }
    scheduler.farm.client.close()


def reads(server: LiveServer, client: redis.Redis) -> Iterator[Callable[[], object]]:
    """All that is read, and a decision."""
    yield from read_everything(client)
    yield partial(step, server)


@pytest.mark.parametrize("name", JUNK)
def test_every_role_goes_on(
    server: LiveServer, client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key at a time holds something else: nobody fails for it, whatever it is."""
    monkeypatch.setattr(Fetcher, "_wait", lambda *_: None)  # for work: there is none
    monkeypatch.setattr(fetch, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(loop, "DECISION_SECONDS_MIN", 0.0)
    monkeypatch.setattr("gc.collect", lambda *_, **__: 0)  # which takes most of the time here
    job = run_everything(client)
    client.hdel(job.keys.meta, "fingerprint")
    client.delete(wire.SCHEDULER)
    keys = sorted(client.scan_iter())
    whole = {key: cast("bytes", client.dump(key)) for key in keys}
    failures = []
    for key in keys:
        spoil(client, key, JUNK[name])
        if key.decode() == wire.FENCE:
            client.delete(key)  # it is counted, not read
        for place, read in enumerate(reads(server, client)):
            try:
                read()
            except (JobGone, RecordError, LaneError):
                continue
            except Exception as error:  # noqa: BLE001 # all of them are told at once
                failures.append((key, place, repr(error)))
        client.flushall()
        for each, data in whole.items():
            client.restore(each, 0, data)
    assert not failures


def test_doctor_names_what_is_left_out(client: redis.Redis) -> None:
    """By its place on the server, with both versions and what to do about it."""
    farm = Farm(client)
    farm.beat(heartbeat("one"), 60)
    farm.beat(heartbeat("two"), 60)
    client.hset(wire.worker_key("two"), "heartbeat", JUNK["newer"])
    farm.job("newer").create(SPEC, 0)
    client.hset(wire.JobKeys("newer").meta, "spec", JUNK["newer"])
    says = "record of version 2, but this program reads version 1: update this program"
    assert examine_records(farm) == {
        wire.worker_key("two"): f"Heartbeat {says}",
        "job newer": f"JobSpec {says}",
    }
    assert [beat.worker for beat in farm.workers()] == ["one"]


def test_a_producer_is_told_of_an_entry_that_is_in_its_way(client: redis.Redis) -> None:
    """Behind the ID of a plain XADD no block fits any more: the error says whose fault that is."""
    job = make_job(client, 1)
    client.xadd(job.keys.blocks, {"text": "no block"})
    with pytest.raises(redis.ResponseError, match="another program has put an entry"):
        push(job, 2)
