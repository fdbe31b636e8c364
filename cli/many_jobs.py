"""`embedfarm jobs bulk`: one action on many jobs, after it is said on how many."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from embedfarm.cli.options import (
    AsJson,
    RedisUrl,
    fail,
    farm_settings,
    plain_errors,
    print_json,
)
from embedfarm.contract.broker import closing_client
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import counted
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobGone
from embedfarm.watch.job_actions import MANY_MAX, PRIORITY_OF, ChosenJobs, Verb, choose_jobs
from embedfarm.watch.job_search import Age, JobQuery, State
from embedfarm.watch.overview import JobFacts

NAMED_MAX: Final = 10


def bulk_jobs(  # noqa: PLR0913, PLR0917 -- each is a flag
    verb: Annotated[Verb, typer.Argument(help="What to do to them.")],
    words: Annotated[str, typer.Option(help="Words in name, id or model.")] = "",
    state: Annotated[State, typer.Option(help="State of the jobs.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant of the jobs.")] = "",
    label: Annotated[str, typer.Option(help="Label of the jobs.")] = "",
    age: Annotated[Age, typer.Option(help="When they were created.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which they are.")] = False,  # noqa: FBT002 -- a flag
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,  # noqa: FBT002 -- a flag
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Do something to all jobs that are found, at most 1,000, after asking whether it is meant."""
    settings = farm_settings(redis)
    query = JobQuery(words, state, tenant, label, age=age)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        chosen = choose_jobs(farm, query, verb)
        refused = _foresee(farm, settings, verb, chosen.jobs)
        able = [job for job in chosen.jobs if job.job not in refused]
        possible = chosen.possible - len(refused)
        if not as_json:
            typer.echo(_describe(verb, chosen._replace(jobs=able, possible=possible)))
        meant = yes or dry_run or not able or typer.confirm("Go on?", err=True)
        if not meant:
            fail("nothing was done")
        if not dry_run:
            refused |= _act(farm, settings, verb, able)
    if as_json:
        done = [job.job for job in able if job.job not in refused]
        facts = {"verb": verb, "dry_run": dry_run, "found": chosen.found}
        print_json(facts | {"possible": possible, "jobs": done, "refused": refused})
    for job, reason in refused.items():
        typer.echo(f"{job}: {reason}", err=True)
    if refused and not dry_run:
        fail(f"done to {len(chosen.jobs) - len(refused):,} of {counted(len(chosen.jobs), 'job')}")


def _describe(verb: Verb, chosen: ChosenJobs) -> str:
    """Describe to which jobs an action would be done."""
    lines = [f"{verb}: {counted(len(chosen.jobs), 'job')} of {chosen.found:,} found"]
    if chosen.possible > MANY_MAX:
        lines.append(f"  the first of {chosen.possible:,} to which it can be done")
    if not chosen.complete:
        lines.append("  among the newest jobs of the farm")
    lines += [f"  {job.job}  {job.state}  {job.name}" for job in chosen.jobs[:NAMED_MAX]]
    if len(chosen.jobs) > NAMED_MAX:
        lines.append(f"  and {len(chosen.jobs) - NAMED_MAX:,} more")
    return "\n".join(lines)


def _foresee(
    farm: FarmClient, settings: Settings, verb: Verb, jobs: Sequence[JobFacts]
) -> dict[str, str]:
    """Return why something could not be done to some of the jobs from here, by job."""
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.runs.request import request_of

    refused: dict[str, str] = {}
    for each in jobs if verb == "retry" else ():
        if each.state != "finished":
            refused[each.job] = _failed_again(farm, each.job)
            continue
        try:
            request_of(read_manifest(Path(each.out)), settings)
        except (EmbedfarmError, OSError) as error:
            refused[each.job] = str(error)
    return refused


def _failed_again(farm: FarmClient, job: str) -> str:
    """Say how to go on with a job that has failed, which only its own command can."""
    command = farm.job(job).noted("command")
    return f"it has failed; to go on with it: {command or 'run its command again'}"


def _act(
    farm: FarmClient, settings: Settings, verb: Verb, jobs: Sequence[JobFacts]
) -> dict[str, str]:
    """Do something to each of the jobs; return why it was not done, by job."""
    refused = {}
    for each in jobs:
        try:
            _act_on(farm, settings, verb, each)
        except JobGone:
            refused[each.job] = "there is no such job any more"
        except (EmbedfarmError, OSError) as error:
            refused[each.job] = str(error)
        except typer.Exit as error:
            if error.exit_code:
                refused[each.job] = "some of it failed again"
    return refused


def _act_on(farm: FarmClient, settings: Settings, verb: Verb, facts: JobFacts) -> None:
    """Do something to a job, whatever has become of it since it was chosen.

    Raises:
        JobGone: The job is not there any more.
        EmbedfarmError: It cannot be done in the state of the job.
    """
    from embedfarm.cli.embed import retry_output

    handle = farm.job(facts.job)
    match verb:
        case "pause":
            handle.pause()
        case "resume":
            handle.resume()
        case "cancel":
            handle.cancel()
        case "delete":
            if not handle.status().removable:
                raise NotDone("it is in work again")
            handle.delete()
        case "retry":
            if handle.status().state != "finished":
                raise NotDone(_failed_again(farm, facts.job))
            retry_output(facts, settings, as_json=False)
        case _:
            handle.set_terms(priority=PRIORITY_OF[verb])


class NotDone(EmbedfarmError, RuntimeError):
    """Raised where an action is not done to a job; the message says why."""
