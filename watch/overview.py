"""Jobs as people look at them: the same facts under the same names, wherever they look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.outlook import Outlook, OutlookReader, done_ratio
from embedfarm.contract.pace import Range
from embedfarm.contract.status import (
    ENDED_STATES,
    OVER_STATES,
    RUNNING,
    JobGone,
    JobStatus,
    JobUnreadable,
    status_from,
)
from embedfarm.contract.unreadable_records import names_of

STEP: Final = 1000  # jobs looked at in one round trip
LOOKED_MAX: Final = 10_000  # for one page
NOTES_MAX: Final = 10_000  # of a job, looked through for refusals

QUEUED: Final = "queued"
STATE_FIELDS: Final = ("state", "out", "first_chunk", "pushed_upto")

_FIELDS: Final = tuple(JobStatus.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class JobFacts(JobStatus):
    """A job: its name and model, its status, and what is wrong with it.

    `state` is the word for people: "queued" until a run begins to read the corpus of a job that was
    submitted, then "running"; "paused", "finished", "failed" or "cancelled". `late_seconds` is by
    how much it misses its deadline, as things are. `device_hours` are the hours of single devices
    that its results took, and `cost` is what they cost by the prices of their workers. `refused`
    has the reasons of workers that cannot embed it, by worker.
    """

    job: str
    name: str
    model: str
    late_seconds: float
    device_hours: float
    cost: float
    refused: dict[str, str]

    @property
    def moving(self) -> bool:
        """Whether the job is worked on, or will be: it is neither paused nor over."""
        return self.state in {QUEUED, RUNNING}


@dataclass(frozen=True, kw_only=True)
class JobProgress(JobFacts):
    """A job, how far it is, and how fast it goes.

    `done_ratio` is the share of its chunks that are embedded or failed, None while the corpus is
    still being read. Rates are over the last 15 seconds. `seconds_left` is the least and the most
    time that the rest will take; None while the corpus is read, the job stands still, or nobody
    can tell.
    """

    done_ratio: float | None
    tokens_per_second: float
    chunks_per_second: float
    seconds_left: Range | None


@dataclass(frozen=True, kw_only=True)
class JobDetails(JobProgress):
    """A job as it is shown alone: with `chunks_cached`, those whose vectors workers had cached."""

    chunks_cached: int


class JobChoice(NamedTuple):
    """Jobs that a list is to have; None is for any.

    Attributes:
        state: State of the jobs, as in `JobFacts`.
        tenant: Tenant of the jobs, "" for jobs without one.
        label: Label that the jobs have among others.
    """

    state: str | None = None
    tenant: str | None = None
    label: str | None = None


ANY_JOB: Final = JobChoice()


class Page(NamedTuple):
    """A page of jobs, and the cursor of the next page, None after the last one."""

    jobs: list[JobFacts]
    next: str | None


def read_job(farm: FarmClient, job: str) -> JobFacts:
    """Return the facts of one job.

    Raises:
        JobGone: There is no such job.
    """
    found = read_jobs(farm, [job])
    if not found:
        raise JobGone(job)
    return found[0]


def read_details(farm: FarmClient, job: str) -> JobDetails:
    """Return the facts of one job, how fast it goes, and what its workers say of it.

    Raises:
        JobGone: There is no such job.
    """
    facts = read_job(farm, job)
    seen = OutlookReader(farm, job).read(facts, farm.workers())
    cached = sum(each.chunks_cached for each in farm.reports.accounts(job).values())
    return JobDetails(**vars(facts), **progress(facts, seen), chunks_cached=cached)


def progress(status: JobStatus, seen: Outlook) -> dict[str, Any]:
    """Return the fields that `JobProgress` adds to a job's facts."""
    pace = seen.pace._asdict()
    return {"done_ratio": done_ratio(status), **pace, "seconds_left": seen.seconds_left}


def read_jobs(farm: FarmClient, jobs: Sequence[str]) -> list[JobFacts]:
    """Return the facts of those of the jobs that exist, in one round trip for each thousand."""
    stats = farm.plans.scheduler_stats()
    late = {} if stats is None else stats.late
    found = []
    for place in range(0, len(jobs), STEP):
        found += _read(farm, jobs[place : place + STEP], late)
    return found


def _read(farm: FarmClient, jobs: Sequence[str], late: Mapping[str, float]) -> list[JobFacts]:
    pipe = farm.client.pipeline(transaction=False)
    for job in jobs:
        meta = wire.JobKeys(job).meta
        pipe.hmget(meta, ["spec", "owner", *_FIELDS])
        pipe.hscan(meta, match="refused:*", count=NOTES_MAX)  # accounts stay where they are
    answers = pipe.execute(raise_on_error=False)
    found = []
    for job, values, notes in zip(jobs, answers[::2], answers[1::2], strict=True):
        for answer in (values, notes):
            if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
                raise answer
        try:
            facts = _describe(farm, job, values, notes, late.get(job, 0.0))
        except JobUnreadable as error:
            farm.on_unreadable(f"job {job}", str(error))
        except JobGone:
            continue
        else:
            if farm.sees(facts.tenant):
                found.append(facts)
    return found


