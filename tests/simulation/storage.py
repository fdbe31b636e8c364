"""A storage past the server: objects that are whole or absent, and what may go wrong with them.

A put may be slow, refused, or done though its reply is lost; a listing may be behind; one object of
a run may be damaged or lost without a word. Nothing that was put is forgotten by a power loss.
"""

import errno
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from embedfarm.collector import stored_vectors
from embedfarm.collector.sinks import stored_listing
from embedfarm.collector.stored_vectors import REMOVALS_MAX, VectorsLost
from embedfarm.runs import stored_place
from embedfarm.workers import result_storage
from tests.simulation.states import State
from tests.simulation.views import Broken
from tests.simulation.world import Effect, World, current

ROOT: Final = "simulated://storage"
SLOW_SHARE: Final = 0.05  # of puts
SLOW_SECONDS_MAX: Final = 1.5  # longer than a lease
PUT_SECONDS_MAX: Final = 0.02
REFUSED_SHARE: Final = 0.05  # of puts, reads and listings
BEHIND_SHARE: Final = 0.2  # of listings
DAMAGED_SHARE: Final = 0.3  # of runs, in which one object is damaged
DAMAGED_AMONG: Final = 8  # objects of a run, of which it is one

REPLY_LOST: Final = State("reply to a put lost", "an object is there, and its worker was refused")
REFUSED: Final = State("storage refuses", "a put, a read or a listing is answered by EIO or ENOSPC")
BEHIND: Final = State("listing behind", "an object is not in the listing of its place")
DAMAGED: Final = State("stored vectors damaged", "an object loses a bit, its end, or all of it")
ANEW: Final = State("stored vectors lost", "`VectorsLost` is raised, and they are made anew")
SWEPT: Final = State("object swept that nobody had read", "one of a worker whose commit came late")


@dataclass
class Storage:
    """The storage of a run.

    Attributes:
        random: Decides what goes wrong; other runs stay what they were.
        lossy: Tells whether the server has lost anything: what it brings back may be gone here.
        fail: Called with an error that should not have happened.
        lists: Whether outputs list what is stored, and leave it there.
        objects: The objects of each place, by name.
        made: When each place was made last, and by which program.
        removed: When each place was removed last.
        refusals: How often the removal of a place was refused, by process and place.
    """

    world: World
    random: Random
    lossy: Callable[[], object]
    fail: Callable[[Broken], None]
    lists: bool = False
    objects: dict[str, dict[str, bytes]] = field(default_factory=dict)
    made: dict[str, tuple[float, str]] = field(default_factory=dict)
    removed: dict[str, float] = field(default_factory=dict)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    put_at: dict[str, float] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    _damaged: int = -1

    def __post_init__(self) -> None:
        if self.random.random() < DAMAGED_SHARE:
            self._damaged = self.random.randrange(DAMAGED_AMONG)

    def open(self, place: str) -> "SimulatedFiles":
        """Return the objects of a place."""
        return SimulatedFiles(self, place)

    def refuse(self) -> None:
        """Raise an error for some calls."""
        if self.random.random() < REFUSED_SHARE:
            REFUSED.reach()
            raise OSError(self.random.choice([errno.EIO, errno.ENOSPC]), "the storage refuses")

    def damage(self, data: bytes) -> bytes | None:
        """Return what is kept of an object: all of it, but for one object of some runs.

        Of what an output lists a command sees the size alone: `verify` would see a flipped bit.
        """
        if len(self.put_at) != self._damaged:
            return data
        self._damaged = -1  # the same one, put again, would leave the count as it is
        DAMAGED.reach()
        place = self.random.randrange(max(1, len(data)))
        flipped = data[:place] + bytes(each ^ 64 for each in data[place : place + 1])
        kept = self.random.choice([None, data[:place], flipped + data[place + 1 :]])
        return data[:place] if self.lists and kept is not None else kept

    @property
    def program(self) -> str:
        """The name of the program whose process runs now."""
        return self.world.process.name.partition("#")[0]

    def left(self, since: float, listed: Collection[str]) -> list[str]:
        """Return what is not listed of places that this program has made since a moment.

        An object that was put behind the end of its job may stay, if its worker was killed then;
        and a place whose removal was refused as many times as a program tries.
        """
        return [
            f"{place}/{name}"
            for place, (made, by) in self.made.items()
            if made >= since
            and by == self.program
            and self.refusals[self.world.process.name, place] < REMOVALS_MAX
            for name in self.objects.get(place, {})
            if name not in listed and self.put_at[name] <= self.removed.get(place, self.world.now)
        ]


