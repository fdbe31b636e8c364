"""The farm's processes in a simulated world, each started again when it ends."""

import os
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final

import numpy as np
import redis
from numpy.typing import NDArray
from rich.console import Console

from collector import files
from collector.manifest import Manifest
from embedfarm import broker
from embedfarm.cli import run
from embedfarm.cli.ending import tidy
from embedfarm.cli.progress import View
from embedfarm.cli.request import Request, check_finished
from embedfarm.cli.run import Interrupted, Place, Run
from embedfarm.records import Rows
from embedfarm.settings import Settings
from producer import submit
from producer.readers import corpus, read_corpus
from scheduler.loop import Scheduler
from tests.simulation import library, link
from tests.simulation.link import Host, SimulatedConnection
from tests.simulation.world import Killed, Process, World, current
from workers import worker
from workers.engines import Tokenised
from workers.engines.null import NullEngine
from workers.worker import Worker

URL: Final = "redis://simulated"
RESTART_SECONDS_MAX: Final = 1.0
SOCKET_SECONDS: Final = 2.5  # for a broken connection, of which nobody was told, to be noticed


@dataclass
class Role:
    """A program that is kept alive.

    Attributes:
        name: Of its process.
        program: Runs it until the event is set; True when there is nothing more to do.
        process: The one that runs now, None between two.
        starts: How often it was started.
        done: Whether it has nothing more to do.
    """

    world: World
    name: str
    program: Callable[[threading.Event], bool]
    report: Callable[["Role", BaseException], None]
    process: Process | None = None
    stop: library.Event = field(default_factory=library.Event)
    starts: int = 0
    done: bool = False

    def start(self) -> None:
        """Start it, unless it runs, or has nothing more to do."""
        if self.process is not None or self.done:
            return
        self.starts += 1
        self.stop = library.Event()
        process = self.process = Process(f"{self.name}#{self.starts}")
        process.clock_seconds = self.world.random.choice([0.0, 0.0, 0.0, -3600.0, 7.0])
        self.world.spawn(process, "main", lambda: self._main(process))

    def _main(self, process: Process) -> None:
        try:
            self.done = self.program(self.stop)  # type: ignore[arg-type] # a simulated event
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 # a process may end by anything
            self.report(self, error)
        self.world.call_at(self.world.now, lambda: self.kill(process))

    def kill(self, process: Process) -> None:
        """End a process, and start its successor a little later."""
        if process is not self.process:
            return
        self.process = None
        pause = self.world.random.uniform(0.05, RESTART_SECONDS_MAX)
        self.world.call_at(self.world.now + pause, self.start)
        self.world.kill(process)


@dataclass(frozen=True)
class Texts:
    """What is embedded, and what must come of it.

    Attributes:
        texts: All of them, in order.
        deadly: Those that kill or hang a worker that embeds them.
        shaky: Those that may kill it.
    """

    texts: list[str]
    deadly: frozenset[int]
    shaky: frozenset[int]

    def expected(self, dimensions: int) -> NDArray[np.float32]:
        """The vectors, shape (n, dimensions); zero for deadly ones."""
        engine = NullEngine(dimensions, 0.0, {})
        tokenised = engine.tokenise(self.texts)
        vectors = _forward(engine, tokenised, np.arange(len(self.texts)))
        vectors[sorted(self.deadly)] = 0
        return vectors


def connect_to(host: Host) -> None:
    """Have all clients connect to a simulated server."""
    link.hosts[:] = [host]
    broker.SOCKET_SECONDS = SOCKET_SECONDS  # type: ignore[misc] # for this process

    def make_pool(url: str, **arguments: Any) -> redis.ConnectionPool:  # noqa: ANN401 # redis-py's
        _ = url
        return redis.ConnectionPool(connection_class=SimulatedConnection, **arguments)

    setattr(broker, "make_pool", make_pool)  # noqa: B010 # in this process alone


def run_worker(name: str, settings: Settings, stop: threading.Event) -> bool:
    """A worker, until it is told to stop."""
    Worker(URL, name, "simulated", "cpu", settings, stop, dict).run()
    return False


def run_scheduler(settings: Settings, stop: threading.Event) -> bool:
    """A scheduler, until it is told to stop."""
    Scheduler(URL, settings, stop).run()
    return False


def run_embed(request: Request, place: Place, stop: threading.Event) -> Manifest | None:
    """What `embedfarm embed` does; None when it was told to stop."""
    manifest = check_finished(request, place.out)
    if manifest is not None:
        tidy(place.out, manifest, place.settings)
        return manifest
    view = View(Console(file=StringIO(), quiet=True), lines=True)
    try:
        return Run(request, place, view, stop).embed()
    except Interrupted:
        return None


_forward: Final = NullEngine.forward


def guess_vectors(dimensions: int) -> None:
    """Have producers guess the size of vectors right: of guessed large ones, a block has one."""
    setattr(submit, "VECTOR_BYTES_GUESSED", 4 * dimensions)  # noqa: B010 # in this process alone


def read_slowly(rows: int, seconds: float) -> None:
    """Have corpora be read so many rows at a time, each of which takes so long."""
    setattr(corpus, "BATCH_ROWS_MAX", rows)  # noqa: B010 # in this process alone

    def read(*arguments: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        for batch in read_corpus(*arguments):
            current().park(seconds)
            yield batch

    setattr(run, "read_corpus", read)  # noqa: B010 # in this process alone


def sync_slowly(seconds: Callable[[], float]) -> None:
    """Have a file take so long to be on the disk; meanwhile its process may be killed."""

    def fsync(_descriptor: int) -> None:
        current().park(seconds())

    system = types.SimpleNamespace(**{**vars(os), "fsync": fsync})
    setattr(files, "os", system)  # noqa: B010 # in this process alone


def harmful_texts(harms: Mapping[str, Callable[[], None]]) -> None:
    """Have some texts do harm to the process that embeds them."""
    harmful = {zlib.crc32(text.encode()): harm for text, harm in harms.items()}

    def forward(
        engine: NullEngine, batch: Tokenised, rows: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        for feature in batch.features[rows].tolist():
            if feature in harmful:
                harmful[feature]()
        return _forward(engine, batch, rows)

    setattr(NullEngine, "forward", forward)  # noqa: B010 # in this process alone


def end_by(kill: Callable[[], None]) -> None:
    """Have a worker that gives itself up be killed."""
    system = types.SimpleNamespace(getpid=os.getpid, _exit=lambda _status: kill())
    setattr(worker, "os", system)  # noqa: B010 # in this process alone
