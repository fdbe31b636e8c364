"""Search among the jobs of a farm: by words, state, tenant and age, in an order of choice."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.status import JobGone, JobStatus, status_from
from embedfarm.contract.unreadable_records import names_of
from embedfarm.watch.overview import STATE_FIELDS, name_state

STEP: Final = 1000  # jobs looked at in one round trip
LOOKED_MAX: Final = 20_000  # jobs looked through, those in work first and then the newest

State: TypeAlias = Literal[
    "", "queued", "running", "paused", "finished", "incomplete", "failed", "cancelled"
]
Age: TypeAlias = Literal["", "hour", "day", "week", "before-day", "before-week"]
Order: TypeAlias = Literal["newest", "oldest", "name", "chunks", "failures"]

_ORDER_FIELDS: Final[Mapping[Order, str]] = {"chunks": "chunk_count", "failures": "chunks_failed"}

AGE_SECONDS: Final[Mapping[str, float]] = {"hour": 3600, "day": 86_400, "week": 7 * 86_400}
BEFORE: Final = "before-"  # how an age begins that is more than that


@dataclass(frozen=True)
class JobQuery:
    """What jobs somebody looks for.

    Attributes:
        words: Words that are all in the job's name, id or model, in any case.
        state: State of the jobs as `JobFacts` has it, "" for any; "incomplete" for those that
            finished without some of their chunks.
        tenant: Tenant of the jobs, "" for any.
        label: Label that the jobs have, "" for any.
        corpus: Corpus of the jobs as their status names it, "" for any.
        age: Time within which they were created, or before which; "" for any.
        order: Which comes first: the newest, the oldest, the first by name, the largest, or the
            one with the most failed chunks.
    """

    words: str = ""
    state: State = ""
    tenant: str = ""
    label: str = ""
    corpus: str = ""
    age: Age = ""
    order: Order = "newest"

    @property
    def fields(self) -> list[str]:
        """The fields of a job's status that tell whether it is found, and where it comes."""
        wanted = {"state", "tenant", "created_ms"}
        if self.state:
            wanted |= {*STATE_FIELDS, "chunks_failed"}
        if self.label:
            wanted.add("labels")
        if self.corpus:
            wanted.add("corpus")
        if self.order in _ORDER_FIELDS:
            wanted.add(_ORDER_FIELDS[self.order])
        return sorted(wanted)

    @property
    def other_fields(self) -> list[str]:
        """The other fields of a job's hash that tell so."""
        spec = ["spec"] if self.words or self.order == "name" else []
        return [*spec, *(["owner"] if self.state else [])]


class FoundJobs(NamedTuple):
    """Jobs that a search has found.

    Attributes:
        jobs: Their ids, in the order that was asked for.
        of: Number of jobs that were looked at.
        complete: Whether these are all that there are.
    """

    jobs: list[str]
    of: int
    complete: bool


class _Looked(NamedTuple):
    """What a search looks at of a job: only what its query needs is known."""

    job: str
    status: JobStatus
    owned: bool
    spec: bytes | None

    def asked(self) -> JobSpec:
        """Return what the job asks for, if that can be read: making it takes longest."""
        try:
            return JobSpec(model="") if self.spec is None else decode(JobSpec, self.spec)
        except RecordError:  # of another version: the job is found by its id
            return JobSpec(model="")

    def is_in(self, state: State) -> bool:
        """Tell whether the job is in a state that somebody looks for."""
        if not state:
            return True
        found = name_state(self.status, owned=self.owned)
        if state == "incomplete":
            return found == "finished" and self.status.chunks_failed > 0
        return state == found

    def name(self) -> str:
        """Return the job's name for people, in small letters."""
        return (self.asked().name or self.job).casefold()

    def has(self, words: Sequence[str]) -> bool:
        """Tell whether all the words, in small letters, are in the job's name, id or model."""
        # Decoding a record takes longest, and all of its text stands in its bytes.
        text = f"{self.job} {(self.spec or b'').decode(errors='replace')}".casefold()
        if not all(word in text for word in words):
            return False
        asked = self.asked()
        text = f"{asked.name} {self.job} {asked.model}".casefold()
        return all(word in text for word in words)


_KEYS: Final[Mapping[Order, Callable[[_Looked], Any]]] = {
    "newest": lambda row: -row.status.created_ms,
    "oldest": lambda row: row.status.created_ms,
    "name": lambda row: row.name(),
    "chunks": lambda row: -row.status.chunk_count,
    "failures": lambda row: -row.status.chunks_failed,
}


def search_jobs(farm: FarmClient, query: JobQuery) -> FoundJobs:
    """Find the jobs that a query asks for, among the newest 20,000 that the farm knows.

    Raises:
        redis.ConnectionError, redis.TimeoutError: The server is away.
    """
    after_ms, before_ms = _times(query.age)
    words = query.words.casefold().split()
    looked, found, rows = 0, list[_Looked](), _rows(farm, query)
    for row in islice(rows, LOOKED_MAX):
        looked += 1
        if (
            after_ms <= row.status.created_ms < before_ms
            and query.tenant in {"", row.status.tenant}
            and row.is_in(query.state)
            and (not query.label or row.status.has_label(query.label))
            and query.corpus in {"", row.status.corpus}
            and (not words or row.has(words))
        ):
            found.append(row)
    found.sort(key=lambda row: (_KEYS[query.order](row), row.job))
    return FoundJobs([row.job for row in found], looked, next(rows, None) is None)


def _times(age: Age) -> tuple[float, float]:
    """Return the Unix ms from which on, and before which, jobs of an age were created."""
    if not age:
        return 0.0, math.inf
    at = 1000 * (time.time() - AGE_SECONDS[age.removeprefix(BEFORE)])
    return (0.0, at) if age.startswith(BEFORE) else (at, math.inf)


def _rows(farm: FarmClient, query: JobQuery) -> Iterator[_Looked]:
    """Yield what a query needs of each job that is there and that the farm's caller sees."""
    fields, others = query.fields, query.other_fields
    # A tenant's may lie behind any number of other people's.
    last = LOOKED_MAX if farm.tenant is None else -1
    newest: list[bytes] = [
        *farm.client.zrevrange(wire.JOBS, 0, last),
        *farm.client.zrevrange(wire.ENDED, 0, last),
    ]
    names = list(dict.fromkeys(names_of(newest)))
    for place in range(0, len(names), STEP):
        some = names[place : place + STEP]
        pipe = farm.client.pipeline(transaction=False)
        for job in some:
            pipe.hmget(wire.JobKeys(job).meta, [*fields, *others])
        for job, values in zip(some, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(values, redis.ResponseError) and "WRONGTYPE" in str(values):
                continue  # another program's key, which `read_jobs` reports
            if isinstance(values, Exception):
                raise values
            with contextlib.suppress(JobGone):  # or unreadable, which `read_jobs` reports
                status = status_from(fields, values[: len(fields)])
                more = dict(zip(others, values[len(fields) :], strict=True))
                if farm.sees(status.tenant):
                    yield _Looked(job, status, more.get("owner") is not None, more.get("spec"))
