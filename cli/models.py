"""`embedfarm models`: what workers have loaded, and what people want of them."""

import threading
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embedfarm.cli.options import (
    FAILED,
    AsJson,
    RedisUrl,
    fail,
    farm_settings,
    plain_errors,
    print_json,
)
from embedfarm.contract.broker import closing_client
from embedfarm.contract.encoding import as_dict
from embedfarm.contract.farm_client import FarmClient, model_rows
from embedfarm.contract.formatting import format_bytes, format_moment, format_seconds, one_line
from embedfarm.contract.model_counts import ModelCounts
from embedfarm.contract.model_orders import NO_ORDER, ModelOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from embedfarm.contract.model_states import ModelState

LOOK_SECONDS: Final = 0.2
NAME_MAX: Final = 100  # characters
REASON_MAX: Final = 300

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name as jobs have it.")]
WaitSeconds = Annotated[float, typer.Option(min=0, help="Longest to wait, in seconds.")]

models_app = typer.Typer(
    help="List the models that workers have loaded, and have them loaded, kept and unloaded.",
    no_args_is_help=True,
)


@models_app.command("ls")
def list_models(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """List the models of each worker: loaded, being loaded, or failed to load."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        rows = model_rows(FarmClient(client).workers())
    if as_json:
        print_json([{"worker": worker} | as_dict(each) for worker, each in rows])
    elif rows:
        Console(highlight=False).print(_model_table(rows))
    else:
        typer.echo("no worker has loaded a model yet")


@models_app.command("show")
def show_model(model: ModelName, redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Show what people want of a model, what it is on each worker, and what was done with it."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        order = farm.models.all().get(model, NO_ORDER)
        rows = _rows_of(farm, model)
        counts = farm.model_counts.all().get(model, ModelCounts())
    if as_json:
        workers = [{"worker": worker} | as_dict(each) for worker, each in rows]
        whole = {"model": model, "order": as_dict(order), "workers": workers}
        print_json(whole | {"counts": counts._asdict()})
        return
    typer.echo(_wanted(order))
    typer.echo(_done(counts))
    if rows:
        Console(highlight=False).print(_model_table(rows))
    else:
        typer.echo("no worker has it, or has tried to load it")


def _wanted(order: ModelOrder) -> str:
    """Return what is wanted of a model, in words."""
    words = []
    if order.loaded:
        words.append(f"wanted on all workers since {format_moment(order.load_at)}")
    if order.pinned:
        words.append("pinned")
    if order.unload_at > order.load_at:
        words.append(f"unloaded by hand at {format_moment(order.unload_at)}")
    return ", ".join(words) or "nobody has asked for it but jobs and requests"


def _done(counts: ModelCounts) -> str:
    """Return what all workers together have done with a model, in words."""
    if not counts.loads:
        return "no worker has loaded it yet"
    mean = format_seconds(counts.load_seconds / counts.loads)
    return (
        f"loaded {counts.loads:,} times, in {mean} on average; unloaded {counts.unloads_room:,} "
        f"times for another model, {counts.unloads_idle:,} as idle, {counts.unloads_order:,} by "
        f"order; {counts.requests:,} requests, {counts.texts_full:,} texts that filled it"
    )


@models_app.command("load")
def load_model(model: ModelName, redis: RedisUrl = "", wait: WaitSeconds = 600.0) -> None:
    """Have every worker load a model that can, and wait until each has, or says why not."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        at = farm.models.load(model)
        if not farm.workers():
            fail("no worker is alive; each that starts will load it")
        _wait(wait, lambda: not _missing(farm, model, at))
        left = _missing(farm, model, at)
        rows = _rows_of(farm, model)
    ready = {worker for worker, each in rows if each.state == "ready"}
    failed = [row for row in rows if row[0] not in ready and _failed(row[1], at)]
    for worker, each in failed:
        typer.echo(f"{worker} cannot load it: {each.reason}", err=True)
    if left:
        fail(f"not loaded yet, but wanted, on {', '.join(left)}: what they work for is in its way")
    if failed:
        raise typer.Exit(FAILED)
    typer.echo(f"{model} is loaded")


@models_app.command("unload")
def unload_model(model: ModelName, redis: RedisUrl = "", wait: WaitSeconds = 60.0) -> None:
    """Have every worker unload a model that no work needs, and wait until each has."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        farm = FarmClient(client)
        at = farm.models.unload(model)
        _wait(wait, lambda: not _having(farm, model, at))
        left = _having(farm, model, at)
    if left:
        fail(f"work needs it on {', '.join(left)}; it goes when that is done")
    typer.echo(f"{model} is unloaded")


@models_app.command("pin")
def pin_model(model: ModelName, redis: RedisUrl = "") -> None:
    """Have a model stay wherever it is loaded, until it is unpinned or unloaded."""
    _pin(model, redis, pinned=True)


@models_app.command("unpin")
def unpin_model(model: ModelName, redis: RedisUrl = "") -> None:
    """Let a model go when its memory is wanted, or nobody uses it."""
    _pin(model, redis, pinned=False)


def _pin(model: str, redis: str, *, pinned: bool) -> None:
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        FarmClient(client).models.pin(model, pinned=pinned)
    typer.echo(f"{model} is {'pinned' if pinned else 'pinned no longer'}")


def _rows_of(farm: FarmClient, model: str) -> "list[tuple[str, ModelState]]":
    """Return the states of one model, whatever its type and engine, by worker."""
    return [row for row in model_rows(farm.workers()) if row[1].model.partition("|")[0] == model]


def _missing(farm: FarmClient, model: str, at: float) -> list[str]:
    """Return the live workers that neither have a model nor have failed to load it since then."""
    rows = _rows_of(farm, model)
    settled = {worker for worker, each in rows if each.state == "ready" or _failed(each, at)}
    return sorted({beat.worker for beat in farm.workers()} - settled)


def _failed(state: "ModelState", at: float) -> bool:
    return state.state == "failed" and state.since >= at


def _having(farm: FarmClient, model: str, at: float) -> list[str]:
    """Return the workers that have a model since before then."""
    rows = _rows_of(farm, model)
    return [worker for worker, each in rows if each.state == "ready" and each.since < at]


def _wait(seconds: float, done: "Callable[[], bool]") -> None:
    """Wait until something is done, at most for so long."""
    end, wait = time.monotonic() + seconds, threading.Event()
    while not done() and time.monotonic() < end:
        wait.wait(LOOK_SECONDS)


def _model_table(rows: "Sequence[tuple[str, ModelState]]") -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "worker", "state"):
        table.add_column(name)
    for name in ("memory", "loaded in"):
        table.add_column(name, justify="right")
    table.add_column("since")
    table.add_column("why")
    for worker, each in rows:
        table.add_row(
            escape(one_line(each.model.partition("|")[0], NAME_MAX)),
            worker,
            f"{each.state}, pinned" if each.pinned else each.state,
            format_bytes(each.bytes) if each.bytes else "",
            format_seconds(each.load_seconds) if each.state == "ready" else "",
            format_moment(each.since),
            escape(one_line(each.reason, REASON_MAX)),
        )
    return table
