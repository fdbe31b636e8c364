"""Tests of what a service manager is told: ready, alive while the loop runs, stopping."""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from rq import Worker

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.systemd_notify import ALIVE_FILE, Notifier
from embedfarm.workers.watchdog import HUNG_STATUS
from tests.farm.harness import COMMAND
from tests.farm.service import Service
from tests.support import LiveServer, free_port

WATCHDOG_SECONDS = 2.0
ALIVE_SECONDS = 10.0  # what a loaded machine may take for what is done every second
NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", ALIVE_FILE)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., socket.socket]:
    """Return a function that makes a socket, and asks this process to speak to it."""

    def listen(address: str, **asked: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(address.replace("@", "\0"))
        listener.setblocking(False)
        for name, value in {"NOTIFY_SOCKET": address, **asked}.items():
            monkeypatch.setenv(name, value)
        return listener

    return listen


@pytest.mark.parametrize("abstract", [True, False])
def test_words_arrive(manager: Callable[..., socket.socket], *, abstract: bool) -> None:
    """READY is sent once, STATUS when it is news, and STOPPING once."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"@{folder}" if abstract else f"{folder}/socket"
        with manager(address, WATCHDOG_USEC="3600000000") as listener:
            notifier = Notifier()
            assert not any(name in os.environ for name in NAMES)
            notifier.tick("idle")
            notifier.tick("idle")
            notifier.tick("busy")
            notifier.stop()
            notifier.stop()
            heard = [listener.recv(4096) for _ in range(3)]
            assert heard == [
                b"READY=1\nSTATUS=idle\nWATCHDOG=1",
                b"STATUS=busy",
                b"STOPPING=1\nSTATUS=stopping",
            ]
            with pytest.raises(BlockingIOError):
                listener.recv(4096)


def test_another_ones_watchdog_is_not_fed(manager: Callable[..., socket.socket]) -> None:
    """A process that inherited another one's watchdog sends no WATCHDOG."""
    asked = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    with manager("@embedfarm-test-other", **asked) as listener:
        Notifier().tick("idle")
        assert listener.recv(4096) == b"READY=1\nSTATUS=idle"


def test_nobody_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A role goes on when its manager does not listen, and warns of it once."""
    Notifier().tick("idle")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    with caplog.at_level(logging.WARNING):
        Notifier().tick("idle")
    assert len(caplog.messages) == 1


def test_a_file_tells_probes_that_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an earlier process left is removed, and the file is there from the first round on."""
    file = tmp_path / "alive"
    file.touch()
    monkeypatch.setenv(ALIVE_FILE, str(file))
    notifier = Notifier()
    assert not file.exists()
    assert ALIVE_FILE not in os.environ
    notifier.tick("idle")
    assert file.exists()


def test_a_full_disk_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A role goes on when it cannot touch the file, and warns of it once in a while."""
    monkeypatch.setenv(ALIVE_FILE, str(tmp_path / "nowhere" / "alive"))
    notifier = Notifier()
    with caplog.at_level(logging.WARNING):
        notifier.tick("idle")
        notifier.tick("idle")
    assert len(caplog.messages) == 1


def listens(port: int) -> bool:
    """Tell whether somebody listens at a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_every_role_says_how_it_is(server: LiveServer, client: redis.Redis, tmp_path: Path) -> None:
    """Every role says when it is ready, that it is alive, and at SIGTERM that it stops."""
    farm, port, own_port = FarmClient(client), free_port(), free_port()
    alone = [sys.executable, "-m", "embedfarm.workers.main", "--device", "cpu-9"]
    roles: dict[str, tuple[list[str], Callable[[], object]]] = {
        "worker": (alone, lambda: [b for b in farm.workers() if b.device == "cpu-9"]),
        "work": (
            [*COMMAND, "work", "--devices", "cpu", "--workers", "2"],
            lambda: {"cpu-0", "cpu-1"} <= {beat.device for beat in farm.workers()},
        ),
        "schedule": ([*COMMAND, "schedule"], farm.plans.has_scheduler),
        "serve": ([*COMMAND, "serve", "--port", str(port)], lambda: listens(port)),
        "ingest": ([*COMMAND, "ingest"], lambda: Worker.all(connection=client)),
        "up": (
            [*COMMAND, "up", "--devices", "cpu", "--workers", "1", "--port", str(own_port)],
            lambda: listens(own_port),
        ),
    }
    with ExitStack() as stack:
        services = {}
        for name, (command, _) in roles.items():
            alive = tmp_path / f"{name}.alive"
            service = Service(command, server, state_directory=tmp_path / name, alive_file=alive)
            service.watch(WATCHDOG_SECONDS)
            services[name] = stack.enter_context(service)
        for name, service in services.items():
            assert service.hears("READY=1", 60), name
            assert (tmp_path / f"{name}.alive").exists(), name
            assert roles[name][1](), name
        for name, service in services.items():
            assert all(service.hears("WATCHDOG=1", ALIVE_SECONDS) for _ in range(2)), name
            while service.hears("WATCHDOG=1", 0.1):
                pass  # the system drops what finds too much before it
            assert "STOPPING=1" not in service.said
            service.ask_to_stop()
        for name, service in services.items():
            assert service.hears("STOPPING=1", 30), name
            assert service.wait() == 0, name
            assert service.said.count("READY=1") == 1, name


def test_a_loop_that_hangs_is_silent(server: LiveServer, tmp_path: Path) -> None:
    """A worker whose device's driver hangs stops its WATCHDOG, and then ends itself."""
    stuck = tmp_path / "stuck"
    command = [sys.executable, "-m", "tests.poison_worker", "--device", "cpu-0"]
    settings = {"test_stuck": stuck, "heartbeat_seconds": 0.1, "hang_seconds": 6}
    service = Service(command, server, **settings)
    service.watch(WATCHDOG_SECONDS)
    with service:
        assert service.hears("READY=1", 30)
        assert service.hears("WATCHDOG=1", ALIVE_SECONDS)
        stuck.touch()
        while service.hears("WATCHDOG=1", 1.5 * WATCHDOG_SECONDS):
            assert service.said.count("WATCHDOG=1") < 10
        assert service.wait() == HUNG_STATUS
