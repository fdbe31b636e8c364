"""A run of one seed: a farm, users and their jobs, faults, and what must hold in the end."""

import errno
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from embedfarm.contract import broker
from embedfarm.contract.settings import Settings
from embedfarm.workers.canary_keeper import ComputesWrongly
from tests.simulation import sightings
from tests.simulation.disk import Disk
from tests.simulation.farm import (
    URL,
    Role,
    connect_to,
    end_by,
    guess_vectors,
    harmful_texts,
    note_canaries,
    note_discards,
    read_slowly,
    run_scheduler,
    run_worker,
)
from tests.simulation.faults import Faults
from tests.simulation.judge import DIMENSIONS, SAMPLE_TEXTS, Failure
from tests.simulation.link import Host
from tests.simulation.model_steps import ModelSteps
from tests.simulation.model_watch import put_up
from tests.simulation.monitor import Monitor
from tests.simulation.mount import mounted
from tests.simulation.scene import Scene
from tests.simulation.server import ModelServer
from tests.simulation.shelf import Shelf
from tests.simulation.source import read_by
from tests.simulation.states import State
from tests.simulation.storage import ROOT, Storage, note_losses, put_on
from tests.simulation.user_steps import Lives
from tests.simulation.users import SIZES, User
from tests.simulation.views import Broken
from tests.simulation.world import World, enter

SECONDS_AFTER_MAX: Final = 90.0  # after faults and reactions; a lost connection may take a timeout
HARM_SECONDS: Final = 10.0  # more for each text that kills or hangs a worker
SWAP_SECONDS: Final = 1.0  # more for each chunk of jobs of several models, which may need a swap
SYNC_SECONDS_MAX: Final = 0.01
STEPS_MAX: Final = 1_000_000  # of which a run has some thousands
DARK_SHARE: Final = 0.3  # of finished jobs behind which the power is lost
SHAKY_SHARE: Final = 0.5  # of the times that a shaky text is embedded
LIVELY_SHARE: Final = 0.2  # of the seeds, with users who do more than one thing after the other
ENDING_SHARE: Final = 0.3  # of these, in which a corpus changes when all of it is on disk
USERS_MAX: Final = 2
CROWD_SHARE: Final = 0.3  # of the other seeds, with several users at once, whose jobs are alike
USERS: Final = ("job", "more", "third", "fourth", "fifth", "sixth")
SEVERAL_SHARE: Final = 0.2  # of the seeds, with several models
SEVERAL_USERS: Final = (2, 3)
STORED_SHARE: Final = 0.25  # of the seeds, with a storage past the server
LISTING_SHARE: Final = 0.5  # of these, in which outputs list what is stored
LATE_SECONDS: Final = 5.0  # behind the end, in which no worker may delete what is listed
REFERRING_SHARE: Final = 0.25  # of the seeds, with jobs whose texts workers read
DAMAGED_SHARE: Final = 0.3  # of those with one model, in which a device begins to compute wrongly
SLOW_SHARE: Final = 0.15  # of the lively ones, in which reading is slower than all timeouts
READ_SECONDS_MAX: Final = 12.0  # for all of a corpus, where reading is slower than all timeouts

DAMAGED: Final = State("device computes wrongly", "a worker ends by `ComputesWrongly`")


class Outcome(NamedTuple):
    """Figures of a run in which all promises held.

    Attributes:
        faults: How often each kind of fault was done.
        seconds: Virtual seconds that the run took.
        seconds_after: Virtual seconds from the end of the last fault to the end of the run.
        chunks: Number of chunks in the finished jobs.
        failed: Chunks that were given up on.
        harmless: Chunks that were given up on though their texts do no harm.
        steps: Events of the world that have happened.
        reached: How often each state was reached.
    """

    faults: dict[str, int]
    seconds: float
    seconds_after: float
    chunks: int
    failed: int
    harmless: int
    steps: int
    reached: dict[str, int]


