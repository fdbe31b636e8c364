"""Tests of the proxy itself: what each fault does, and to what."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embedfarm.contract.broker import closing_client
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from tests.faults.proxy import Fault, Proxy, Rain
from tests.faults.resp import frame_end, take_frames
from tests.support import LiveServer, wait_until


@pytest.fixture
def proxy(server: LiveServer) -> Iterator[Proxy]:
    """A proxy in front of the server of this test."""
    with Proxy(server.private.socket) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client behind the proxy."""
    with closing_client(proxy.url) as client:
        yield client


@pytest.fixture
def hasty(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client behind the proxy that gives up after a second."""
    with closing_client(proxy.url) as client:
        client.connection_pool.connection_kwargs["socket_timeout"] = 1.0
        yield client


@pytest.mark.parametrize("where", ["request", "reply"])
@pytest.mark.parametrize("what", ["drop", "reset", "stall"])
def test_what_is_lost(  # noqa: PLR0913, PLR0917 -- two of them are parameters
    proxy: Proxy,
    behind: redis.Redis,
    hasty: redis.Redis,
    client: redis.Redis,
    what: str,
    where: str,
) -> None:
    """A lost frame is an error to the client; the server has done it only if the reply was lost."""
    proxy.aim("INCRBY", Fault(what, where))  # type: ignore[arg-type] # of the lists above
    expected = redis.TimeoutError if what == "stall" else redis.ConnectionError
    caller = hasty if what == "stall" else behind
    caller.ping()
    with pytest.raises(expected):
        caller.incr("n")
    assert int(client.get("n") or 0) == (where == "reply")
    assert behind.incr("n") == 1 + (where == "reply")
    assert proxy.requests["INCRBY"] == 2
    assert proxy.replies["INCRBY"] == 1


def test_what_is_late(proxy: Proxy, behind: redis.Redis) -> None:
    """A delay and a trickle change nothing but the time."""
    value = bytes(range(256)) * 2000
    proxy.aim("GET", Fault("trickle"), Fault("delay", seconds=0.5))
    behind.set("k", value)
    assert behind.get("k") == value
    began = time.monotonic()
    assert behind.get("k") == value
    assert time.monotonic() - began >= 0.5
    proxy.aim("SET", Fault("trickle", "request"))
    behind.set("k", value[:100])
    assert behind.get("k") == value[:100]


def test_nothing_passes(proxy: Proxy, hasty: redis.Redis, client: redis.Redis) -> None:
    """A frozen proxy looks half-open, and frames arrive once it goes on."""
    hasty.ping()
    proxy.freeze()
    with pytest.raises(redis.TimeoutError):
        hasty.incr("n")
    assert client.get("n") is None
    proxy.thaw()
    wait_until(lambda: client.get("n") == b"1")


def test_scripts_and_pipelines(proxy: Proxy, behind: redis.Redis, client: redis.Redis) -> None:
    """A fault can be aimed at a script by its name, and at the last command of a pipeline."""
    job = Job(behind, "j")
    job.create(JobSpec(model="null:4"), 0)
    proxy.aim("close", Fault("drop"))
    with pytest.raises(redis.ConnectionError):
        job.close(0)
    assert job.status().chunk_count == 0
    pipe = behind.pipeline(transaction=False)
    for place in range(9):
        pipe.rpush("list", place)
    pipe.lpop("list")
    proxy.aim("LPOP", Fault("drop", "request"))
    with pytest.raises(redis.ConnectionError):
        pipe.execute()
    assert client.llen("list") == 9


def test_a_seed_is_a_plan(proxy: Proxy, behind: redis.Redis) -> None:
    """Requests meet the same faults under the same seed, and others under another."""
    behind.ping()
    places = []
    for seed in (7, 7, 8):
        proxy.rain = Rain(seed, 0.3, (Fault("delay", seconds=0), Fault("trickle")))
        proxy.hits.clear()
        for place in range(30):
            behind.lrange(str(place), 0, len(proxy.hits))
        places.append(list(proxy.hits))
    assert 2 < len(places[0]) < 20
    assert places[0] == places[1] != places[2]


def test_a_unix_socket_in_front(server: LiveServer, tmp_path: Path) -> None:
    """The proxy can listen at a unix socket; while the server is down it closes connections."""
    with (
        Proxy(server.private.socket, tmp_path / "s") as proxy,
        closing_client(proxy.url) as client,
    ):
        assert client.ping()
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        with pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.parametrize(
    "frame",
    [
        b"+OK\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\na\r\nb\r\n",
        b"*2\r\n$1\r\na\r\n*0\r\n",
        b"*-1\r\n",
        b"%1\r\n+a\r\n:1\r\n",
        b">2\r\n+a\r\n_\r\n",
    ],
)
def test_frames_end_where_they_end(frame: bytes) -> None:
    """A frame is whole at its last byte and not before; a second one does not change that."""
    assert [frame_end(frame[:cut]) for cut in range(len(frame))] == [-1] * len(frame)
    assert frame_end(frame + frame) == len(frame)
    buffer = bytearray(frame + frame + frame[:-1])
    assert take_frames(buffer) == [frame, frame]
    assert buffer == frame[:-1]
