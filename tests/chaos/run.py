"""One run of chaos: a quiet job first, and then jobs under one fault after the other."""

import itertools
import random
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from tests.chaos.callers import Callers, InteractiveCaller
from tests.chaos.checks import Checks
from tests.chaos.commands import Job, World
from tests.chaos.corpora import Corpus, Vectors, turn, vectors_of
from tests.chaos.disks import mounted
from tests.chaos.faults import Fault
from tests.chaos.outcome import Outcome
from tests.chaos.roles import WORKERS, Deaths, start_roles
from tests.chaos.scene import Scene
from tests.chaos.servers import Servers
from tests.chaos.small_jobs import Asking, HttpJobs, RqJobs
from tests.chaos.tally import Tally
from tests.chaos.tenants import OPERATOR, Door, Reader, Tenant, make_tenants
from tests.chaos.victims import Witness, nothing_to_show
from tests.chaos.watch import Watch
from tests.farm.harness import read_parquet
from tests.support import free_port, wait_until

IDS: Final = 2  # of the operator's jobs, in turn
START_SECONDS: Final = 120.0
GIVE_UP_SECONDS: Final = 90.0  # after which there are no more faults
END_SECONDS_MAX: Final = 900.0  # for the last job, and all checks
SINK_BYTES: Final = 1 << 29
LOG_BYTES: Final = 1 << 30  # twice the size at which the log is rewritten
PART_BYTES: Final = 1 << 17  # many parts of each job


@dataclass(frozen=True)
class Orders:
    """The parameters of a run.

    Attributes:
        model: The model that embeds.
        texts: The corpus of each job.
        seconds: Seconds for which there are faults.
        every_seconds: Mean time between the recovery from a fault and the next fault.
        faults: The faults by name; each comes as often as any other.
        seed: Decides which fault comes, when and for how long.
        stretch: Factor of all times that faults last.
        disks: Whether the output and the server's log have disks of their own.
    """

    model: str
    texts: Sequence[str]
    seconds: float
    every_seconds: float
    faults: Mapping[str, Fault]
    seed: int = 0
    stretch: float = 1.0
    disks: bool = True


