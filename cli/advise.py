"""`embedfarm advise`: how many workers of each kind end the backlog in time at least cost."""

import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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
)
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import counted, format_count, format_seconds, one_line
from embedfarm.contract.scheduling_terms import read_deadline
from embedfarm.contract.settings import Settings
from embedfarm.contract.settings.advice_limits import KIND_PATTERN
from embedfarm.contract.spending import format_cost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from embedfarm.watch.advised_workers import Advice, KindAdvice, ModelAdvice

NAME_CHARACTERS_MAX = 50

Within = Annotated[
    str,
    typer.Option(
        help="When jobs without a deadline are to end, such as 30m; default "
        "EMBEDFARM_ADVICE_WITHIN_SECONDS.",
        metavar="TIME",
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option("--max", help="Most workers of a kind; give it for each.", metavar="KIND=N"),
]
EPILOG = "The same is to be had by HTTP: GET /v1/advice, and in /metrics."


def advise(
    within: Within = "",
    bounds: Bounds = None,
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Say how many workers of each kind end the backlog in time at least cost, and why."""
    from embedfarm.watch.advice_reader import read_advice

    settings = _with_options(farm_settings(redis), within, bounds or [])
    with plain_errors(), closing_client(settings.redis_url) as client:
        advice = read_advice(FarmClient(client), settings)
    if as_json:
        print_json(asdict(advice))
    else:
        _tell(advice, Console(highlight=False, soft_wrap=True))


def _with_options(settings: Settings, within: str, bounds: list[str]) -> Settings:
    """Return settings that follow the options; wrong ones end the program."""
    most, seconds = dict(settings.advice_workers_max), settings.advice_within_seconds
    for bound in bounds:
        kind, _, count = bound.rpartition("=")
        if not count.isdecimal() or not re.fullmatch(KIND_PATTERN, kind):
            fail(f"--max {bound}: give a kind and a number, such as cpu=4", USAGE)
        most[kind] = int(count)
    if within:
        now = time.time()
        try:
            seconds = read_deadline(within, now) / 1000 - now
        except ValueError as error:
            fail(f"--within: {error}", USAGE)
        if seconds <= 0:
            fail(f"--within: {within} is no time to come", USAGE)
    changed = {"advice_workers_max": most, "advice_within_seconds": seconds}
    return settings.model_copy(update=changed)


def _tell(advice: "Advice", console: Console) -> None:
    """Print what to do with each kind, the figures behind it, and why."""
    for kind, each in advice.kinds.items():
        console.print(f"[bold]{escape(kind)}[/bold]: {_action(each)}")
    if not advice.kinds:
        console.print("no worker is advised, and no kind of worker is known")
    busy = {name: each for name, each in advice.models.items() if each.backlog_tokens}
    if busy:
        console.print()
        console.print(_table(busy))
        console.print()
    for name, model in busy.items():
        for reason in model.reasons:
            console.print(f"{escape(_short(name))}: {escape(reason)}.")
    if advice.cost:
        console.print(f"The time of these workers costs about {format_cost(advice.cost)}.")
    for reason in advice.reasons:
        console.print(f"[dim]{escape(reason[:1].upper() + reason[1:])}.[/dim]")


def _action(kind: "KindAdvice") -> str:
    """Say what to do about a kind, in words."""
    live, advised = kind.workers_live, kind.workers_advised
    there = f"{counted(advised, 'worker')} advised, {live:,} live"
    if advised > live:
        there += f": start {advised - live:,}"
    elif advised < live:
        there += f": stop {live - advised:,}"
    price = f", {format_cost(kind.cost_per_hour)} an hour each" if kind.cost_per_hour else ""
    most = "" if kind.workers_max is None else f", at most {kind.workers_max:,}"
    return there + price + most


def _table(models: "Mapping[str, ModelAdvice]") -> Table:
    """Return a table of the figures of each model and kind."""
    table = Table(box=None, pad_edge=False)
    for column in ("model", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("tokens left", "one worker", "loaded on", "needed", "advised"):
        table.add_column(column, justify="right")
    for name, model in models.items():
        tokens = format_count(model.backlog_tokens)
        for kind, each in model.kinds.items():
            seconds = each.backlog_seconds
            table.add_row(
                escape(_short(name)),
                escape(kind),
                tokens,
                "unknown" if seconds is None else format_seconds(seconds),
                f"{each.workers_ready:,}",
                f"{each.workers_needed:.2f}",
                f"{each.workers_advised:,}",
            )
    return table


def _short(name: str) -> str:
    """Return a model's name as it fits into a line."""
    return one_line(name, NAME_CHARACTERS_MAX)
