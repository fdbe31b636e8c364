"""Real servers for every test that needs one; a missing one fails, and never skips."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from embedfarm.broker import connect
from embedfarm.settings import Settings
from tests.support import SERVERS, LiveServer

# How long an example takes says more about the machine; every test has its own limit.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session", autouse=True)
def places(run_path: Path) -> Iterator[None]:
    """What tests start keeps converted models and jobs by HTTP here, not where the user's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBEDFARM_ENGINE_CACHE", str(run_path / "engines"))
        patch.setenv("EMBEDFARM_JOBS_DIRECTORY", str(run_path / "jobs"))
        yield


@pytest.hookimpl(trylast=True)  # after they are shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run beside no other come last, so that the others need not wait for them."""
    items.sort(key=_is_alone)


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest, run_path: Path) -> Iterator[None]:
    """A test that measures time and is marked `alone` runs beside no other of this run.

    It waits until no other is left, if need be: those that come last keep nobody waiting.
    """
    with (run_path / "room").open("w") as inside:
        fcntl.flock(inside, fcntl.LOCK_EX if _is_alone(request.node) else fcntl.LOCK_SH)
        yield


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of our own, for one test, of each kind; it can be killed and started again."""
    live = LiveServer(tmp_path / "server", request.param, Settings())
    try:
        live.start()
        yield live
    finally:
        live.stop()


@pytest.fixture
def client(server: LiveServer) -> Iterator[redis.Redis]:
    """A client of that server."""
    client = connect(server.url)
    yield client
    client.close()
