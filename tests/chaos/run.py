"""A quiet run, then the same again and again under faults; what came of it."""

import itertools
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from embedfarm.broker import closing_client, persist
from embedfarm.farm import Farm
from embedfarm.settings import Settings
from producer.requests import JOB_ID_FILE
from tests.chaos.callers import Callers, cosines
from tests.chaos.disks import mounted
from tests.chaos.faults import Fault, Scene
from tests.chaos.outcome import Outcome
from tests.chaos.roles import WORKERS, Deaths, Job, start_roles, write_texts
from tests.chaos.servers import Servers
from tests.chaos.victims import Witness, nothing_to_show
from tests.chaos.watch import Watch
from tests.farm.harness import manifest, read_parquet, run
from tests.support import free_port, wait_until

if TYPE_CHECKING:
    from numpy.typing import NDArray

WARM_CHUNKS: Final = 64
START_SECONDS: Final = 120.0
GIVE_UP_SECONDS: Final = 90.0  # after which there are no more faults
END_SECONDS_MAX: Final = 900.0  # for the last job, and all checks
SINK_BYTES: Final = 1 << 29
LOG_BYTES: Final = 1 << 30  # twice the size at which the log is rewritten
PART_BYTES: Final = 1 << 17  # many parts of each job


@dataclass(frozen=True)
class Orders:
    """What is to be done.

    Attributes:
        model: That embeds.
        texts: The corpus of each run.
        seconds: How long there are faults.
        every_seconds: Time between recovery from one and the next, on average.
        faults: By name; each comes as often as any other.
        seed: Decides which, when and for how long.
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
    """One farm from its start to its end.

    Args:
        orders: What is to be done.
        place: Keeps outputs and logs.
        say: Told how it goes.
    """

    def __init__(self, orders: Orders, place: Path, say: Callable[[str], object]) -> None:
        self.orders = orders
        self.place = place
        self._say = say
        self.outcome = Outcome(chunks=len(orders.texts))
        self.deaths = Deaths()
        self._ended = threading.Event()
        self._vectors: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._random = random.Random(orders.seed)

    def run(self) -> Outcome:
        """All of it."""
        with ExitStack() as stack:
            socket = Path(tempfile.mkdtemp(prefix="chaos-"))  # its name must be short
            stack.callback(shutil.rmtree, socket)
            sink, log = self._disks(stack)
            self.settings = Settings().model_copy(
                update={
                    "redis_url": f"unix://{socket}/s",
                    "state_directory": self.place / "state",
                    "jobs_directory": self.place / "jobs",
                    "ingest_roots": [self.place],
                    "part_bytes_max": PART_BYTES,
                    "models": (self.orders.model,),
                }
            )
            self._servers = Servers(log, socket / "s", self.settings, self.deaths)
            stack.callback(self._servers.close)
            switches = self.place / "switches"
            switches.mkdir()
            self._port = free_port()
            roles = start_roles(
                self.settings, self.place / "logs", switches, self._port, self.deaths
            )
            for role in roles.values():
                stack.callback(role.close)
            self._sink = sink
            self._watch = stack.enter_context(Watch(self.settings.redis_url))
            self._corpus = write_texts(self.place / "corpus.jsonl", self.orders.texts)
            job = self._measure_quiet()
            callers = Callers(
                self.settings.redis_url, self._port, self.orders.model, list(self.orders.texts),
                self._vectors, self.place,
            )  # fmt: skip
            witness = Witness(self.settings.redis_url, self._watch, callers)
            scene = Scene(
                self._servers, roles, self.deaths, job, sink, log, switches, self.settings,
                self._random, witness, self.orders.stretch,
            )  # fmt: skip
            self._shoot(scene, callers)
        self._judge(callers)
        return self.outcome

    def _disks(self, stack: ExitStack) -> tuple[Path, Path]:
        """Where outputs and the server's log lie."""
        places = self.place / "sink", self.place / "log"
        if self.orders.disks:
            for place, size in zip(places, (SINK_BYTES, LOG_BYTES), strict=True):
                stack.enter_context(mounted(place, size))
        return places

    # Quiet.

    def _measure_quiet(self) -> Job:
        """Embed the corpus without faults, once the model is loaded."""
        with closing_client(self.settings.redis_url) as client:
            wait_until(lambda: len(Farm(client).workers()) == WORKERS, START_SECONDS)
        warm = write_texts(self.place / "warm.jsonl", self.orders.texts[:WARM_CHUNKS])
        self._job(warm, "warm").run(self.deaths)
        job = self._job(self._corpus, "quiet")
        began = time.monotonic()
        job.run(self.deaths)
        self.outcome.quiet_rate = len(self.orders.texts) / (time.monotonic() - began)
        indices, self._vectors, _ = read_parquet(self._sink / "quiet")
        assert indices == list(range(len(self.orders.texts)))
        shutil.rmtree(self._sink / "quiet")
        return job

    def _job(self, corpus: Path, name: str) -> Job:
        words = [corpus, "--out", self._sink / name, "--model", self.orders.model]
        return Job([*words, "--job-id", name], self.settings, self.place / f"{name}.log")

    # Under faults.

    def _shoot(self, scene: Scene, callers: Callers) -> None:
        """Let jobs run while faults come, and let the last one end quietly."""
        embedding = threading.Thread(target=self._keep_embedding, args=[scene], daemon=True)
        began = time.monotonic()
        embedding.start()
        callers.start()
        try:
            self._strike(scene, began + self.orders.seconds, embedding)
            done = self.outcome.runs * len(self.orders.texts) + self._watch.chunks_done
            self.outcome.rate = done / (time.monotonic() - began)
        finally:
            self._ended.set()
            callers.close()
            embedding.join(END_SECONDS_MAX)
            scene.job.close()
            if embedding.is_alive():
                self.outcome.problems.append("the last job does not end, though all is quiet")

    def _strike(self, scene: Scene, deadline: float, embedding: threading.Thread) -> None:
        """One fault after the other."""
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
        """Names of faults: all of them in random order, again and again."""
        names = list(self.orders.faults)
        while True:
            self._random.shuffle(names)
            yield from names

    def _keep_embedding(self, scene: Scene) -> None:
        """One job after the other, each checked while the next one runs."""
        try:
            with ThreadPoolExecutor(1) as checks:
                checked = [checks.submit(self._check, name) for name in self._embed(scene)]
            for check in checked:
                check.result()
        except Exception as error:  # noqa: BLE001 # it belongs to what is reported
            self.outcome.problems.append(repr(error))

    def _embed(self, scene: Scene) -> Iterator[str]:
        """Names of jobs that have ended well."""
        for number in itertools.count():
            name = f"run-{number}"
            scene.job = self._job(self._corpus, name)
            self._watch.job = name
            scene.job.run(self.deaths)
            self.outcome.runs += 1
            yield name
            if self._ended.is_set():
                return

    # Invariants.

    def _check(self, name: str) -> None:
        """Each index once, with the vector of the quiet run; nothing is left on the server."""
        out, outcome = self._sink / name, self.outcome
        ended = out.stat().st_mtime  # the last that it does there, once its job is ended
        if (out / JOB_ID_FILE).exists():
            outcome.problems.append(f"{name}: its command has not ended the job")
        indices, vectors, _ = read_parquet(out)
        counts = np.bincount(indices, minlength=len(self.orders.texts))
        outcome.lost += int((counts == 0).sum())
        outcome.doubled += int((counts > 1).sum())
        if indices != list(range(len(self.orders.texts))):
            outcome.problems.append(f"{name}: the indices are not 0 to N - 1 in order")
            return
        least = float(cosines(vectors, self._vectors).min())
        outcome.cosine_min = min(outcome.cosine_min, least)
        facts = manifest(out)
        accounts = facts["accounts"].values()
        outcome.duplicates += sum(account.get("duplicates", 0) for account in accounts)
        verified = run("verify", out, "--against", self._corpus)
        if facts["failed"] or verified.returncode:
            outcome.problems.append(f"{name}: {facts['failed']} failed; {verified.stdout}")
        self._check_server(name, ended)
        shutil.rmtree(out)

    def _check_server(self, name: str, ended: float) -> None:
        """Counters agree, and neither an entry nor a lease is left.

        A command that had seen its job's end on the server before a replica took over, which does
        not know of it, can do nothing about it: `cleanup` does the rest, in a day.
        """
        with closing_client(self.settings.redis_url) as client:
            job = Farm(client).job(name)
            status = persist(job.status, threading.Event(), START_SECONDS)
            left = persist(lambda: client.exists(*job.keys.all()), threading.Event(), 60)
            kept = persist(
                lambda: client.exists(job.keys.meta, job.keys.failed), threading.Event(), 60
            )
        if not status.ended and self._servers.forgot(ended):
            return
        if status.blocks_done != status.blocks_in or left > kept:
            self.outcome.problems.append(f"{name}: {left - kept} keys are left; {status}")

    def _judge(self, callers: Callers) -> None:
        """Put into words what is beyond its bounds."""
        outcome, watch = self.outcome, self._watch
        outcome.deliveries_max = watch.deliveries_max
        outcome.idle_seconds_max = watch.idle_seconds_max
        outcome.answered, outcome.refused = callers.answered, callers.refused
        outcome.wrong, outcome.unanswered = len(callers.wrong), len(callers.unanswered)
        outcome.small_jobs = callers.jobs
        outcome.problems += [*callers.wrong, *callers.unanswered, *callers.failed]
        outcome.problems += self.deaths.unasked
        outcome.problems += outcome.judge(self.orders.seconds, self.settings.deliveries_max)
