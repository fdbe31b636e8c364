"""Fixtures: schedulers on a real server, and packages that bring passes."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.scheduler.loop import Scheduler
from embedfarm.scheduler.policies import ENTRY_POINTS
from tests.scheduler.live import SETTINGS, Running, Start
from tests.support import LiveServer

Install = Callable[[str, str], None]


@pytest.fixture
def start(server: LiveServer) -> Iterator[Start]:
    """Return a function that starts schedulers on the server; all of them end with the test."""
    with contextlib.ExitStack() as running:

        def begin() -> Running:
            made = Running(Scheduler(server.url, SETTINGS, threading.Event()))
            running.callback(made.stop)
            return made

        yield begin


@pytest.fixture
def farm(client: redis.Redis) -> FarmClient:
    """Return the test's own handle on the farm."""
    return FarmClient(client)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package with one pass, from its name and source."""
    site = tmp_path / "site"

    def write(name: str, source: str) -> None:
        about = site / "own_passes-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-passes\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = own_passes:Own\n")
        (site / "own_passes.py").write_text(source)
        monkeypatch.syspath_prepend(site)

    yield write
    sys.modules.pop("own_passes", None)
