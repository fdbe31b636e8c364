"""The timeline: what happened on a farm, to which job or worker, and who did it."""

import getpass
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from embedfarm.contract import wire
from embedfarm.contract.broker import host_name, if_allowed, if_room
from embedfarm.contract.encoding import Record, encode
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.formatting import one_line
from embedfarm.contract.unreadable_records import readable_entries

TIMELINE_MAX: Final = 2000  # events, of all jobs and workers together
STEP: Final = 500  # read in one round trip
NOTE_CHARACTERS_MAX: Final = 500

LOGGER: Final = logging.getLogger(__name__)

Happening: TypeAlias = Literal[
    "submitted", "first vectors", "paused", "resumed", "cancelled", "changed", "late", "finished",
    "failed", "deleted",
    "joined", "left", "lost", "returned", "restarted", "ended", "loaded", "refused",
    "computes wrongly", "took over", "pass failed",
]  # fmt: skip

_WORDS: Final[dict[str, str]] = {
    "submitted": "job {job} was submitted",
    "first vectors": "job {job} has its first vectors",
    "paused": "job {job} was paused",
    "resumed": "job {job} was resumed",
    "cancelled": "job {job} was cancelled",
    "changed": "job {job} has other terms",
    "late": "job {job} will miss its deadline",
    "finished": "job {job} is finished",
    "failed": "job {job} has failed",
    "deleted": "job {job} was deleted",
    "joined": "worker {worker} joined the farm",
    "left": "worker {worker} left the farm",
    "lost": "worker {worker} is lost",
    "returned": "worker {worker} is heard of again",
    "restarted": "worker {worker} was started again",
    "ended": "process {worker} ended",
    "loaded": "worker {worker} loaded a model",
    "refused": "worker {worker} cannot embed job {job}",
    "computes wrongly": "worker {worker} stopped, since its device computes wrongly",
    "took over": "a scheduler became the active one",
    "pass failed": "a pass of the scheduler failed and is left out",
}


_WARNED: Final = frozenset({"late", "lost", "refused", "computes wrongly", "pass failed"})
_BAD: Final = _WARNED | {"failed", "ended"}


class FarmEvent(Record):
    """Something that happened on a farm.

    Attributes:
        kind: What happened.
        job: The job that it happened to, "" for none.
        worker: The worker that it happened to, "" for none. Of a process that "ended" and is
            none, its name among the processes of its host.
        by: Who did it: an account at a host, or a key of HTTP; "" where nobody did.
        note: More about it, for people.
    """

    kind: Happening
    job: str = ""
    worker: str = ""
    by: str = ""
    note: str = ""

    def sentence(self) -> str:
        """Return what happened in words, as it is shown and logged."""
        said = _WORDS[self.kind].format(job=self.job, worker=self.worker)
        by = f" by {self.by}" if self.by else ""
        note = f": {self.note}" if self.note else ""
        return one_line(f"{said}{by}{note}", NOTE_CHARACTERS_MAX)


@dataclass(frozen=True, kw_only=True)
class TimedEvent:
    """A `FarmEvent` with its place in the timeline, its Unix time, and what happened in words."""

    id: str
    time_ms: int
    kind: Happening
    job: str
    worker: str
    by: str
    note: str
    sentence: str

    @property
    def is_bad(self) -> bool:
        """Whether it is something that nobody wanted."""
        return self.kind in _BAD


@dataclass
class Timeline(FarmKeys):
    """The newest 2,000 events of a farm, on the server; for people, so losing some is harmless."""

    def add(self, *events: FarmEvent) -> None:
        """Add events, and log each of them."""
        if not events:
            return
        pipe = self.client.pipeline(transaction=False)
        for event in events:
            level = logging.WARNING if event.kind in _WARNED else logging.INFO
            LOGGER.log(level, "%s", event.sentence())
            pipe.xadd(
                wire.TIMELINE, {"event": encode(event)}, maxlen=TIMELINE_MAX, approximate=True
            )
        with if_room(), if_allowed():
            pipe.execute()

    def newest(self, count: int, job: str = "", after: str = "") -> list[TimedEvent]:
        """Return the last `count` events, newest first; a tenant sees those of its own jobs.

        A tenant sees what happened since the job was last submitted: before that another tenant may
        have had the name.

        Args:
            count: Most events to return.
            job: The job that they must be about; "" for any, which a tenant may not ask for.
            after: ID of an entry; only events after that one are returned.
        """
        found: list[TimedEvent] = []
        if self.tenant is not None and not (job and self.own([job])):
            return found
        for entry in self._backwards(f"({after}" if after else "-"):
            if not job or entry.job == job:
                found.append(entry)
            begins = entry.kind == "submitted" and entry.job == job
            if len(found) == count or (begins and self.tenant is not None):
                break
        return found

    def _backwards(self, least: str) -> Iterator[TimedEvent]:
        """Yield all events, newest first, from as many entries as are wanted."""
        most = "+"
        while True:
            rows = cast("list[Any]", self.client.xrevrange(wire.TIMELINE, most, least, count=STEP))
            for entry, event in readable_entries(
                FarmEvent, b"event", rows, wire.TIMELINE, self.on_unreadable
            ):
                yield TimedEvent(
                    id=entry,
                    time_ms=int(entry.partition("-")[0]),
                    sentence=event.sentence(),
                    **msgspec.structs.asdict(event),
                )
            if len(rows) < STEP:
                return
            most = f"({rows[-1][0].decode()}"


@cache
def account() -> str:
    """Return the account at this host that the program runs under, such as "ann@gpu-1"."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        name = "somebody"
    return f"{name}@{host_name()}"