@dataclass(frozen=True)
class SimulatedFiles:
    """The objects of a place, like `embedfarm.contract.stored_results.UrlFiles`."""

    storage: Storage
    place: str

    @property
    def _objects(self) -> dict[str, bytes]:
        return self.storage.objects.setdefault(self.place, {})

    def may_pass(self, error: Exception) -> bool:
        """Tell whether an error may pass by waiting."""
        return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)

    def make(self) -> None:
        """Note when the place was made, and by which program."""
        self.storage.made[self.place] = self.storage.world.now, self.storage.program

    def put(self, name: str, data: bytes) -> None:
        """Put an object; a process may be killed before and after it."""
        storage, random = self.storage, self.storage.random
        slow = random.random() < SLOW_SHARE
        storage.world.park(random.uniform(0.0, SLOW_SECONDS_MAX if slow else PUT_SECONDS_MAX))
        storage.world.effect(Effect.FILE)
        storage.refuse()
        kept = storage.damage(bytes(data))
        storage.put_at[name] = storage.world.now
        if kept is not None:
            self._objects[name] = kept
        storage.world.effect(Effect.FILE)
        if random.random() < REFUSED_SHARE:
            REPLY_LOST.reach()
            raise OSError(errno.EIO, "the reply is lost")

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of an object that nobody may have deleted while it was needed."""
        storage = self.storage
        self._wait()
        if name in storage.deleted and not storage.lossy():
            storage.fail(Broken(f"{name} was deleted, and its receipt waits"))
        if name not in self._objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", name)
        storage.read.add(name)
        return self._objects[name][offset : offset + count]

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        self._wait()
        if name not in self._objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", name)
        return len(self._objects[name])

    def _wait(self) -> None:
        """Take a while to answer, or refuse; those who read the output answer at once."""
        if self.storage.world.task is not None:
            self.storage.world.park(self.storage.random.uniform(0.0, PUT_SECONDS_MAX))
            self.storage.refuse()

    def names(self) -> list[str]:
        """Return the names of the objects, at times without some."""
        self.storage.refuse()
        names = list(self._objects)
        if names and self.storage.random.random() < BEHIND_SHARE:
            BEHIND.reach()
            names = self.storage.random.sample(names, self.storage.random.randrange(len(names)))
        return names

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects that may be gone already."""
        for name in names:
            self.storage.world.effect(Effect.FILE)
            self.storage.refuse()
            if self._objects.pop(name, None) is not None:
                self.storage.deleted.add(name)
                SWEPT.reach(name not in self.storage.read)

    def remove(self, kept: Collection[str] = ()) -> None:
        """Delete all objects but those that are kept; the listing is whole by then."""
        try:
            self.storage.refuse()
            self.storage.removed[self.place] = self.storage.world.now
            self.delete([name for name in self._objects if name not in kept])
        except OSError:
            self.storage.refusals[self.storage.world.process.name, self.place] += 1
            raise


def put_on(storage: Storage | None) -> None:
    """Let workers and commands of this process use a storage, each result read by itself."""
    for module in (stored_vectors, stored_listing):
        setattr(module, "READ_BYTES", 1)  # noqa: B010 # in this process alone

    def open_place(place: str) -> SimulatedFiles:
        if storage is None:
            raise NotImplementedError(place)
        return storage.open(place)

    for module in (result_storage, stored_place, stored_listing):
        setattr(module, "open_place", open_place)  # noqa: B010 # in this process alone


@functools.cache
def note_losses() -> None:
    """Count the vectors that were found to be lost; all in this process alone."""
    begin = VectorsLost.__init__

    def made(error: VectorsLost, *words: object) -> None:
        begin(error, *words)
        if current().task is not None:
            ANEW.reach()

    setattr(VectorsLost, "__init__", made)  # noqa: B010 # the type checker forbids it
