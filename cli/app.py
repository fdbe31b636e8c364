"""The verbs of the command line, as one typer app; each is imported when it is used."""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from embedfarm.contract.quick_imports import quick_imports

HELP: Final = "Turn a corpus into vectors on every device you have."


class Verb(NamedTuple):
    """A verb, or a group of them.

    Attributes:
        place: Module below `embedfarm.cli`, and the name of its function or typer app there.
        help: What it does, in a sentence: the first of what its own `--help` says.
    """

    place: tuple[str, str]
    help: str


VERBS: Final = {
    "embed": Verb(
        ("embed", "embed"),
        "Embed a corpus, without a server on a private farm; run it again to resume.",
    ),
    "batch": Verb(
        ("batch", "batch"),
        "Answer a file of OpenAI embedding requests on a shared farm; run it again to resume.",
    ),
    "verify": Verb(
        ("outputs", "verify"),
        "Check that an output is complete and undamaged, and that it belongs to its corpus.",
    ),
    "check": Verb(
        ("outputs", "check"),
        "Tell whether a model still makes the vectors of an output, and what differs if not.",
    ),
    "search": Verb(
        ("outputs", "search"),
        "Find the chunks nearest to a query, by exact cosine over all vectors.",
    ),
    "export": Verb(
        ("outputs", "export"),
        "Write a finished output in another format, or to a store, with nothing embedded again.",
    ),
    "reconcile": Verb(
        ("reconcile", "reconcile"),
        "Say where the chunks of a job are; on the host of its output, send lost ones again.",
    ),
    "bench": Verb(
        ("bench", "bench"),
        "Try engines and precisions on some texts: how fast each is, and what it loses.",
    ),
    "simulate": Verb(
        ("simulate", "simulate"),
        "Run the scheduler's own core against modelled workers, on a virtual clock.",
    ),
    "up": Verb(
        ("up", "up"),
        "Run a whole farm on this machine until it is stopped; other verbs here find it.",
    ),
    "schedule": Verb(
        ("roles", "schedule"),
        "Run a scheduler; of several, one is active and the others stand by.",
    ),
    "work": Verb(
        ("roles", "work"),
        "Run one worker process per device of this host, per endpoint, or of a Ray cluster.",
    ),
    "ingest": Verb(
        ("ingest", "ingest"),
        "Run jobs that programs enqueue with RQ, and those of the setting `recurring`.",
    ),
    "serve": Verb(
        ("roles", "serve"),
        "Serve the farm by HTTP: jobs, the OpenAI and TEI protocols, metrics.",
    ),
    "top": Verb(
        ("top", "top"),
        "Show the farm at a glance, live; one snapshot with --json, or where there is no terminal.",
    ),
    "advise": Verb(
        ("advise", "advise"),
        "Say how many workers of each kind end the backlog in time at least cost, and why.",
    ),
    "workers": Verb(("inspection", "workers"), "List the workers that are alive."),
    "models": Verb(
        ("models", "models_app"),
        "List the models that workers have loaded, and have them loaded, kept and unloaded.",
    ),
    "devices": Verb(
        ("inspection", "devices"),
        "List the devices of this host, or say why there are no GPUs.",
    ),
    "doctor": Verb(
        ("inspection", "doctor"),
        "Check what a farm on this machine needs; exit with status 1 when something will not work.",
    ),
    "keys": Verb(("keys", "keys_app"), "Make and list API keys."),
    "scheduler": Verb(
        ("scheduler", "scheduler_app"),
        "Show the scheduler's figures and decisions, and choose its passes.",
    ),
    "jobs": Verb(("jobs", "jobs_app"), "List, show and steer the farm's jobs."),
}


class Verbs(TyperGroup):
    """A group that imports a verb when it is used, and none of them to list them."""

    _lists = False

    def list_commands(self, _ctx: Any) -> list[str]:  # noqa: ANN401 # typer keeps its types for itself
        """Return the names of the verbs, in the order in which they are listed."""
        return list(VERBS)

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 # the same
        """Return a verb, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        verb = VERBS[cmd_name]
        if self._lists:
            return TyperCommand(cmd_name, help=verb.help)
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name, verb)
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 # the same
        """Write the help, for which the sentences about the verbs are enough."""
        self._lists = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists = False


def _load(name: str, verb: Verb) -> Any:  # noqa: ANN401 # the same
    """Import a verb and return its command."""
    module, attribute = verb.place
    with quick_imports():
        found = import_module(f"embedfarm.cli.{module}")
    target = getattr(found, attribute)
    if isinstance(target, typer.Typer):
        command: Any = get_group(target)
    else:
        alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        alone.command(epilog=getattr(found, "EPILOG", None))(target)
        command = get_command(alone)
    command.name = name
    return command


app = typer.Typer(
    name="embedfarm",
    help=HELP,
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _tell_version(wanted: bool) -> None:  # noqa: FBT001 # typer calls it so
    """Print the version and end, where it was asked for."""
    if wanted:
        typer.echo(f"embedfarm {version('embedfarm')}")
        raise typer.Exit


@app.callback()
def main(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version."),
    ] = False,
) -> None:
    """Turn a corpus into vectors on every device you have."""