def _describe(
    farm: FarmClient,
    job: str,
    values: Any,  # noqa: ANN401 # the server's reply, or what went wrong
    notes: Any,  # noqa: ANN401 # the server's reply, or what went wrong
    late_seconds: float,
) -> JobFacts:
    """Make the facts of a job out of the server's replies.

    Raises:
        JobGone: There is no such job.
        JobUnreadable: The job's key holds what no program of ours wrote.
    """
    if isinstance(values, redis.ResponseError):
        raise JobUnreadable(str(values))
    spec, owner, *fields = values
    if spec is None:
        raise JobGone(job)
    refused: Mapping[bytes, bytes] = notes[1]
    try:
        asked = decode(JobSpec, spec)
    except RecordError as error:  # another program's; it must not hide the others
        farm.on_unreadable(f"job {job}", str(error))
        asked, refused = JobSpec(model=""), {b"refused:every worker": str(error).encode()}
    status = status_from(_FIELDS, fields)
    return JobFacts(
        job=job,
        name=asked.name,
        model=asked.model,
        late_seconds=late_seconds,
        **status.spent._asdict(),
        refused={
            worker.decode(errors="replace").removeprefix("refused:"): reason.decode(
                errors="replace"
            )
            for worker, reason in sorted(refused.items())
            if reason
        },
        **vars(status) | {"state": name_state(status, owned=owner is not None)},
    )


def name_state(status: JobStatus, *, owned: bool) -> str:
    """Return the word that people are shown for the state of a job, as in `JobFacts`.

    Args:
        status: Of its fields at least those of `STATE_FIELDS`.
        owned: Whether the job has an owner: the output that a run fills, once there is a run.
    """
    is_new = status.moving and status.pushed_upto == status.first_chunk
    return QUEUED if is_new and status.out and not owned else status.shown_state


def read_page(farm: FarmClient, after: str, count: int, choice: JobChoice = ANY_JOB) -> Page:
    """Return a page of up to `count` of the jobs that are chosen.

    Unfinished jobs come first, oldest first, then those that have ended, newest first. Unless the
    farm is seen by one tenant, a page looks at about 10,000 jobs at most, so that it may have fewer
    than `count` and not be the last one.

    Args:
        farm: Farm that has the jobs.
        after: `next` of the page before; "" for the first page.
        count: Most jobs in the page.
        choice: The jobs that are wanted.

    Raises:
        redis.ResponseError: `after` is no cursor.
    """
    if farm.tenant is not None:
        if choice.tenant is not None and not farm.sees(choice.tenant):
            return Page([], None)
        choice = choice._replace(tenant=farm.tenant)
    chosen: list[str] = []
    looked, place = 0, after
    step = count + 1 if choice == ANY_JOB else STEP
    # A tenant's page ends at a job of the tenant, and only another one of these makes a next page.
    while looked < LOOKED_MAX or farm.tenant is not None:
        rows = _rows_after(farm.client, after, step, choice.state)
        looked += len(rows)
        for job, wanted in zip(
            rows, _match(farm.client, [each.job for each in rows], choice), strict=True
        ):
            if wanted and len(chosen) == count:
                return Page(read_jobs(farm, chosen), place)
            after = job.cursor
            if len(chosen) < count:
                place = after
            if wanted:
                chosen.append(job.job)
        if len(rows) < step:
            return Page(read_jobs(farm, chosen), None)
    return Page(read_jobs(farm, chosen), place)


class _Row(NamedTuple):
    """A job on the farm's list, and the cursor with which the list goes on after it."""

    job: str
    cursor: str


def _rows_after(client: redis.Redis, after: str, count: int, state: str | None) -> list[_Row]:
    """Return jobs of the farm's two lists; cursors of the second one begin with a minus sign."""
    rows: list[_Row] = []
    if not after.startswith("-") and state not in ENDED_STATES:
        rows = _rows(client, wire.JOBS, after, count, newest_first=False)
        after = ""
    if len(rows) < count and state in {None, *OVER_STATES}:
        place = after.removeprefix("-")
        rows += _rows(client, wire.ENDED, place, count - len(rows), newest_first=True)
    return rows


def _rows(
    client: redis.Redis, key: str, after: str, count: int, *, newest_first: bool
) -> list[_Row]:
    """Return jobs of a list in the order of their times, and by name where times are equal."""
    first, last = ("+inf", "-inf") if newest_first else ("-inf", "+inf")
    skipped = 0
    if after:
        first, _, name = after.partition(":")
        same = cast("list[bytes]", client.zrangebyscore(key, first, first))
        reached = name.encode()
        skipped = sum(each >= reached if newest_first else each <= reached for each in same)
    rows: Any = client.zrange(
        key, first, last,
        desc=newest_first, byscore=True, offset=skipped, num=count, withscores=True,
    )  # fmt: skip
    sign = "-" if newest_first else ""
    names = names_of(name for name, _ in rows)
    return [_Row(name, f"{sign}{at!r}:{name}") for name, (_, at) in zip(names, rows, strict=True)]


def _match(client: redis.Redis, jobs: Sequence[str], choice: JobChoice) -> list[bool]:
    """Tell for each of the jobs whether it exists and is one of those that are wanted."""
    pipe = client.pipeline(transaction=False)
    fields = (*STATE_FIELDS, "tenant", "labels")
    for job in jobs:
        pipe.hmget(wire.JobKeys(job).meta, ["owner", *fields])
    return [_is_like(fields, found, choice) for found in pipe.execute()]


def _is_like(fields: Sequence[str], values: Sequence[bytes | None], choice: JobChoice) -> bool:
    """Tell whether a job exists and is one of those that are wanted."""
    owner, *rest = values
    try:
        status = status_from(fields, rest)
    except JobUnreadable:
        return True  # whoever reads all of it reports it
    except JobGone:
        return False
    word = name_state(status, owned=owner is not None)
    return (
        choice.state in {None, word}
        and choice.tenant in {None, status.tenant}
        and (choice.label is None or status.has_label(choice.label))
    )
