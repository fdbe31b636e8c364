"""The farm's processes in a simulated world, each started again when it ends."""

import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from numpy.typing import NDArray

from embedfarm.collector.manifest import Manifest
from embedfarm.contract import broker
from embedfarm.contract.records import Rows
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.producer import submitter
from embedfarm.readers import corpus, read_corpus
from embedfarm.runs import run, sending
from embedfarm.runs.completion import complete
from embedfarm.runs.ending import discard_output
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request
from embedfarm.runs.run_failures import Interrupted
from embedfarm.scheduler.loop import Scheduler
from embedfarm.workers import worker
from embedfarm.workers.canary_keeper import CanaryKeeper
from embedfarm.workers.engines.engine import Engine, Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.worker import Worker
from tests.simulation import library, link
from tests.simulation.link import Host, SimulatedConnection, SimulatedPool
from tests.simulation.shelf import shelves
from tests.simulation.world import Killed, Process, World, current

URL: Final = "redis://simulated"
RESTART_SECONDS_MAX: Final = 1.0
PIDS_MAX: Final = 32768
SOCKET_SECONDS: Final = 2.5  # for a broken connection, of which nobody was told, to be noticed


class Asked(library.Event):
    """An event that tells a program to stop, and knows who set it.

    Attributes:
        by_others: Whether somebody outside of the program has set it.
    """

    by_others = False

    def set(self) -> None:
        """Set the event, and note whether no task of a program did so."""
        self.by_others = self.by_others or current().task is None
        super().set()


@dataclass
class Role:
    """A program that is kept alive.

    Attributes:
        name: Prefix of the names of its processes.
        program: Runs it until the event is set; returns True when there is nothing more to do.
        process: The process that runs now, None between two.
        starts: How often it was started.
        done: Whether it has nothing more to do.
        days_seconds: Time that went by while nothing was running, for the clocks of its host.
    """

    world: World
    name: str
    program: Callable[[threading.Event], bool]
    report: Callable[["Role", BaseException], None]
    process: Process | None = None
    stop: Asked = field(default_factory=Asked)
    starts: int = 0
    done: bool = False
    days_seconds: float = 0.0

    def start(self) -> None:
        """Start a process, unless one runs or the program has nothing more to do."""
        if self.process is not None or self.done:
            return
        self.starts += 1
        self.stop = Asked()
        process = self.process = Process(f"{self.name}#{self.starts}")
        wrong_seconds = self.world.random.choice([0.0, 0.0, 0.0, -3600.0, 7.0])
        process.clock_seconds = self.days_seconds + wrong_seconds
        self.world.spawn(process, "main", lambda: self._main(process))

    def _main(self, process: Process) -> None:
        try:
            self.done = self.program(self.stop)  # type: ignore[arg-type] # a simulated event
        except Killed:
            raise
        except BaseException as error:  # a process may end by anything
            if process.dead:  # whatever `Killed` has become on its way out
                raise
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


def connect_to(host: Host) -> None:
    """Connect all clients to a simulated server."""
    link.hosts[:] = [host]
    broker.SOCKET_SECONDS = SOCKET_SECONDS  # type: ignore[misc] # for this process

    def make_pool(url: str, **arguments: Any) -> redis.ConnectionPool:  # noqa: ANN401 # redis-py's
        _ = url
        return SimulatedPool(connection_class=SimulatedConnection, **arguments)

    setattr(broker, "make_pool", make_pool)  # noqa: B010 # in this process alone
    link.measure_nothing()


def run_worker(name: str, settings: Settings, stop: threading.Event) -> bool:
    """Run a worker until it is told to stop."""
    Worker(URL, name, "simulated", "cpu", settings, stop, dict).run()
    return False


def run_scheduler(settings: Settings, stop: threading.Event) -> bool:
    """Run a scheduler until it is told to stop."""
    Scheduler(URL, settings, stop).run()
    return False


def _show_nobody(*_news: object) -> None:
    """Show nobody how a run goes."""


def run_embed(  # noqa: PLR0913 # as `complete` has them
    request: Request,
    place: Place,
    stop: threading.Event,
    terms: Terms,
    reuse: Sequence[Path] = (),
    *,
    deduplicate: bool = False,
) -> Manifest | None:
    """Run what `embedfarm embed` does; return None when it was told to stop."""
    try:
        return complete(
            request, place, stop, nullcontext(_show_nobody), terms, reuse=reuse,
            deduplicate=deduplicate,
        ).manifest  # fmt: skip
    except Interrupted:
        if not getattr(stop, "by_others", True):
            raise  # by nobody
        return None


_forward: Final = NullEngine.forward
_make: Final = CanaryKeeper.make


def note_canaries() -> None:
    """Note which devices have made canaries; one that makes them anew has loaded sound weights."""

    def make(keeper: CanaryKeeper, engine: Engine) -> None:
        process = current().process
        process.device = ""
        _make(keeper, engine)
        process.device = "sound"

    setattr(CanaryKeeper, "make", make)  # noqa: B010 # in this process alone


def guess_vectors(dimensions: int) -> None:
    """Make producers guess the size of vectors right: of guessed large ones, a block has one."""
    setattr(submitter, "VECTOR_BYTES_GUESSED", 4 * dimensions)  # noqa: B010 # in this process alone


def read_slowly(rows: int, seconds: float, on_read: Callable[[Sequence[str], bool], None]) -> None:
    """Make corpora be read `rows` at a time, with a wait of `seconds` before each batch.

    `on_read` is called with the sources of each reading, and True at its begin, False at its end.
    """
    setattr(corpus, "BATCH_ROWS_MAX", rows)  # noqa: B010 # in this process alone

    def read(*arguments: Any, **options: Any) -> Iterator[Rows]:  # noqa: ANN401 # the function's
        on_read(arguments[0], True)
        for batch in read_corpus(*arguments, **options):
            current().park(seconds)
            yield batch
        on_read(arguments[0], False)

    setattr(sending, "read_corpus", read)  # noqa: B010 # in this process alone


def note_discards(on_discard: Callable[[Path], None]) -> None:
    """Call `on_discard` before a command discards an output that has nothing in it."""

    def discard(out: Path) -> None:
        on_discard(out)
        discard_output(out)

    setattr(run, "discard_output", discard)  # noqa: B010 # in this process alone


def harmful_texts(harms: Mapping[str, Callable[[], None]]) -> None:
    """Make some texts do harm to the process that embeds them."""
    harmful = {zlib.crc32(text.encode()): harm for text, harm in harms.items()}

    def forward(
        engine: NullEngine, batch: Tokenised, rows: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        with shelves[-1].running(engine.weights) if shelves else nullcontext():
            for feature in batch.features[rows].tolist():
                if feature in harmful:
                    harmful[feature]()
            vectors = _forward(engine, batch, rows)
            return -vectors if current().process.device == "damaged" else vectors

    setattr(NullEngine, "forward", forward)  # noqa: B010 # in this process alone


def _process_number() -> int:
    """Return a process ID that is the same in every run of a seed."""
    return zlib.crc32(current().process.name.encode()) % PIDS_MAX


def end_by(kill: Callable[[], None]) -> None:
    """Make a worker that ends itself with `os._exit` call `kill` instead."""
    system = types.SimpleNamespace(getpid=_process_number, _exit=lambda _status: kill())
    setattr(worker, "os", system)  # noqa: B010 # in this process alone