class Chaos:
    """A run of one farm, from its start to its end.

    Args:
        orders: The parameters of the run.
        place: Directory of outputs and logs.
        say: Called with lines of progress.
    """

    def __init__(self, orders: Orders, place: Path, say: Callable[[str], object]) -> None:
        self.orders = orders
        self.place = place
        self._say = say
        self.outcome = Outcome()
        self.deaths = Deaths()
        self._ended = threading.Event()
        self._random = random.Random(orders.seed)
        self._rows_random = random.Random(orders.seed)  # of rows, by another thread
        self._tally = Tally()

    def run(self) -> Outcome:
        """Start the farm, embed without and with faults, and return the outcome."""
        with ExitStack() as stack:
            socket = Path(tempfile.mkdtemp(prefix="chaos-"))  # its name must be short
            stack.callback(shutil.rmtree, socket)
            self._sink, log = self._disks(stack)
            tenants = make_tenants(self.orders.texts, keys := self.place / "keys")
            settings = self._settings(socket / "s", keys)
            servers = Servers(log, socket / "s", settings, self.deaths)
            stack.callback(servers.close)
            (switches := self.place / "switches").mkdir()
            self._world = World(settings, servers, self.deaths, switches, self.orders.model)
            port = free_port()
            roles = start_roles(settings, self.place / "logs", switches, port, self.deaths)
            for role in roles.values():
                stack.callback(role.close)
            self._watch = stack.enter_context(Watch(settings.redis_url))
            known = self._embed_quietly(
                [*self.orders.texts, *(t for o in tenants for t in o.texts)]
            )
            self._checks = Checks(known, self._world, self.outcome)
            callers = self._callers(port, tenants, known)
            callers.start()
            stack.callback(callers.close)
            job = self._measure_quiet()
            witness = Witness(settings.redis_url, self._watch, self._tally)
            scene = Scene(
                self._world, roles, job, self._sink, log, self._random, witness,
                self.orders.stretch,
            )  # fmt: skip
            self._shoot(scene, callers)
        self._judge()
        return self.outcome

    def _settings(self, socket: Path, keys: Path) -> Settings:
        return Settings().model_copy(
            update={
                "redis_url": f"unix://{socket}",
                "state_directory": self.place / "state",
                "jobs_directory": self.place / "jobs",
                "ingest_roots": [self.place],
                "keys_file": keys,
                "part_bytes_max": PART_BYTES,
                "models": (self.orders.model,),
            }
        )

    def _callers(self, port: int, tenants: list[Tenant], known: Vectors) -> Callers:
        """Make the callers that use the farm, with a reader for each key."""
        tally, model, ended = self._tally, self.orders.model, threading.Event()
        doors = [
            Door(port, tally, each, [other for other in tenants if other is not each])
            for each in tenants
        ]
        asking = Asking(model, known, self.place, self._world, tally, ended)
        readers = [Reader(door, model) for door in doors]
        return Callers(
            InteractiveCaller(doors, model, known, tally), RqJobs(asking, tenants),
            HttpJobs(asking, doors), readers, tally, ended,
        )  # fmt: skip

    def _disks(self, stack: ExitStack) -> tuple[Path, Path]:
        """Return the directories of outputs and of the server's log, mounted if asked for."""
        places = self.place / "sink", self.place / "log"
        if self.orders.disks:
            for place, size in zip(places, (SINK_BYTES, LOG_BYTES), strict=True):
                stack.enter_context(mounted(place, size))
        return places

    # Quiet.

    def _embed_quietly(self, texts: list[str]) -> Vectors:
        """Embed all texts once the model is loaded, and return their vectors."""
        with closing_client(self._world.settings.redis_url) as client:
            wait_until(lambda: len(FarmClient(client).workers()) == WORKERS, START_SECONDS)
        job = self._job("quiet", "quiet", texts)
        job.run()
        indices, vectors, _ = read_parquet(job.out)
        assert indices == list(range(len(texts)))
        shutil.rmtree(job.out)
        return vectors_of(texts, vectors)

    def _measure_quiet(self) -> Job:
        """Embed the corpus beside all callers, without faults, and note the throughput."""
        job = self._job("measured", "measured", self.orders.texts)
        began = time.monotonic()
        job.run()
        self.outcome.quiet_rate = len(self.orders.texts) / (time.monotonic() - began)
        self._checks.check(job)
        return job

    def _job(self, run: str, name: str, texts: Sequence[str], before: float = 0.0) -> Job:
        """Make the command of a job, with a corpus of its own; the id may have been used before."""
        corpus = Corpus(self.place / f"{run}.jsonl")
        corpus.write(texts)
        return Job(corpus, self._sink / run, name, self._world, before)

    # Under faults.

    def _shoot(self, scene: Scene, callers: Callers) -> None:
        """Let jobs run while faults come, and let the last one end quietly."""
        embedding = threading.Thread(target=self._keep_embedding, args=[scene], daemon=True)
        began = time.monotonic()
        embedding.start()
        try:
            self._strike(scene, began + self.orders.seconds, embedding)
            done = self.outcome.chunks + self._watch.chunks_done
            self.outcome.rate = done / (time.monotonic() - began)
        finally:
            self._ended.set()
            callers.close()
            embedding.join(END_SECONDS_MAX)
            scene.job.close()
            if embedding.is_alive():
                self.outcome.problems.append("the last job does not end, though all is quiet")

    def _strike(self, scene: Scene, deadline: float, embedding: threading.Thread) -> None:
        """Do one fault after the other until the deadline, and note each recovery."""
        for name in self._draw():
            threading.Event().wait(self.orders.every_seconds * self._random.uniform(0.5, 1.5))
            if time.monotonic() > deadline or not embedding.is_alive():
                return
            began = time.monotonic()
            scene.proof = nothing_to_show
            try:
                self.orders.faults[name](scene)
                ended = time.monotonic()
                seconds = self._watch.recovery_seconds(ended, GIVE_UP_SECONDS, scene.proof)
            except TimeoutError as error:
                self.outcome.problems.append(f"{name}: {error}")
                return
            self.outcome.recoveries.append((name, seconds))
            self._say(f"{name}: {ended - began:.1f} s, then {seconds:.1f} s")

    def _draw(self) -> Iterator[str]:
        """Yield names of faults: all of them in random order, again and again."""
        names = list(self.orders.faults)
        while True:
            self._random.shuffle(names)
            yield from names

    def _keep_embedding(self, scene: Scene) -> None:
        """Run one job after the other, and check each while the next one runs."""
        try:
            with ThreadPoolExecutor(1) as checks:
                checked: list[Future[None]] = []
                for job in self._embed(scene, checked):
                    checked += [checks.submit(self._checks.check, job)]
            for check in checked:
                check.result()
        except Exception as error:  # noqa: BLE001 # it belongs to what is reported
            self.outcome.problems.append(repr(error))

    def _embed(self, scene: Scene, checked: Sequence["Future[None]"]) -> Iterator[Job]:
        """Yield jobs that have ended well; an id is used again once its last job is checked."""
        ended = defaultdict[str, float](float)
        for number in itertools.count():
            if number >= IDS:
                checked[number - IDS].result()
            name = f"{OPERATOR}-nightly-{number % IDS}"
            texts = turn(list(self.orders.texts), self._rows_random)
            job = scene.job = self._job(f"run-{number}", name, texts, ended[name])
            self._watch.job = name
            job.run()
            ended[name] = job.ended
            self.outcome.runs += 1
            self.outcome.chunks += len(job.corpus.texts)
            self.outcome.refusals.update(job.refusals)
            yield job
            if self._ended.is_set():
                return

    def _judge(self) -> None:
        """Put into the outcome what the watch, the tally and the bounds say."""
        outcome, watch, tally = self.outcome, self._watch, self._tally
        outcome.deliveries_max = watch.deliveries_max
        outcome.idle_seconds_max = watch.idle_seconds_max
        outcome.idle_longest = watch.idle_longest
        outcome.add(tally)
        outcome.problems += self.deaths.unasked
        settings = self._world.settings
        outcome.problems += outcome.judge(self.orders.seconds, settings.deliveries_max)
