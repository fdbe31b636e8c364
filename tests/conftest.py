"""Real servers for every test that needs one; a missing one fails, and never skips."""

import contextlib
import faulthandler
import fcntl
import functools
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, Final

import pytest
import redis
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from embedfarm.contract.broker import connect
from embedfarm.contract.settings import Settings
from tests.farm.command_server import start_roles_in_copies
from tests.farm.harness import role
from tests.support import SERVERS, LiveServer

# The time of an example depends on the machine most, so it has no deadline; a test has its own.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


gc.disable()  # until all modules are imported, which stay

# Models as small as those of tests lose by more threads. Workers that tests start have as many as
# their devices: what these threads spin for, while they wait for one another, other tests lack.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A run syncs some hundred thousand files, and removes them: on a disk that is most of its time.
# Processes of the run, and programs that tests start, find the place by the variable as well.
MEMORY: Final = Path("/dev/shm")  # noqa: S108 # each run makes its own below
MEMORY_BYTES: Final = 8 << 30
if (
    "TMPDIR" not in os.environ
    and MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

TESTS: Final = Path(__file__).parent
FARMS: Final = {
    "benchmarks",
    "chaos",
    "farm",
    "faults",
    "test_crash.py",
    "test_kills.py",
    "test_wheel.py",
}
DIRECT: Final = {
    "contract",
    "test_collect.py",
    "test_commit.py",
    "test_fetch.py",
    "test_server.py",
    "test_submitter.py",
}
"""Tests of what speaks to a server itself, which run on each of `SERVERS`; others on the first."""
SHARED: Final = re.compile(r'@pytest\.fixture\(scope="(module|session)"|\bshared_farm\b')


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session", autouse=True)
def copies() -> None:
    """Let farms that tests have in their own process start workers and schedulers in copies."""
    start_roles_in_copies()


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of whole farms, by where they are."""
    if not FARMS.isdisjoint(item.path.relative_to(TESTS).parts):
        item.add_marker("farm")


@pytest.hookimpl(trylast=True)  # after they are shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes long first, and the tests that measure time last, so that nobody waits.

    Tests of what speaks to a server through others are left out on all servers but the first.
    """
    again = {item for item in items if _needs_one_server(item) and _server_of(item) != SERVERS[0]}
    config.hook.pytest_deselected(items=list(again))
    items[:] = [item for item in items if item not in again]
    items.sort(key=lambda item: (_measures_time(item), -_length(item)))


def pytest_collection_finish() -> None:
    """Let the garbage collector forget what all the modules hold: each of its runs looks at it."""
    gc.freeze()
    gc.enable()


def _needs_one_server(item: pytest.Item) -> bool:
    return DIRECT.isdisjoint(item.path.relative_to(TESTS).parts)


def _server_of(item: pytest.Item) -> str:
    """Return the kind of server that a test has by the fixture below, the first without one."""
    call = getattr(item, "callspec", None)
    return SERVERS[0] if call is None else str(call.params.get("server", SERVERS[0]))


class Measuring(IntEnum):
    """Whether a test measures time, in the order in which such tests run."""

    NOTHING = 0
    PACED = 1
    ALONE = 2


MODES: Final = {
    Measuring.NOTHING: (fcntl.LOCK_SH, fcntl.LOCK_EX),
    Measuring.PACED: (fcntl.LOCK_EX, fcntl.LOCK_SH),
    Measuring.ALONE: (fcntl.LOCK_EX, fcntl.LOCK_EX),
}
"""How the lock of ordinary tests is taken, and that of paced ones."""


def _measures_time(item: pytest.Item) -> Measuring:
    if item.get_closest_marker("alone") is not None:
        return Measuring.ALONE
    return Measuring.NOTHING if item.get_closest_marker("paced") is None else Measuring.PACED


def _length(item: pytest.Item) -> int:
    """Return how long a test may take: 2, 1 where it starts programs, 0.

    It is 2 with a time limit of its own, and where the tests of a module share something.
    """
    module = item.nodeid.partition("::")[0]
    if item.get_closest_marker("timeout") is not None or _shares_fixture(module):
        return 2
    return int(_starts_programs(module))


@functools.cache
def _starts_programs(module: str) -> bool:
    return "from tests.farm" in _text(module)


@functools.cache
def _shares_fixture(module: str) -> bool:
    return SHARED.search(_text(module)) is not None


def _text(module: str) -> str:
    return (TESTS.parent / module).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_timer_is_left() -> Iterator[None]:
    """Stop the timer that a worker in this process leaves on for the end of its own."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def locks(run_path: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """The locks of this run's processes: that of ordinary tests, and that of paced ones."""
    with (run_path / "ordinary").open("w") as ordinary, (run_path / "paced").open("w") as paced:
        yield ordinary, paced


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest, locks: tuple[IO[str], IO[str]]) -> Iterator[None]:
    """Let a test that measures time wait until no other test runs that would be in its way.

    Ordinary tests share one lock and paced ones the other, each while nobody has the other lock; a
    test that runs alone has both for itself. Who has no test to run has no lock, and who waits for
    one lock does not keep the other: so all go on, and those that measure time come last.
    """
    kind = _measures_time(request.node)
    first, second = MODES[kind]
    ordinary, paced = locks
    fcntl.flock(ordinary, first)
    while not _try_lock(paced, second):
        fcntl.flock(ordinary, fcntl.LOCK_UN)
        fcntl.flock(paced, second)
        fcntl.flock(paced, fcntl.LOCK_UN)
        fcntl.flock(ordinary, first)
    if kind != Measuring.ALONE:
        fcntl.flock(paced if kind == Measuring.NOTHING else ordinary, fcntl.LOCK_UN)
    yield
    fcntl.flock(paced, fcntl.LOCK_UN)
    fcntl.flock(ordinary, fcntl.LOCK_UN)


def _try_lock(file: IO[str], mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of the test's own, of each kind; it can be killed and started again."""
    live = LiveServer(tmp_path / "server", request.param, Settings())
    try:
        live.start()
        yield live
    finally:
        live.stop()


@pytest.fixture(scope="module")
def shared_farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Words for `embed` with a null model, on a farm of one worker that a module's tests share."""
    home = tmp_path_factory.mktemp("farm")
    live = LiveServer(home / "server", SERVERS[0], Settings())
    with contextlib.ExitStack() as stack:
        stack.callback(live.stop)
        live.start()
        stack.enter_context(role(live, home, "schedule"))
        stack.enter_context(role(live, home, "work", "--devices", "cpu", "--workers", "1"))
        yield "--model", "null:16", "--redis", live.url


@pytest.fixture
def client(server: LiveServer) -> Iterator[redis.Redis]:
    """A client of the test's server."""
    client = connect(server.url)
    yield client
    client.close()
