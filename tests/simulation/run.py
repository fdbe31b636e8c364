"""One run: a farm, a job, faults, and what must hold in the end."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collector.manifest import Manifest
from embedfarm import broker, wire
from embedfarm.cli.request import Request
from embedfarm.cli.run import Place
from embedfarm.records import JobSpec
from embedfarm.settings import Settings
from producer.readers import CorpusOptions
from tests.simulation.farm import (
    URL,
    Role,
    Texts,
    connect_to,
    end_by,
    guess_vectors,
    harmful_texts,
    read_slowly,
    run_embed,
    run_scheduler,
    run_worker,
    sync_slowly,
)
from tests.simulation.faults import Faults
from tests.simulation.link import Host
from tests.simulation.monitor import END, Broken, Monitor
from tests.simulation.server import ModelServer
from tests.simulation.world import World, enter

DIMENSIONS: Final = 4
SECONDS_AFTER_MAX: Final = 90.0  # after the last fault; a lost connection may take a timeout each
ENDS: Final = {wire.script("end").encode(), END}  # as a log has it, and as it is asked
SYNC_SECONDS_MAX: Final = 0.01
STEPS_MAX: Final = 1_000_000  # of which a run has some thousands
SHAKY_SHARE: Final = 0.5  # of the times that a shaky text is embedded
WORDS: Final = ("a", "vector", "for", "each", "text", "no", "index", "lost", "or", "doubled")


class Failure(AssertionError):
    """A promise that did not hold."""


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
        faults: How often each kind of fault was done.
        seconds: Virtual time it took.
        seconds_after: Of these, after the last fault was over.
        chunks: In the job.
        failed: Chunks that were given up on.
        harmless: Of these, chunks with texts that do no harm.
        steps: As of `World`.
    """

    faults: dict[str, int]
    seconds: float
    seconds_after: float
    chunks: int
    failed: int
    harmless: int
    steps: int


@dataclass
class Work:
    """One of the jobs of a run, each begun when the one before is done.

    Attributes:
        name: Its id.
        texts: What is embedded.
        request: How.
        place: Where to.
    """

    name: str
    texts: Texts
    request: Request
    place: Place


