"""`embedfarm models`: the models that the farm's workers have loaded."""

from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from embedfarm.cli.options import AsJson, RedisUrl, farm_settings, plain_errors, print_json
from embedfarm.contract.broker import closing_client
from embedfarm.contract.encoding import as_dict
from embedfarm.contract.farm_client import FarmClient, model_rows
from embedfarm.contract.formatting import format_bytes, format_moment, format_seconds, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embedfarm.contract.model_states import ModelState

NAME_MAX: Final = 100  # characters
REASON_MAX: Final = 300

models_app = typer.Typer(
    help="List the models that workers have loaded, and why others are not.", no_args_is_help=True
)


@models_app.callback()
def _group() -> None:
    """Keep `ls` a verb of its own, though it is the only one."""


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
            each.state,
            format_bytes(each.bytes) if each.bytes else "",
            format_seconds(each.load_seconds) if each.state == "ready" else "",
            format_moment(each.since),
            escape(one_line(each.reason, REASON_MAX)),
        )
    return table