@dataclass
class Simulation:
    """A run of one seed.

    Attributes:
        directory: Directory for its files, which must not exist yet.
        trace: Called with each line of the log.
        detailed: Whether the log has all that is asked of the server and the disk, too.
        dropped: Numbers of the operations that are left out.
        order: Seeds the order of events at the same moment and how long they take, if not 0.
    """

    seed: int
    directory: Path
    trace: Callable[[str], None]
    detailed: bool = False
    dropped: frozenset[int] = frozenset()
    order: int = 0
    harms: dict[str, Callable[[], None]] = field(default_factory=dict)
    _lives: Lives | None = None

    def run(self) -> Outcome:
        """Run the seed to its end.

        Raises:
            Failure: A promise did not hold.
        """
        self.world = World(self.seed)
        self.world.steps_max = STEPS_MAX
        enter(self.world)
        self.directory.mkdir(parents=True)
        try:
            return self._run()
        finally:
            self.world.close()
            mounted.clear()
            shutil.rmtree(self.directory)

    def _run(self) -> Outcome:
        world, random = self.world, self.world.random
        lively = random.random() < LIVELY_SHARE
        several = Random(f"models {self.seed}")  # of its own: other seeds stay what they were
        self.host = Host(world)
        connect_to(self.host)
        guess_vectors(DIMENSIONS)
        end_by(self._kill_current)
        note_canaries()
        note_losses()
        sync_seconds = partial(random.uniform, 0.0, SYNC_SECONDS_MAX)
        self.disk = Disk(self.directory / "disk", world, sync_seconds, self._detail)
        settings = self._settings()
        self.monitor = Monitor(int(1000 * settings.lease_seconds))
        self.host.on_start = lambda server: self.monitor.begin(server, self.host.now_ms())
        self.host.on_change = self._watch
        self.host.on_answer = self._answered
        sightings.watch()
        speed = random.choice([60, 200, 1000])
        shelf = self._shelf(several, speed) if several.random() < SEVERAL_SHARE else None
        put_up(shelf)
        if shelf is not None:  # a window for one block is no window for three users
            room = max(SEVERAL_USERS) * settings.farm_window_bytes_max
            settings = settings.model_copy(update={"farm_window_bytes_max": room})
        storage = self._storage()
        if storage is not None:
            limits = {"stored_roots": (ROOT,), "stored_bytes_max": 3 * settings.part_bytes_max}
            settings = settings.model_copy(update=limits)
        self.scene = Scene(
            world, self.host, settings, self.directory, self.disk.root, self._say, speed, lively,
            shelf, storage, self._source(),
        )  # fmt: skip
        users = random.randint(1, USERS_MAX) if lively else self._crowd()
        self.users = self._users(users if shelf is None else several.randint(*SEVERAL_USERS))
        self.workers = [
            self._worker(number, settings)
            for number in range(random.choice([2, 2, 3] if lively else [1, 2, 3]))
        ]
        schedulers = [
            self._role(f"scheduler-{number}", partial(run_scheduler, settings))
            for number in range(max(random.choice([0, 1, 1, 2]), shelf is not None))
        ]
        commands = [user.role for user in self.users if user.role is not None]
        roles = [*commands, *self.workers, *schedulers]
        self.faults = Faults(
            world, self.host, self.disk, roles, settings.lease_seconds, self._say, self.dropped
        )
        horizon = random.choice([1.0, 2.0, 4.0, 8.0])
        self.faults.plan(horizon)
        own = Random(f"damage {self.seed}")
        if shelf is None and own.random() < DAMAGED_SHARE:  # nobody asks vectors of requests twice
            self.faults.add(own.uniform(0.0, horizon), self.faults.damage, horizon)
        if shelf is not None:
            shelf.stock([role.name for role in self.workers], horizon)
            ModelSteps(self.scene, self.faults, shelf).plan(horizon)
        if lively:
            self._lives = Lives(
                self.scene, self.faults, self.users, self.workers, self.monitor,
                at_the_end=Random(f"ending {self.seed}").random() < ENDING_SHARE,
            )  # fmt: skip
            self._lives.plan(horizon)
        for role in roles:
            world.call_at(random.uniform(0.0, 0.2), role.start)
        if self.order:
            random.seed(f"{self.seed} {self.order}")
        return self._run_to_end(commands)

    def _run_to_end(self, commands: Sequence[Role]) -> Outcome:
        """Let the world run until all commands are done, and return the figures."""
        while not self.world.run(lambda: self._is_over(commands), self._deadline()):
            if self.world.steps >= STEPS_MAX:
                raise Failure(f"not done after {STEPS_MAX:,} steps, {self.world.now:.1f} s")
            if self.world.now >= self._deadline():
                seconds = self._seconds_after_max
                raise Failure(f"not done {seconds:.0f} s after all faults and reactions")
        scene, done_at = self.scene, self.world.now
        if scene.listed and not scene.errors:
            over_at = done_at + LATE_SECONDS
            self.world.run(lambda: bool(scene.errors) or self.world.now >= over_at, over_at)
            scene.read_listed()
        if scene.errors:
            raise scene.errors[0]
        return Outcome(
            self.faults.counts,
            done_at,
            max(0.0, done_at - self.faults.ends_at),
            scene.chunks,
            scene.failed,
            scene.harmless,
            self.world.steps,
            self.world.reached,
        )

    def _is_over(self, commands: Sequence[Role]) -> bool:
        """Tell whether all commands are done or something has failed."""
        return bool(self.scene.errors or all(role.done for role in commands))

    def _deadline(self) -> float:
        return max(self.faults.ends_at, self.scene.reacted_at) + self._seconds_after_max

    @property
    def _seconds_after_max(self) -> float:
        """Seconds that a run may take behind the last fault.

        Workers die of harmful texts. One with room for one model swaps it for each chunk, if the
        window has room for one of each job.
        """
        swaps = 0
        if self.scene.shelf is not None:
            works = (user.work for user in self.users if user.work is not None)
            swaps = self.scene.chunks + sum(len(work.corpus.rows) for work in works)
        return SECONDS_AFTER_MAX + HARM_SECONDS * len(self.harms) + SWAP_SECONDS * swaps

    # What is run.

    def _role(self, name: str, program: Callable[[threading.Event], bool]) -> Role:
        return Role(self.world, name, program, self._report)

    def _crowd(self) -> int:
        """Choose how many users there are who run one command after the other: most often one."""
        own = Random(f"{self.seed} crowd")
        return own.randint(2, len(USERS)) if own.random() < CROWD_SHARE else 1

    def _storage(self) -> Storage | None:
        """Make the storage of a run in which vectors may be stored past the server."""
        own = Random(f"stored {self.seed}")
        stored = own.random() < STORED_SHARE
        lossy = partial(len, self.host.forgotten)
        lists = Random(f"lists {self.seed}").random() < LISTING_SHARE
        storage = Storage(self.world, own, lossy, self._broken, lists) if stored else None
        put_on(storage)
        return storage

    def _source(self) -> Random | None:
        """Return what decides which jobs have their texts read by workers, if some have."""
        own = Random(f"references {self.seed}")
        read_by(own)
        return own if own.random() < REFERRING_SHARE else None

    def _shelf(self, own: Random, speed: int) -> Shelf:
        """Make the models of a run that has several."""
        lossy = partial(len, self.host.forgotten)
        return Shelf(self.world, own, speed, self._kill_current, self._say, lossy, self._broken)

    def _broken(self, error: Broken) -> None:
        self.scene.fail(error)

    def _worker(self, number: int, settings: Settings) -> Role:
        """Make the role of a worker, whose settings may depend on the models that there are."""
        name = f"worker-{number}"

        def work(stop: threading.Event) -> bool:
            shelf = self.scene.shelf
            own = settings if shelf is None else shelf.settings(name, settings)
            return run_worker(f"cpu-{number}", own, stop)

        return self._role(name, work)

    def _users(self, count: int) -> list[User]:
        """Make the users, each with a program that embeds their corpora."""
        some, users = self.world.random, list[User]()
        for number in range(count):
            name, own = USERS[number], Random(some.getrandbits(64))
            user = User(self.scene, name, own, users, self._is_quiet, self._harm, self._end)
            user.role = self._role("embed" + (number > 0) * f"-{name}", user.program)
            users.append(user)
        self._pace()
        note_discards(self._note_discard)
        return users

    def _is_quiet(self) -> bool:
        return self.world.now > self.faults.ends_at

    def _end(self) -> None:
        """Sometimes take the power when a command has said that it is finished."""
        if self.world.random.random() < DARK_SHARE:
            self.faults.go_dark(self.world.process)

    def _harm(self, deadly: Sequence[str], shaky: Sequence[str]) -> None:
        """Make texts do harm to the worker that embeds them."""
        self.harms.update(dict.fromkeys(shaky, self._may_kill_current))
        harm = self.world.random.choice([self._kill_current, self._hang])
        self.harms.update(dict.fromkeys(deadly, harm))
        harmful_texts(self.harms)

    def _pace(self) -> None:
        """Choose how fast corpora are read: at times slower than any timeout."""
        random = self.world.random
        rows, seconds = random.choice([2, 7, 30]), random.choice([0.0, 0.01, 0.1])
        if self.scene.lively and random.random() < SLOW_SHARE:
            seconds = READ_SECONDS_MAX * rows / max(SIZES)
        read_slowly(rows, seconds, self._note_reading)

    def _note_reading(self, sources: Sequence[str], begins: bool) -> None:  # noqa: FBT001 # a fact
        """Note that a run begins to read its sources, or has come to their end."""
        for user in self.users:
            if user.work is not None and user.work.request.sources == tuple(sources):
                user.work.note_reading(begins, self.world.now)

    def _note_discard(self, out: Path) -> None:
        """Note that a command, which may die over it, discards its output with its job's id."""
        for user in self.users:
            if user.work is not None and user.work.place.out == out:
                user.work.discarded = True

    def _settings(self) -> Settings:
        random = self.world.random
        part = random.choice([64, 200, 1500])
        window = random.choice([3 * part, 4000, 100_000])
        return Settings(
            source_roots=(str(self.directory),),
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
            sample_texts=SAMPLE_TEXTS,
            window_bytes_max=window,
            reuse_bytes_max=random.choice([1, 10_000]),
            farm_window_bytes_max=random.choice(
                [0, 2 * part]
            ),  # hardly enough for a part and the next
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
        """Note an error that ended a process.

        It is no defect if the process was to stop while the server was away, or if a sync failed.
        """
        self._say(f"{self.world.process.name} ended: {error!r}")
        if isinstance(error, OSError) and error.errno == errno.EIO:
            self.faults.end_by_failed_sync()
        elif isinstance(error, ComputesWrongly) and self.world.process.device == "damaged":
            DAMAGED.reach()
        elif not (role.stop.is_set() and isinstance(error, broker.UNAVAILABLE)):
            self.scene.fail(error)

    def log(self, message: str) -> None:
        """Log a message of the process that runs."""
        name = self.world.task.process.name if self.world.task is not None else ""
        self._say(f"{name}: {message}")

    def _detail(self, line: str) -> None:
        """Log a line that only a detailed log has."""
        if self.detailed:
            self.log(line)

    def _say(self, line: str) -> None:
        # Where the files are differs from run to run.
        self.trace(f"{self.world.now:9.4f}  {line}".replace(str(self.directory), ""))

    # What must hold.

    def _watch(self, server: ModelServer, words: list[bytes], reply: object) -> None:
        """Check what a command has changed, and perhaps let the server lose it."""
        try:
            self.monitor.look(server, words, reply, self.host.now_ms())
        except Broken as error:
            self.scene.fail(error)
        self.faults.undo_split(server.log)
        self.faults.undo_last(server.log)
        if self._lives is not None:
            self._lives.edit_at_the_end(server.log[-1][1])

    def _answered(self, words: list[bytes], reply: object) -> None:
        """Look at the answer to a command for states and mistakes, and log it in detail."""
        sightings.answered(words, reply)
        self.monitor.see_answer(words, reply, self.host.now_ms())
        if self.detailed:
            self._detail(f"{words!r} {reply!r}")