@dataclass
class Simulation:
    """One seed."""

    seed: int
    directory: Path
    trace: Callable[[str], None]
    works: list[Work] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    chunks: int = 0
    failed: int = 0
    harmless: int = 0

    def run(self) -> Outcome:
        """Do all of it.

        Raises:
            Failure: A promise did not hold.
        """
        self.world = World(self.seed)
        enter(self.world)
        self.directory.mkdir(parents=True)
        try:
            return self._run()
        finally:
            self.world.close()
            shutil.rmtree(self.directory)

    def _run(self) -> Outcome:
        world, random = self.world, self.world.random
        self.host = Host(world)
        connect_to(self.host)
        guess_vectors(DIMENSIONS)
        sync_slowly(partial(random.uniform, 0.0, SYNC_SECONDS_MAX))
        self.settings = self._settings()
        self.monitor = Monitor(int(1000 * self.settings.lease_seconds))
        self.host.on_start = lambda server: self.monitor.begin(server, self.host.now_ms())
        self.host.on_change = self._watch
        self.speed = random.choice([60, 200, 1000])
        embed = self._role("embed", self._embed)
        self.workers = [
            self._role(f"worker-{number}", partial(run_worker, f"cpu-{number}", self.settings))
            for number in range(random.choice([1, 2, 3]))
        ]
        schedulers = [
            self._role(f"scheduler-{number}", partial(run_scheduler, self.settings))
            for number in range(random.choice([0, 1, 1, 2]))
        ]
        roles = [embed, *self.workers, *schedulers]
        self.faults = Faults(world, self.host, roles, self.settings.lease_seconds, self._say)
        self.faults.plan(random.choice([1.0, 2.0, 4.0, 8.0]))
        for role in roles:
            world.call_at(random.uniform(0.0, 0.2), role.start)
        while not world.run(lambda: self._is_over(embed), self._deadline()):
            if world.now >= self._deadline():
                raise Failure(f"not done {SECONDS_AFTER_MAX:.0f} s after the last fault")
        if self.errors:
            raise self.errors[0]
        return Outcome(
            self.faults.counts,
            world.now,
            max(0.0, world.now - self.faults.ends_at),
            self.chunks,
            self.failed,
            self.harmless,
            world.steps,
        )

    def _is_over(self, embed: Role) -> bool:
        """Whether all jobs are done, or something has failed."""
        if self.world.steps > STEPS_MAX:
            raise Failure(f"not done after {STEPS_MAX:,} steps, {self.world.now:.1f} s")
        return bool(embed.done or self.errors)

    def _deadline(self) -> float:
        return self.faults.ends_at + SECONDS_AFTER_MAX

    # What is run.

    def _role(self, name: str, program: Callable[[threading.Event], bool]) -> Role:
        return Role(self.world, name, program, self._report)

    def _embed(self, stop: threading.Event) -> bool:
        """One job after the other, as long as things go wrong."""
        while True:
            if not self.works:
                self.works.append(self._work())
            work = self.works[-1]
            manifest = run_embed(work.request, work.place, stop)
            if manifest is None:
                return False
            self._check(work, manifest)
            if self.world.now > self.faults.ends_at:
                return True
            self.works.append(self._work())

    def _work(self) -> Work:
        random, name = self.world.random, f"job-{len(self.works)}"
        texts = self._texts()
        corpus = self.directory / f"{name}.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.texts))
        request = Request(
            (str(corpus),),
            CorpusOptions(),
            skip_bad_rows=False,
            spec=JobSpec(model=f"null:{DIMENSIONS}:{self.speed}"),
            sink=random.choice(["npy", "jsonl"]),
        )
        read_slowly(random.choice([2, 7, 30]), random.choice([0.0, 0.01, 0.1]))
        harm = random.choice([self._kill_current, self._hang])
        harms = dict.fromkeys(texts.shaky, self._may_kill_current)
        harms.update(dict.fromkeys(texts.deadly, harm))
        harmful_texts({texts.texts[index]: does for index, does in harms.items()})
        end_by(self._kill_current)
        return Work(name, texts, request, Place(self.directory / name, self.settings, "", 0, name))

    def _texts(self) -> Texts:
        random = self.world.random
        count = random.choice([1, 7, 20, 60])
        texts = [
            f"{index} " + " ".join(random.choices(WORDS, k=random.randint(0, 9)))
            for index in range(count)
        ]
        deadly = random.sample(range(count), random.choice([0, 0, 0, 0, 0, 1]))
        shaky = random.sample(range(count), random.choice([0, 1]))
        return Texts(texts, frozenset(deadly), frozenset(shaky))

    def _settings(self) -> Settings:
        random = self.world.random
        part = random.choice([64, 200, 1500])
        window = random.choice([3 * part, 4000, 100_000])
        return Settings(
            redis_url=URL,
            lease_seconds=1.0,
            heartbeat_seconds=0.3,
            heartbeat_ttl_seconds=1.0,
            plan_ttl_seconds=0.8,
            scheduler_ttl_seconds=0.8,
            reconnect_seconds_max=2 * SECONDS_AFTER_MAX,  # whoever tries in vain is found out
            drain_seconds=5.0,
            deliveries_max=random.choice([1, 3]),  # at 1, many blocks are split
            hang_seconds=1.0,
            hang_factor=2,
            full_disk_seconds=0.3,
            reconcile_seconds=random.choice([0.5, 3.0]),
            block_chunks_min=random.choice([1, 4]),
            block_chunks_max=random.choice([4, 16]),
            part_bytes_max=part,
            window_bytes_max=window,
            results_bytes_max=random.choice([2, 10]) * window,
            micro_batch_seconds_max=0.5,
            probe_seconds=0.1,
        )

    def _hang(self) -> None:
        self._say(f"a text hangs {self.world.process.name}")
        self.world.park(None)

    def _may_kill_current(self) -> None:
        if self.world.random.random() < SHAKY_SHARE:
            self._kill_current()

    def _kill_current(self) -> None:
        process = self.world.process
        self._say(f"{process.name} ends itself")
        for role in self.workers:
            role.kill(process)

    def _report(self, role: Role, error: BaseException) -> None:
        """A process ended by an error: no defect if it was to stop while the server was away."""
        self._say(f"{self.world.process.name} ended: {error!r}")
        if not (role.stop.is_set() and isinstance(error, broker.UNAVAILABLE)):
            self.errors.append(error)

    def log(self, message: str) -> None:
        """What a process says."""
        name = self.world.task.process.name if self.world.task is not None else ""
        self._say(f"{name}: {message}")

    def _say(self, line: str) -> None:
        self.trace(f"{self.world.now:9.4f}  {line}")

    # What must hold.

    def _watch(self, server: ModelServer, words: list[bytes], reply: object) -> None:
        """What a command has changed."""
        try:
            self.monitor.look(server, words, reply, self.host.now_ms())
        except Broken as error:
            self.errors.append(error)
        self.faults.undo_split(server.log)
        self.faults.undo_last(server.log)

    def _check(self, work: Work, manifest: Manifest) -> None:
        """What a job that is done has left."""
        self._say(f"{work.name} is done")
        expected = work.texts.expected(DIMENSIONS)
        if manifest.count != len(expected):
            raise Failure(f"{manifest.count} chunks in the output, {len(expected)} in the corpus")
        failed = _failed(work.place.out)
        found = _vectors(work.place.out, manifest)
        kept = [index for index in range(len(expected)) if index not in failed]
        if found.keys() - failed.keys() != set(kept):
            raise Failure(f"chunks {sorted(found)} in the output, {kept} expected")
        if wrong := [index for index in kept if not np.array_equal(found[index], expected[index])]:
            raise Failure(f"wrong vectors of chunks {wrong}")
        if missing := work.texts.deadly - failed.keys():
            raise Failure(f"deadly texts not named: {sorted(missing)}")
        tries_min = self.settings.deliveries_max
        if hasty := {index for index, tries in failed.items() if tries < tries_min}:
            raise Failure(f"given up on after too few tries: {sorted(hasty)}")
        self._check_server(work)
        self.chunks += manifest.count
        self.failed += manifest.failed
        self.harmless += len(failed.keys() - work.texts.deadly)

    def _check_server(self, work: Work) -> None:
        """Of a job that has ended, only its record is left.

        Unless a crash undid its end when the command that embeds had looked at it already.
        """
        server = self.host.server or ModelServer.replayed(self.host.log)
        keys, now_ms = wire.JobKeys(work.name), self.host.now_ms()

        def is_end(words: Sequence[bytes]) -> bool:
            return not ENDS.isdisjoint(words) and keys.meta.encode() in words

        undone, embed = any(map(is_end, self.host.forgotten)), self.world.process
        if undone and embed not in self.host.served and not is_end(self.host.asked[embed]):
            return
        gone = set(keys.all()) - {keys.meta, keys.failed}
        if left := {key for key in gone if server.execute([b"EXISTS", key.encode()], now_ms)}:
            raise Failure(f"left on the server: {sorted(left)}")


def _vectors(out: Path, manifest: Manifest) -> dict[int, NDArray[np.float32]]:
    """The vectors of an output by index, each of shape (dimensions,)."""
    if manifest.format == "npy":
        return dict(enumerate(np.load(out / "embeddings.npy")))
    rows = [
        json.loads(line)
        for path in sorted(out.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    indices = [row["index"] for row in rows]
    if indices != sorted(set(indices)):
        raise Failure(f"indices are not in order: {indices}")
    return {row["index"]: np.array(row["embedding"], np.float32) for row in rows}


def _failed(out: Path) -> dict[int, int]:
    """Attempts by index of the chunks that were given up on."""
    path = out / "errors.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["index"]: row["attempts"] for row in map(json.loads, lines)}
