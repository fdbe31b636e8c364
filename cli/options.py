"""Options that several verbs share, and how every verb ends."""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import redis
import typer
from pydantic import ValidationError

from embedfarm.contract import tracing
from embedfarm.contract.broker import SERVER_DIRECTORY, PrivateServer
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.processes import set_by_signal
from embedfarm.contract.redaction import hide_in_word, hide_secrets
from embedfarm.contract.server_url import UrlError, is_cluster, make_pool
from embedfarm.contract.settings import Settings, UntrustedFile, misspelt
from embedfarm.contract.status import JobGone

ID_CHARACTERS_MIN = 8  # that are shown of an id
FAILED, USAGE, FAILED_CHUNKS, LIMITED, FULL, INTERRUPTED = 1, 2, 3, 4, 75, 130

RedisUrl = Annotated[
    str, typer.Option("--redis", help="Server URL; default EMBEDFARM_REDIS_URL.", metavar="URL")
]
Devices = Annotated[
    str,
    typer.Option(
        help="all, cpu, or GPU indices and UUIDs with commas between; 0+1 is one worker on two; "
        "auto: all, as many together as a pinned model needs."
    ),
]
CpuWorkers = Annotated[
    int, typer.Option("--workers", min=0, help="CPU workers; 0: two, or one per four cores.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def read_settings(redis_url: str = "") -> Settings:
    """Read the settings, with the server's URL of the flag if given; wrong ones end the program."""
    for name, meant in misspelt(os.environ).items():
        fail(f"settings: there is no {name}; {meant} is meant, it seems", USAGE)
    try:
        settings = Settings()
    except (ValidationError, UntrustedFile) as error:
        fail(f"settings: {error}", USAGE)
    if settings.traces and not tracing.is_installed():
        fail("settings: traces need the packages of embedfarm[traces], which are missing", USAGE)
    url = redis_url or settings.redis_url
    for name, each in (("the server's URL", url), ("queue_url", settings.queue_url)):
        try:
            if each:
                make_pool(each)
        except UrlError as error:
            fail(f"{name}: {error}", USAGE)
    return settings.model_copy(update={"redis_url": url})


def farm_settings(redis_url: str) -> Settings:
    """Read the settings; their server is the one given, or else of `embedfarm up` on this machine.

    The program ends where there is neither.
    """
    settings = read_settings(redis_url)
    if settings.redis_url:
        return settings
    url = url_of_up(settings)
    if not url:
        fail(
            "which server? give --redis URL or set EMBEDFARM_REDIS_URL; `embedfarm up` starts a "
            "farm on this machine, which is found without",
            USAGE,
        )
    return settings.model_copy(update={"redis_url": url})


def settings_with_queue(redis_url: str) -> Settings:
    """Read the settings as `farm_settings` does, for a role that needs RQ's queue.

    The program ends where the queue would be on a cluster.
    """
    settings = farm_settings(redis_url)
    if is_cluster(settings.queue_server):
        fail(
            "RQ, by which jobs come in, does not run on a cluster: name another server for its "
            "queue by EMBEDFARM_QUEUE_URL",
            USAGE,
        )
    return settings


def url_of_up(settings: Settings) -> str:
    """Return the URL of the server of `embedfarm up` on this machine; "" where it does not run."""
    server = PrivateServer.found(settings.state_directory.expanduser() / SERVER_DIRECTORY)
    return server.url if server is not None and server.alive() else ""


def fail(message: str, status: int = FAILED) -> NoReturn:
    """End the program with a sentence on standard error; secrets of URLs are not in it."""
    typer.echo(f"embedfarm: {hide_secrets(message)}", err=True)
    raise typer.Exit(status)


def pin(settings: Settings, models: Sequence[str]) -> Settings:
    """Return settings by which workers keep some models once they are loaded."""
    return settings.model_copy(update={"models_pinned": (*settings.models_pinned, *models)})


def print_json(value: Any) -> None:  # noqa: ANN401 -- anything that JSON can say
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=2, default=str))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what can go wrong outside the program into a sentence and a status."""
    try:
        yield
    except JobGone as error:
        fail(f"no such job: {error}", error.exit_status)
    except EmbedfarmError as error:
        fail(str(error), error.exit_status)
    except OSError as error:
        fail(str(error))
    except redis.AuthenticationError as error:
        fail(f"the server refused the password: {error}", USAGE)
    except redis.RedisError as error:
        fail(f"the server: {error}")


def command_line() -> str:
    """Return how this program was called, without its server and the secrets of other URLs."""
    words = ["embedfarm", *map(hide_in_word, sys.argv[1:])]
    if "--redis" in words:
        place = words.index("--redis")
        del words[place : place + 2]
    words = [word for word in words if not word.startswith("--redis=")]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; a second signal ends the program at once."""
    stop = threading.Event()
    asked = False

    def handle(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            sys.exit(128 + number)
        asked = True
        set_by_signal(stop)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def shorten_id(job: str, ids: Iterable[str]) -> str:
    """Return the beginning of a job's id, of 8 characters or more, that no other id has."""
    others = [each for each in ids if each != job]
    sizes = range(ID_CHARACTERS_MIN, len(job))
    return next((job[:n] for n in sizes if not any(o.startswith(job[:n]) for o in others)), job)
