"""Steps of users and operators with corpora, commands and jobs while a farm works."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.jobs import ChangeRefused, Job
from embedfarm.contract.status import JobGone
from tests.simulation.corpora import Corpus
from tests.simulation.farm import URL, Role
from tests.simulation.faults import DRAIN, Fault, Faults
from tests.simulation.monitor import Monitor
from tests.simulation.scene import Scene
from tests.simulation.states import State
from tests.simulation.users import User, Work
from tests.simulation.world import Process

STEPS_MIN: Final = 3
STEPS_MAX: Final = 8
PATIENCE_SECONDS: Final = 2.0  # for something to be there that a step is about
WEEK_SECONDS: Final = 7 * 86400.0
LEASES_MAX: Final = 8.0  # for which a process is stopped
OUTLIVE_SECONDS_MAX: Final = 15.0
LOOK_SECONDS: Final = 0.02
KILLED_SHARE: Final = 0.5  # of the commands that are stopped for a change; others get Ctrl-C
PAUSE_SECONDS_MAX: Final = 3.0
DEVICE_SECONDS_MAX: Final = 2.0  # that a job may take before it pauses itself
EDITS: Final = (
    Corpus.grow, Corpus.lose, Corpus.insert, Corpus.swap, Corpus.reorder, Corpus.change,
    Corpus.spoil,
)  # fmt: skip

OUTLIVED: Final = State(
    "worker goes on in the next life of its job", "it was stopped, and others lease its blocks"
)
BRAKED: Final = State("job paused itself", "one is at its limit when that is lifted")
READ_CHANGED: Final = State("corpus changed while it was read", "an edit comes within a reading")


@dataclass
class Lives:
    """Steps of users and operators, drawn like faults and among them.

    Attributes:
        users: The users, with their corpora and commands.
        workers: Roles of the workers.
        at_the_end: Whether a corpus is yet to be changed when all of it is on disk.
    """

    scene: Scene
    faults: Faults
    users: Sequence[User]
    workers: Sequence[Role]
    monitor: Monitor
    at_the_end: bool = False
    _operators: int = 0

    @property
    def random(self) -> random.Random:
        """The random numbers of the step that is being done."""
        return self.faults.random

    def plan(self, horizon: float) -> None:
        """Draw the steps of a run."""
        kinds: list[Fault] = [
            self.edit, self.edit, self.edit, self.edit_stopped, self.edit_stopped,
            self.stop_long, self.stop_long, self.outlive, self.outlive, self.week, self.pause,
            self.limit, self.cancel, self.delete, self.set_terms, self.read_pages, self.read_pages,
        ]  # fmt: skip
        some = self.scene.world.random
        for _ in range(some.randint(STEPS_MIN, STEPS_MAX)):
            self.faults.add(some.uniform(0.0, horizon), some.choice(kinds), PATIENCE_SECONDS)

    def _user(self) -> tuple[User, Work] | None:
        """Choose a user who has an output to make; return None if there is none."""
        busy = [(user, user.work) for user in self.users if user.work is not None]
        return self.random.choice(busy) if busy else None

    def _say(self, line: str) -> None:
        self.scene.say(line)

    # Corpora.

    def edit(self) -> float | None:
        """Change a corpus, whoever reads it."""
        if not (busy := self._user()):
            return None
        self._edit(busy[1])
        return 0.0

    def _edit(self, work: Work) -> None:
        change = self.random.choice(EDITS)
        self._say(f"corpus of {work.place.out.name}: {change.__name__}")
        READ_CHANGED.reach(work.reading)
        change(work.corpus)

    def edit_stopped(self) -> float | None:
        """Stop a command and change its corpus; the same command is run again."""
        if not (busy := self._user()) or not (role := busy[0].role) or not role.process:
            return None
        if self.random.random() < KILLED_SHARE:
            self._say(f"kill {role.process.name}")
            role.kill(role.process)
        else:
            self.faults.terminate_role(role, role.process)
        self._edit(busy[1])
        return 1.0

    def edit_at_the_end(self, words: Sequence[bytes]) -> None:
        """Once in some runs, change a corpus when all of it is on disk, and crash the server.

        The server forgets that all was sent, so that the corpus is read again just when its command
        is about to end. That seldom comes about by chance.

        Args:
            words: What the server has just written to its log.
        """
        if not self.at_the_end or DRAIN not in words:
            return
        for work in (user.work for user in self.users if user.work is not None):
            is_all = int(words[6]) >= len(work.corpus.versions[-1].texts)
            if is_all and work.keys.meta.encode() in words:
                self.at_the_end = False
                self.scene.world.call_at(self.scene.world.now, partial(self._undo_end, work))
                return

    def _undo_end(self, work: Work) -> None:
        self._edit(work)
        self.faults.undo_now("edit_at_the_end")

    # Time.

    def week(self) -> float:
        """Stop all processes and let a week go by; what expires on the server meanwhile is gone."""
        self._say("a week goes by")
        for role in self.faults.roles:
            role.days_seconds += WEEK_SECONDS
            if role.process is not None:
                role.kill(role.process)
        self.scene.host.clock_seconds += WEEK_SECONDS
        return 1.0

    def stop_long(self) -> float | None:
        """Stop a process, as by SIGSTOP, for two leases or more, and let it go on."""
        role = self.random.choice(self.faults.roles)
        if role.process is None:
            return None
        seconds = self.random.uniform(2.0, LEASES_MAX) * self.faults.lease_seconds
        return self.faults.freeze_for(role.process, seconds)

    def outlive(self) -> float | None:
        """Stop a worker until the job that it works on was made anew under its id.

        The job's command is killed, and its corpus has a bad row when it is run again. The worker
        goes on when somebody else has a lease of a block of the same name.
        """
        found = [
            (user, user.work, role, names)
            for user in self.users
            for role in self.workers
            if user.work and user.role and user.role.process and role.process
            if (names := self._leases(user.work, role))
        ]
        if not found:
            return None
        user, work, role, names = self.random.choice(found)
        process = role.process
        if process is None or user.role is None or user.role.process is None:
            return None
        self._say(f"{process.name} is stopped over {sorted(names)} of {work.place.job_id}")
        lives = self.monitor.views.lives.get(work.keys.meta.encode(), 0)
        self.scene.world.freeze(process)
        user.role.kill(user.role.process)
        work.corpus.spoil()
        until = self.scene.world.now + OUTLIVE_SECONDS_MAX
        self._wait_for_namesake(process, work, names, lives, until)
        return OUTLIVE_SECONDS_MAX

    def _leases(self, work: Work, role: Role) -> set[bytes]:
        """Return the names of the blocks of a job that a worker has leased."""
        server = self.scene.host.server
        leases = server.leases(work.keys.blocks.encode()) if server else {}
        device = b":" + role.name.replace("worker", "cpu").encode()
        return {name for name, lease in leases.items() if lease[0].endswith(device)}

    def _wait_for_namesake(
        self, process: Process, work: Work, names: set[bytes], lives: int, until: float
    ) -> None:
        """Let a process go on when its job was made anew and a block of a known name is leased."""
        world, server, keys = self.scene.world, self.scene.host.server, work.keys
        if process.dead:
            return
        made_anew = self.monitor.views.lives.get(keys.meta.encode(), 0) > lives
        leases = server.leases(keys.blocks.encode()) if server and made_anew else {}
        if names & leases.keys() or world.now > until:
            if world.now <= until:
                OUTLIVED.reach()
            self._say(f"{process.name} goes on")
            world.thaw(process)
            return
        again = partial(self._wait_for_namesake, process, work, names, lives, until)
        world.call_at(world.now + LOOK_SECONDS, again)

    # Operators.

    def pause(self) -> float | None:
        """Pause a job like `embedfarm jobs pause`, and resume it a while later."""
        if not (busy := self._user()):
            return None
        name = busy[1].place.job_id
        self._operate(name, Job.pause)
        seconds = self.random.uniform(0.0, PAUSE_SECONDS_MAX)
        self.scene.world.call_at(self.scene.world.now + seconds, partial(self._resume, name))
        return seconds

    def _resume(self, name: str) -> None:
        """Resume a job like `embedfarm jobs resume`, until nobody can pause it any more."""
        self._operate(name, Job.resume)
        world = self.scene.world
        if world.now <= self.faults.ends_at + PAUSE_SECONDS_MAX:
            world.call_at(world.now + PAUSE_SECONDS_MAX, partial(self._resume, name))

    def limit(self) -> float | None:
        """Limit a job's device time, at which it pauses itself, and lift that a while later."""
        if not (busy := self._user()):
            return None
        name = busy[1].place.job_id
        hours = self.random.uniform(0.0, DEVICE_SECONDS_MAX) / 3600

        def limit(job: Job) -> None:
            job.set_terms(max_hours=hours)

        self._operate(name, limit)
        seconds = self.random.uniform(0.0, PAUSE_SECONDS_MAX)
        self.scene.world.call_at(self.scene.world.now + seconds, partial(self._lift, name))
        return seconds

    def _lift(self, name: str) -> None:
        """Lift the limit of a job like `embedfarm jobs set`, until nobody can limit it any more."""

        def lift(job: Job) -> None:
            BRAKED.reach(bool(job.status().braked))
            job.set_terms(max_hours=0.0)

        self._operate(name, lift)
        world = self.scene.world
        if world.now <= self.faults.ends_at + PAUSE_SECONDS_MAX:
            world.call_at(world.now + PAUSE_SECONDS_MAX, partial(self._lift, name))

    def cancel(self) -> float | None:
        """Cancel a job like `embedfarm jobs cancel`."""
        return self._end(Job.cancel)

    def delete(self) -> float | None:
        """Delete a job like `embedfarm jobs rm --force`."""
        return self._end(Job.delete)

    def _end(self, verb: Callable[[Job], None]) -> float | None:
        if not (busy := self._user()):
            return None
        name = busy[1].place.job_id
        self.scene.steered.add(name)
        self._operate(name, verb)
        return 0.0

    def set_terms(self) -> float | None:
        """Change a job's priority and weight like `embedfarm jobs set`."""
        if not (busy := self._user()):
            return None
        some = self.random
        priority, weight = some.randrange(3), some.randint(1, 5)

        def change(job: Job) -> None:
            job.set_terms(priority=priority, weight=weight)

        self._operate(busy[1].place.job_id, change)
        return 0.0

    def _operate(self, name: str, verb: Callable[[Job], object]) -> None:
        """Run an operator's command in a process of its own; a refusal or a lost server ends it."""

        def command() -> None:
            with contextlib.suppress(JobGone, ChangeRefused, *UNAVAILABLE):
                with closing_client(URL) as client:
                    verb(FarmClient(client).job(name))
                self._say(f"{name}: {getattr(verb, '__name__', '')}")

        self._begin(command)

    def read_pages(self) -> float | None:
        """Let a client read the pages that an output has by now."""
        if not (busy := self._user()):
            return None
        work = busy[1]
        # The one makes other pages of it, the other takes them away, perhaps not in one go.
        if not (work.place.embed_changed or work.removing):
            self._begin(lambda: work.pages.read(work.place.out))
        return 0.0

    def _begin(self, command: Callable[[], None]) -> None:
        self._operators += 1

        def guarded() -> None:
            try:
                command()
            except Exception as error:  # noqa: BLE001 # a run fails by it
                self.scene.fail(error)

        process = Process(f"operator#{self._operators}")
        self.scene.world.spawn(process, "main", guarded)
