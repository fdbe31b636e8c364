"""`embedfarm jobs`: list the farm's jobs, and pause, resume, cancel, retry or remove them."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from embedfarm.cli.job_table import job_table
from embedfarm.cli.many_jobs import bulk_jobs
from embedfarm.cli.options import (
    INTERRUPTED,
    USAGE,
    AsJson,
    RedisUrl,
    fail,
    farm_settings,
    plain_errors,
    print_json,
    read_settings,
    stop_on_signals,
)
from embedfarm.cli.progress import View, describe_progress
from embedfarm.cli.run_table import run_table
from embedfarm.cli.term_options import (
    PriorityName,
    describe_deadline,
)
from embedfarm.contract.broker import closing_client, persist
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import format_moment, format_seconds
from embedfarm.contract.jobs import Job
from embedfarm.contract.outlook import OutlookReader
from embedfarm.contract.scheduling_terms import (
    LIMITS,
    PRIORITIES,
    USUAL,
    WEIGHT_MAX,
    TermChanges,
    priority_name,
    read_deadline,
)
from embedfarm.contract.status import JobGone, JobStatus
from embedfarm.watch.corpus_runs import figures_of, last_runs
from embedfarm.watch.overview import JobFacts, read_details, read_job, read_jobs

ENDED_MAX: Final = 1000  # shown
EVENTS_MAX: Final = 20  # of a job's timeline
WATCH_SECONDS: Final = 0.5

jobs_app = typer.Typer(help="List, show and steer the farm's jobs.", no_args_is_help=True)
jobs_app.command("bulk")(bulk_jobs)
JobId = Annotated[str, typer.Argument(help="Id as `jobs ls` shows it, or its beginning.")]


@jobs_app.command("ls")
def list_jobs(
    ended: Annotated[bool, typer.Option("--ended", help="List jobs that have ended.")] = False,  # noqa: FBT002 -- a flag
    label: Annotated[str, typer.Option(help="Only jobs with this label.")] = "",
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """List the jobs on the server, oldest first; with --ended those that ended, newest first."""
    with on_farm(redis) as farm:
        open_ids, ended_ids = farm.job_ids(), farm.ended_ids(ENDED_MAX)
        found = read_jobs(farm, ended_ids if ended else open_ids)
    jobs = [each for each in found if not label or each.has_label(label)]
    if as_json:
        print_json([_describe_job(each) for each in jobs])
    else:
        Console().print(job_table(jobs, [*open_ids, *ended_ids]))


@jobs_app.command("show")
def show_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Show one job: what it asks for, how far it is, how fast it goes, and who refused it."""
    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        facts = _describe_job(read_details(farm, handle.id))
        timeline = farm.timeline.newest(EVENTS_MAX, handle.id)
    if as_json:
        print_json(facts | {"timeline": [asdict(entry) for entry in timeline]})
        return
    facts["priority"] = priority_name(facts["priority"])
    deadline = facts["deadline_ms"]
    late = facts.pop("late_seconds")
    facts["deadline_ms"] = describe_deadline(deadline, late) if deadline else "none"
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:20} {value}", markup=False)
    for place, entry in enumerate(reversed(timeline)):
        at = format_moment(entry.time_ms / 1000)
        console.print(f"{'' if place else 'timeline':20} {at}  {entry.sentence}", markup=False)


