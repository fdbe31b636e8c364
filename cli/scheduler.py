"""`embedfarm scheduler`: show the scheduler's figures and decisions, and choose its passes."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embedfarm.cli.options import (
    USAGE,
    AsJson,
    RedisUrl,
    fail,
    farm_settings,
    plain_errors,
    print_json,
    read_settings,
)
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import moment_of

if TYPE_CHECKING:
    from collections.abc import Sequence

scheduler_app = typer.Typer(
    help="Show the scheduler's figures and decisions, and choose its passes.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of the pass, as `scheduler passes` shows it.")]
Before = Annotated[str, typer.Option(help="Put it before this pass; default: at the end.")]
Policy = Annotated[
    str, typer.Argument(help="Name of the policy, as `simulate --list` shows it; default: fair.")
]
Worker = Annotated[str, typer.Option(help="Worker to explain decisions for; default: all.")]
Count = Annotated[
    int, typer.Option("--last", min=1, max=100, help="Number of decisions, newest last.")
]


@scheduler_app.command("passes")
def list_passes(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """List the passes of a decision in their order, and the others that there are."""
    from embedfarm.scheduler.policies import pass_names

    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        active = _active(FarmClient(client))
    others = [name for name in pass_names() if name not in active]
    if as_json:
        print_json({"active": active, "others": others})
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(" → ".join(active))
    console.print(f"[dim]not used: {', '.join(others)}[/dim]")


@scheduler_app.command("add-pass")
def add_pass(name: Name, before: Before = "", redis: RedisUrl = "") -> None:
    """Add a pass, from the next decision on."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        names = _active(farm)
        if name in names:
            fail(f"{name} is there already: {', '.join(names)}", USAGE)
        if before and before not in names:
            fail(f"{before!r} is none of {', '.join(names)}", USAGE)
        place = names.index(before) if before else len(names)
        _use(farm, [*names[:place], name, *names[place:]])


@scheduler_app.command("remove-pass")
def remove_pass(name: Name, redis: RedisUrl = "") -> None:
    """Leave a pass out, from the next decision on."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        names = _active(farm)
        if name not in names:
            fail(f"{name!r} is none of {', '.join(names)}", USAGE)
        _use(farm, [each for each in names if each != name])


@scheduler_app.command("use")
def use_policy(policy: Policy = "fair", redis: RedisUrl = "") -> None:
    """Take the passes of a policy, from the next decision on."""
    from embedfarm.scheduler.policies import POLICIES

    if policy not in POLICIES:
        fail(f"{policy!r} is none of {', '.join(POLICIES)}", USAGE)
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        _use(FarmClient(client), POLICIES[policy])


@scheduler_app.command("explain")
def explain(
    worker: Worker = "",
    last: Count = 1,
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Show what each pass did in the last decisions, of which one in a second is kept."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        decisions = [each.about(worker) for each in FarmClient(client).plans.decisions(last)]
    if not decisions:
        fail("no scheduler has decided anything yet")
    if as_json:
        print_json([msgspec.structs.asdict(each) for each in decisions])
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in reversed(decisions):
        at = moment_of(each.time).astimezone()
        console.print(f"[bold]{at:%H:%M:%S}[/bold], decided in {1e3 * each.seconds:.1f} ms")
        for name in each.passes:
            words = [escape(said) for by, said in each.notes if by == name]
            if name in each.left_out:
                words.append(f"[dim]notes not kept: {each.left_out[name]:,}[/dim]")
            console.print(f"  {name:10}{words[0] if words else '[dim]nothing to do[/dim]'}")
            for said in words[1:]:
                console.print(f"{'':12}{said}")


@scheduler_app.command("stats")
def show_stats(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Show figures of the active scheduler, over the last minute."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        stats = FarmClient(client).plans.scheduler_stats()
    if stats is None:
        fail("no scheduler is active")
    if as_json:
        print_json(msgspec.structs.asdict(stats))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("passes", " → ".join(stats.passes))
    for name, reason in stats.dropped.items():
        table.add_row("left out", f"{name}: {reason}")
    mean, p99 = stats.micro_batch_seconds_mean, stats.micro_batch_seconds_p99
    table.add_row(
        "micro-batches", f"{stats.micro_batches:,}, {mean:.2f} s on average, P99 {p99:.2f} s"
    )
    table.add_row("tokens", f"{stats.tokens:,}, {stats.tokens_per_second:,.0f} a second lately")
    table.add_row(
        "efficiency", f"{stats.efficiency:.1%} of what the workers could do at their rates"
    )
    table.add_row("prediction", f"{stats.prediction_error:.1%} off, median")
    table.add_row("padding", f"{stats.padding:.1%} of the real tokens")
    mean, p99 = 1e3 * stats.decision_seconds_mean, 1e3 * stats.decision_seconds_p99
    table.add_row("decisions", f"{stats.decisions:,}, {mean:.2f} ms on average, P99 {p99:.2f} ms")
    Console(highlight=False, soft_wrap=True).print(table)


def _active(farm: FarmClient) -> list[str]:
    """Return the passes that are chosen, else those of the default policy."""
    from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES

    return farm.plans.policy() or list(POLICIES[DEFAULT_POLICY])


def _use(farm: FarmClient, names: "Sequence[str]") -> None:
    """Choose passes that can be had and that give workers something to do."""
    from embedfarm.scheduler.policies import PolicyRefused, check_policy

    try:
        check_policy(names, read_settings())
    except PolicyRefused as error:
        fail(str(error), USAGE)
    farm.plans.set_policy(names)
    Console(highlight=False, soft_wrap=True).print(" → ".join(names))
