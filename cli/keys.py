"""`embedfarm keys`: who may use the farm by HTTP."""

from typing import Annotated

import typer

from embedfarm.cli.options import USAGE, AsJson, fail, print_json

keys_app = typer.Typer(help="Make and list API keys.", no_args_is_help=True)


@keys_app.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner, which logs show.")],
    scopes: Annotated[
        str, typer.Option(help="Scopes: submit, read, admin (all), with commas between.")
    ] = "submit,read",
    tenant: Annotated[
        str,
        typer.Option(
            help="Tenant whose jobs and files the key is for; without one it is an operator's."
        ),
    ] = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Make a key; it is shown once, and kept nowhere: only its line in the file of keys is."""
    from embedfarm.web.auth.keys import KeysError, make_key

    try:
        secret, key = make_key(name, scopes.split(","), tenant or None)
    except KeysError as error:
        fail(str(error), USAGE)
    if as_json:
        facts = {"name": key.name, "scopes": sorted(key.scopes), "tenant": key.tenant}
        print_json({**facts, "key": secret, "line": key.line()})
        return
    typer.echo(f"key:  {secret}")
    typer.echo(f"line: {key.line()}")
    typer.echo("Give the key to who asks, and add the line to the file EMBEDFARM_KEYS_FILE,")
    typer.echo("which `serve` reads again when it changes.")
