"""Real servers for every test that needs one; a missing one fails, and never skips."""

import fcntl
import functools
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from embedfarm.contract.broker import connect
from embedfarm.contract.settings import Settings
from tests.support import SERVERS, LiveServer

# The time of an example depends on the machine most, so it has no deadline; a test has its own.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


gc.disable()  # until all modules are imported, which stay

SHARED: Final = re.compile(r'@pytest\.fixture\(scope="(module|session)"')


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
        # numpy's library would start a thread for each core in every program.
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        yield


class Scheduling(LoadScopeScheduling):  # type: ignore[misc] # it is not typed
    """What gives tests to processes: those of a module that share a fixture go to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _shares_fixture(path) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:  # noqa: ANN401 -- xdist's
    """Let a process make what a module's tests share once, and no other process make it."""
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)  # after they are shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first, and the tests that run alone last, so that nobody waits."""
    items.sort(key=lambda item: (_is_alone(item), not _is_long(item)))


def pytest_collection_finish() -> None:
    """Let the garbage collector forget what all the modules hold: each of its runs looks at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _is_long(item: pytest.Item) -> bool:
    """Tell whether a test has a time limit of its own, or many in a row share something."""
    limited = item.get_closest_marker("timeout") is not None
    return limited or _shares_fixture(item.nodeid.partition("::")[0])


@functools.cache
def _shares_fixture(module: str) -> bool:
    text = (Path(__file__).parents[1] / module).read_text(encoding="utf-8")
    return SHARED.search(text) is not None


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
