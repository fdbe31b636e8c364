"""Real servers for every test that needs one; a missing one fails, and never skips."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from embedfarm.contract.broker import connect
from embedfarm.contract.settings import Settings
from tests.support import SERVERS, LiveServer

# The time of an example depends on the machine most, so it has no deadline; a test has its own.
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
    """Let programs that tests start keep models and jobs here, not where the user's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBEDFARM_ENGINE_CACHE", str(run_path / "engines"))
        patch.setenv("EMBEDFARM_JOBS_DIRECTORY", str(run_path / "jobs"))
        yield


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share something costly to one process, and all that run alone to one."""
    for item in items:
        if _is_alone(item):
            item.add_marker(pytest.mark.xdist_group("alone"))
        elif _shares_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


class _Order:
    """A plugin that orders the tests after they are shuffled."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put what takes long first, and the tests that run alone last, so that nobody waits."""
        items.sort(key=lambda item: (_is_alone(item), not _is_long(item)))


def pytest_collection_finish() -> None:
    """Let the garbage collector forget what all the modules hold: each of its runs looks at it."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let tests be ordered."""
    config.pluginmanager.register(_Order())


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _is_long(item: pytest.Item) -> bool:
    marks = ("xdist_group", "timeout")  # many tests in a row, or one with a time limit of its own
    return any(item.get_closest_marker(mark) for mark in marks)


def _shares_fixture(item: pytest.Item) -> bool:
    """Tell whether other tests of the module have a fixture of this test, too."""
    assert isinstance(item, pytest.Function)
    found = item._fixtureinfo.name2fixturedefs.values()
    module = item.path.relative_to(item.config.rootpath).as_posix()
    return any(each[-1].scope != "function" and each[-1].baseid == module for each in found)


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest, run_path: Path) -> Iterator[None]:
    """Let a test that is marked `alone` run beside no other test of this run.

    Such a test waits until no other one runs; it comes last, so that it keeps nobody waiting.
    """
    with (run_path / "room").open("w") as inside:
        fcntl.flock(inside, fcntl.LOCK_EX if _is_alone(request.node) else fcntl.LOCK_SH)
        yield


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of the test's own, of each kind; it can be killed and started again."""
    live = LiveServer(tmp_path / "server", request.param, Settings())
    try:
        live.start()
        yield live
    finally:
        live.stop()


@pytest.fixture
def client(server: LiveServer) -> Iterator[redis.Redis]:
    """A client of the test's server."""
    client = connect(server.url)
    yield client
    client.close()
