"""The files of a run as workers read texts in them: slowly, and at times in vain."""

import errno
import functools
from collections.abc import Iterable, Iterator
from random import Random
from typing import Final

from embedfarm.contract.source_places import SourceReference
from embedfarm.readers import references
from embedfarm.readers.items import CorpusError
from embedfarm.workers import source_texts
from embedfarm.workers.source_texts import SourceRefused
from tests.simulation.states import State, after
from tests.simulation.world import Effect, current

REFUSED_SHARE: Final = 0.05  # of readings
SLOW_SHARE: Final = 0.05
SLOW_SECONDS_MAX: Final = 1.5  # longer than a lease
READ_SECONDS_MAX: Final = 0.02
SENT: Final = "than when they were sent"  # how a worker says that rows are other ones

AWAY: Final = State("source refuses a worker", "a reading of texts is answered by EIO")
OTHERS: Final = State("rows changed before a worker read them", "`SourceRefused` is raised")
READ: Final = State("texts read where they lie", "a block that only refers to texts has them")

_texts_of: Final = references.texts_of


def read_by(random: Random) -> None:
    """Let a random number generator decide how workers of this process read texts."""

    def read(wanted: Iterable[SourceReference]) -> Iterator[list[str]]:
        slow = random.random() < SLOW_SHARE
        current().park(random.uniform(0.0, SLOW_SECONDS_MAX if slow else READ_SECONDS_MAX))
        current().effect(Effect.FILE)
        if random.random() < REFUSED_SHARE:
            AWAY.reach()
            raise CorpusError("the source refuses") from OSError(errno.EIO, "the source refuses")
        yield from _texts_of(wanted)

    setattr(references, "texts_of", read)  # noqa: B010 # in this process alone
    _note()


@functools.cache
def _note() -> None:
    """Count what workers find; all in this process alone."""
    after(source_texts, "_fill", lambda _answer, *_: READ.reach())
    after(source_texts, "with_texts", _see_refused)


def _see_refused(answer: object, *_: object) -> None:
    OTHERS.reach(isinstance(answer, SourceRefused))
