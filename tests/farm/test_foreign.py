"""Tests that every role goes on beside damaged or foreign records on the server."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest
import redis
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.cli.inspection import examine_records
from embedfarm.collector.manifest import OutputError
from embedfarm.contract import wire
from embedfarm.contract.encoding import RecordError
from embedfarm.contract.farm_client import FarmClient, engine_key
from embedfarm.contract.lane import Lane, LaneError
from embedfarm.contract.records import Plan
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.producer.feed import NOTE
from embedfarm.scheduler import loop
from embedfarm.watch.advice_reader import read_advice
from embedfarm.watch.overview import read_page
from embedfarm.watch.view import FarmReader
from embedfarm.workers import fetch
from embedfarm.workers.fetch import Fetcher
from tests.contract.little_job import (
    CHUNKS,
    SPEC,
    heartbeat,
    make_job,
    push,
    run_everything,
)
from tests.farm.stations import KEY, Stations
from tests.support import LiveServer
from tests.web.conftest import client_of

SETTINGS: Final = Settings(lease_seconds=3600, plan_ttl_seconds=0.1, lane_lease_seconds=0.05)
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
        names = ("done", "sample", "event", "block", "id", "piece", "engine", "index", "count")
        for entry in (dict.fromkeys(names, junk), {"nothing": b"known"}):
            client.xadd(key, cast("Any", entry))


class Reader(NamedTuple):
    """A read of the server, and the errors that its caller deals with.

    Attributes:
        name: Its name in messages.
        read: Does the read.
        may: The errors that it may raise.
    """

    name: str
    read: Callable[[], object]
    may: tuple[type[Exception], ...] = ()


def readers_of(client: redis.Redis) -> Iterator[Reader]:
    """Yield all reads of commands and pages."""
    farm, lane = FarmClient(client), Lane(client, SETTINGS)
    yield Reader("workers", farm.workers)
    yield Reader("plan", lambda: farm.plans.plan("one"))
    yield Reader("policy", farm.plans.policy)
    yield Reader("decisions", lambda: farm.plans.decisions(9))
    yield Reader("stats", farm.plans.scheduler_stats)
    yield Reader("history", farm.statistics.history)
    yield Reader("events", lambda: farm.statistics.events("0", 0.001))
    yield Reader("batches", lambda: farm.statistics.recent_batches(60))
    yield Reader("samples", lambda: farm.statistics.samples(60))
    yield Reader("timeline", lambda: farm.timeline.newest(99))
    yield Reader("processes", farm.logs.processes)
    yield Reader("log", lambda: farm.logs.tail("one", 99))
    yield Reader("statuses", farm.statuses)
    yield Reader("admit", lambda: farm.admit("new", 99))
    yield Reader("budget", lambda: farm.statistics.budget("cpu", "null:2"))
    yield Reader("page", lambda: read_page(farm, "", 50))
    yield Reader("view", FarmReader(farm).read)
    yield Reader("advice", lambda: read_advice(farm, SETTINGS))
    yield Reader("doctor", lambda: dict(examine_records(farm)))
    for name in ("little", "other"):
        job = farm.job(name)
        yield Reader("status", job.status, (JobGone,))
        # By `Models`, `Observer`, `embedfarm.web.http.problems` and `plain_errors`.
        yield Reader("spec", job.spec, (RecordError,))
        yield Reader("starts", job.results.starts)
        yield Reader("failures", partial(job.results.failures, 99))
        yield Reader("accounts", partial(farm.reports.accounts, name))
        yield Reader("refusals", partial(farm.reports.refusals, name))
        # By `Submitter` and `plain_errors`.
        yield Reader("recipe", partial(farm.reports.tokenisation, name), (RecordError,))
        yield Reader("fingerprint", partial(farm.reports.fingerprint, name))
    yield Reader("wakeups", lambda: lane.wakeups("0", 0.001))
    yield Reader("unloaded", lambda: lane.unloaded(engine_key(SPEC)))
    yield Reader("ask", lambda: lane.ask(SPEC, ["a"], 0.01), (LaneError,))  # nobody answers


def prepare(stations: Stations) -> None:
    """Write every kind of key, and what roles keep for themselves."""
    client, farm = stations.client, stations.farm
    job = run_everything(client)
    client.hdel(job.keys.meta, "fingerprint")
    client.delete(wire.SCHEDULER, wire.INGEST)  # whose places ours take
    stations.enqueue()
    client.delete(wire.INGEST)
    fence = farm.plans.elect("another", 60)
    farm.plans.publish([Plan(worker=stations.worker.name, fence=fence, shares=[])], fence, 60)
    client.delete(wire.SCHEDULER)
    assert stations.answer("k") == "{}"
    stations.secret = stations.sessions.begin(KEY)
    assert stations.find_session() == KEY


def roles_of(stations: Stations, key: str) -> Iterator[Reader]:
    """Yield the work of each role, which must go on with what is not spoiled."""
    healthy = FarmClient(stations.client).job("healthy")

    def decide() -> None:
        stations.work()  # so that there is somebody to plan for
        make_job(stations.client, 1, healthy.id)
        stations.farm.admit(healthy.id, 99)
        stations.decide()
        assert stations.plans(healthy.id)

    def work() -> None:
        assert stations.work_until(lambda: healthy.status().chunks_done == CHUNKS)
        assert stations.ask(SPEC, "fresh")

    def answer() -> None:
        kept = key.startswith(wire.answer_key(""))
        said = stations.answer("k")
        assert said == "{}" or (kept and f"{key} cannot be read" in said)
        assert stations.answer("another") == "{}"

    def find_session() -> None:
        assert stations.find_session() in {KEY, None}
        assert stations.sessions.find(stations.sessions.begin(KEY)) == KEY

    yield Reader("scheduler", decide)
    yield Reader("worker", work)
    yield Reader("ingest", stations.enqueue)
    yield Reader("requests", answer)
    yield Reader("sessions", find_session)
    # A result of another version ends its own command, which says so.
    yield Reader("collector", partial(stations.collect, "little", (2, 4, 6)), (OutputError,))
    yield Reader("collector", partial(stations.collect, healthy.id, (0,)))


@pytest.mark.parametrize("name", JUNK)
def test_every_role_goes_on(
    server: LiveServer,
    client: redis.Redis,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Roles and reads go on when one key at a time holds something else."""
    monkeypatch.setattr(Fetcher, "_wait", lambda *_: None)  # for work: there is none
    monkeypatch.setattr(fetch, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(loop, "DECISION_SECONDS_MIN", 0.0)
    monkeypatch.setattr("gc.collect", lambda *_, **__: 0)  # which takes most of the time here
    stations = Stations(server, client, SETTINGS, tmp_path / "out")
    prepare(stations)
    stations.end()
    keys = sorted(client.scan_iter())
    whole = {key: cast("bytes", client.dump(key)) for key in keys}
    failures = []
    for key in keys:
        spoil(client, key, JUNK[name])
        stations.begin()
        for reader in (*roles_of(stations, key.decode()), *readers_of(client)):
            try:
                reader.read()
            except reader.may:
                continue
            except Exception as error:  # noqa: BLE001 # all of them are told at once
                failures.append(f"{key.decode()}: {reader.name}: {error!r}")
        stations.end()
        client.flushall()
        for each, data in whole.items():
            client.restore(each, 0, data)
    assert not failures, "\n".join(failures)


def test_doctor_names_what_is_left_out(client: redis.Redis) -> None:
    """`doctor` names records of another version by their place, with what to do."""
    farm = FarmClient(client)
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


@pytest.mark.parametrize("name", JUNK)
def test_a_job_whose_spec_cannot_be_read_can_be_ended(
    server: LiveServer, client: redis.Redis, name: str
) -> None:
    """A job with an unreadable spec can be shown and ended; what needs the spec says why not."""
    job = make_job(client, 1)
    FarmClient(client).admit(job.id, 9)
    job.note(NOTE, 1)
    client.hset(job.keys.meta, "spec", JUNK[name])
    order = {"start": 2, "texts": ["more"]}
    with client_of(server) as web:
        for path in ("", "/errors", "/results"):
            assert web.get(f"/v1/jobs/{job.id}{path}").status_code < 300
        fed = web.post(f"/v1/jobs/{job.id}/texts", json=order)
        assert (fed.status_code, "JobSpec" in fed.json()["detail"]) == (409, True)
        assert web.get(f"/jobs/{job.id}").status_code == 200
    for words in ("show", "pause", "resume", "set --priority high", "cancel", "rm"):
        verb, *options = words.split()
        command = ["jobs", verb, job.id, *options, "--redis", server.url]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, f"{words}: {done.output} {done.exception!r}"
    assert not client.exists(job.keys.meta)


def test_a_producer_is_told_of_an_entry_that_is_in_its_way(client: redis.Redis) -> None:
    """A push behind a foreign entry's ID fails with an error that blames another program."""
    job = make_job(client, 1)
    client.xadd(job.keys.blocks, {"text": "no block"})
    with pytest.raises(redis.ResponseError, match="another program has put an entry"):
        push(job, 2)