@jobs_app.command("runs")
def show_runs(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Show the last jobs of the same corpus side by side: rates, costs, failures."""
    with on_farm(redis) as farm:
        runs = last_runs(farm, read_job(farm, find_job(farm, job).id))
    if as_json:
        print_json([asdict(figures_of(each)) for each in runs])
    elif runs:
        Console().print(run_table(runs))
    else:
        typer.echo("nobody can tell which other jobs have the corpus: it was uploaded or piped in")


@jobs_app.command("pause")
def pause_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Lease no more blocks of a job until it is resumed; what is leased is still embedded."""
    _change(job, redis, Job.pause, as_json=as_json)


@jobs_app.command("resume")
def resume_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Go on with a paused job."""
    _change(job, redis, Job.resume, as_json=as_json)


@jobs_app.command("cancel")
def cancel_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Stop a job for good; what is embedded already stays with its collector."""
    _change(job, redis, Job.cancel, as_json=as_json)


@jobs_app.command("rm")
def remove_job(
    job: JobId,
    force: Annotated[bool, typer.Option("--force", help="Also a job in work.")] = False,  # noqa: FBT002 -- a flag
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Delete a job that was cancelled or collected from the server; its output can be resumed."""
    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        status = handle.status()
        if not (status.removable or force):
            fail(f"job {handle.id} is {status.shown_state}: cancel it first, or give --force")
        handle.delete()
    if as_json:
        print_json({"job": handle.id, "state": "gone"})
    else:
        typer.echo(f"{handle.id} is gone")


@jobs_app.command("set")
def set_terms(  # noqa: PLR0913, PLR0917 -- each is a flag
    job: JobId,
    priority: Annotated[PriorityName | None, typer.Option(help="Priority over other jobs.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant that the job is done for.")] = None,
    weight: Annotated[
        int | None, typer.Option(min=1, max=WEIGHT_MAX, help="Weight among the tenant's jobs.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO 8601, or from now: 2h, 90m; or none.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Labels instead of those it has.")
    ] = None,
    max_hours: Annotated[float | None, typer.Option(min=0, help="Device-hours; 0: any.")] = None,
    max_cost: Annotated[float | None, typer.Option(min=0, help="Cost; 0: any.")] = None,
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Change terms of a job; one that has paused itself goes on if it may take more now."""
    try:
        changes: TermChanges = {
            "priority": None if priority is None else PRIORITIES[priority],
            "tenant": tenant,
            "weight": weight,
            "deadline_ms": None if deadline is None else read_deadline(deadline),
            "labels": labels,
            "max_hours": max_hours,
            "max_cost": max_cost,
        }
        if set(changes.values()) == {None}:
            flags = ", ".join(f"--{name.removesuffix('_ms').replace('_', '-')}" for name in changes)
            fail(f"nothing to set: give one of {flags}", USAGE)
        _change(job, redis, lambda handle: handle.set_terms(**changes), as_json=as_json)
    except ValueError as error:
        fail(str(error), USAGE)


@jobs_app.command("errors")
def show_errors(
    job: JobId,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most chunks to show.")] = 100,
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """List the chunks of a job that failed so far, with the reasons, in order of failing."""
    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        failed = handle.status().chunks_failed
        _, failures = handle.results.failures(limit)
    if as_json:
        print_json([msgspec.structs.asdict(failure) for failure in failures])
        return
    console = Console(highlight=False)
    if not failures:
        console.print(f"no chunk of {handle.id} has failed")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("chunk", "attempts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for failure in failures:
        table.add_row(f"{failure.index:,}", str(failure.attempts), Text(failure.reason))
    console.print(table)
    if failed > len(failures):
        console.print(f"and {failed - len(failures):,} more")


@jobs_app.command("retry")
def retry_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Embed what failed of a finished job once more, and put it into its output."""
    from embedfarm.cli.embed import retry_output

    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        status = handle.status()
        command = handle.noted("command")
    if status.state != "finished":
        again = f"; to go on with it: {command}" if status.state == "failed" and command else ""
        fail(f"job {handle.id} is {status.shown_state}: there is nothing to retry{again}")
    retry_output(status, farm_settings(redis), as_json=as_json)


@jobs_app.command("watch")
def watch_job(job: JobId, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """See how a job goes until it ends; --json: a line for each change; status 1: not finished."""
    stop = stop_on_signals()
    last: JobStatus = JobStatus()
    with (
        on_farm(redis) as farm,
        View(Console(), lines=as_json or not sys.stdout.isatty()) as show,
    ):
        handle = find_job(farm, job)
        outlook = OutlookReader(farm, handle.id)
        line = ""
        for facts in _follow(farm, handle.id, stop):
            said = {name: getattr(facts, name) for name in JobStatus.__dataclass_fields__}
            before, line = line, json.dumps({"job": handle.id, **said})
            if not as_json:
                show(facts, farm.workers(), outlook)
            elif line != before:
                typer.echo(line)
            last = facts
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)
    if last.state == "cancelled":
        fail(f"job {handle.id} is cancelled")
    if last.state == "failed":
        fail(f"job {handle.id} has failed: {last.reason}")
    if not last.ended:  # it was deleted
        fail(f"job {handle.id} has left the farm; when last seen, {describe_progress(last)}")
    if not as_json:
        typer.echo(f"{handle.id} is finished: {describe_progress(last)}")


def _follow(farm: FarmClient, job: str, stop: threading.Event) -> Iterator[JobFacts]:
    """Yield the job's facts now and then, until it has ended or is gone, or `stop` is set."""
    seconds_max = read_settings().reconnect_seconds_max
    while not stop.is_set():
        try:
            facts = persist(lambda: read_job(farm, job), stop, seconds_max)
        except JobGone:
            return
        yield facts
        if facts.over:
            return
        stop.wait(WATCH_SECONDS)


@contextmanager
def on_farm(redis: str) -> Iterator[FarmClient]:
    """Open the farm on the server that is meant; errors become a sentence and an exit status."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        yield FarmClient(client)


def find_job(farm: FarmClient, name: str) -> Job:
    """Return the job of that id, or the only one whose id begins so.

    Raises:
        JobGone: There is no such job.
    """
    known = [*farm.job_ids(), *farm.ended_ids(ENDED_MAX)]
    found = [job for job in known if job.startswith(name)]
    if name in found or not found:
        found = [name]
    if len(found) > 1:
        fail(f"{name} is the beginning of {len(found)} jobs", USAGE)
    if not farm.exists(found[0]):
        raise JobGone(found[0])
    return farm.job(found[0])


def _change(job: str, redis: str, change: Callable[[Job], object], *, as_json: bool) -> None:
    """Change a job, and say how it is now."""
    with on_farm(redis) as farm:
        handle = find_job(farm, job)
        change(handle)
        status = read_job(farm, handle.id)
    if as_json:
        names = ("state", "priority", "tenant", "weight", "deadline_ms", "labels", *LIMITS)
        print_json({"job": handle.id} | {name: getattr(status, name) for name in names})
    else:
        typer.echo(", ".join([f"{handle.id} is {status.state}", *_describe_terms(status)]))


def _describe_terms(status: JobStatus) -> Iterator[str]:
    """Yield words for each term that is not the usual one."""
    if status.priority != USUAL.priority:
        yield f"priority {priority_name(status.priority)}"
    if status.tenant:
        yield f"tenant {status.tenant}"
    if status.weight != USUAL.weight:
        yield f"weight {status.weight}"
    if status.labels:
        yield f"labels {status.labels}"
    for name in LIMITS:
        if limit := getattr(status, name):
            yield f"{name} {limit:g}"
    if status.deadline_ms:
        yield f"deadline {describe_deadline(status.deadline_ms)}"


def _describe_job(facts: JobFacts) -> dict[str, Any]:
    """Return the facts of a job by name, beginning with what people look for."""
    return {
        "job": facts.job,
        "name": facts.name,
        "model": facts.model,
        "age": format_seconds(max(0.0, time.time() - facts.created_ms / 1000)),
        **asdict(facts),
    }
