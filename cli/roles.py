"""`embedfarm schedule | work | serve`: the long-running roles."""

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from embedfarm.cli.options import (
    USAGE,
    CpuWorkers,
    Devices,
    RedisUrl,
    fail,
    farm_settings,
    pin,
    plain_errors,
    settings_with_queue,
    stop_on_signals,
)
from embedfarm.cli.supervision import all_beat, keep, refuse_namesakes
from embedfarm.contract import tracing
from embedfarm.contract.broker import (
    UNAVAILABLE,
    closing_client,
    name_process,
    refuse_eviction,
    wait_until_ready,
)
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.process_log import send_log
from embedfarm.contract.processes import Supervisor, watch_parent_pipe
from embedfarm.contract.quick_imports import quick_imports
from embedfarm.contract.redaction import hide_password, start_logging
from embedfarm.contract.settings import EndpointType, Settings
from embedfarm.contract.systemd_notify import Notifier

if TYPE_CHECKING:
    from embedfarm.web.auth.keys import Key
    from embedfarm.web.services import Passes

LOOPBACK = "127.0.0.1"
PORT_MAX = 65_535
NO_CLUSTER = "endpoints need no cluster: leave out --on, or --endpoint and what goes with it"
NO_ENDPOINT = (
    "--model, --served-model, --dtype and --concurrency say what an endpoint has: give --endpoint, "
    "or leave them out; --pin has a device's worker load a model"
)

Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="MODEL", help="Model that stays once it is loaded."),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Server that embeds, in place of devices: what stands before /embeddings.",
    ),
]
EndpointModel = Annotated[
    str, typer.Option(metavar="MODEL", help="Model of the endpoints, as jobs name it.")
]
ServedModel = Annotated[
    str, typer.Option(metavar="NAME", help="The same model, as the endpoints name it.")
]
EndpointDtype = Annotated[
    EndpointType | None, typer.Option(help="Type that the endpoints compute in.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests to an endpoint at a time.")]
Cluster = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="Work on the hosts of a cluster, not on this one: ray for the Ray cluster that this "
        "host is of, ray://HOST:10001 for another one. There --devices is all, gpu or cpu, and "
        "--workers N asks for N of them (deploy/ray).",
    ),
]
ActorCpus = Annotated[
    int,
    typer.Option(
        min=0,
        help="CPUs that each actor on a cluster asks for; 0: its node's, or 4 with --workers.",
    ),
]


def schedule(redis: RedisUrl = "") -> None:
    """Run a scheduler; of several, one is active and the others stand by."""
    from embedfarm.scheduler.loop import run_alone

    settings = farm_settings(redis)
    url = settings.redis_url
    stop = stop_on_signals()
    notifier = Notifier()
    start_logging(logging.INFO)
    with plain_errors():
        wait_until_ready(url, stop, settings.reconnect_seconds_max)
        send_log(url, name_process("scheduler"))
        run_alone(url, settings, stop, notifier)


def work(  # noqa: PLR0913, PLR0917 -- each is a flag
    redis: RedisUrl = "",
    devices: Devices = "all",
    workers: CpuWorkers = 0,
    pins: Pins = None,
    endpoint: Endpoints = None,
    model: EndpointModel = "",
    served_model: ServedModel = "",
    dtype: EndpointDtype = None,
    concurrency: Concurrency = None,
    on: Cluster = "",
    cpus: ActorCpus = 0,
) -> None:
    """Run one worker process per device of this host, per endpoint, or of a Ray cluster."""
    from embedfarm.workers.device_groups import choose_devices
    from embedfarm.workers.devices import endpoints
    from embedfarm.workers.supervisor import children, tell_exits

    settings = pin(farm_settings(redis), pins or [])
    url = settings.redis_url
    given = {
        "endpoint_model": model,
        "endpoint_served_model": served_model,
        "endpoint_dtype": dtype,
        "endpoint_requests_max": concurrency,
    }
    settings = settings.model_copy(update={name: each for name, each in given.items() if each})
    if cpus and not on:
        fail("--cpus is for workers on a cluster: give --on, or leave it out", USAGE)
    if on:
        from embedfarm.cli.cluster import work_on

        if endpoint or any(given.values()):
            fail(NO_CLUSTER, USAGE)
        work_on(on, devices, workers, cpus, settings)
        return
    urls = endpoint or [each for each in [settings.endpoint_url] if each]
    if urls and not settings.endpoint_model:
        fail("which model is it that the endpoints have? give --model MODEL", USAGE)
    if any(given.values()) and not urls:
        fail(NO_ENDPOINT, USAGE)
    stop = stop_on_signals()
    watch_parent_pipe(stop.set)
    notifier = Notifier()  # before there are children, which must not speak in its name
    with plain_errors(), closing_client(url) as client:
        chosen = endpoints(urls) if urls else choose_devices(devices, workers, settings)
        wait_until_ready(url, stop, settings.reconnect_seconds_max)
        farm, labels = FarmClient(client), [device.label for device in chosen]
        refuse_namesakes(farm, labels, settings, stop)
        logs = settings.state_directory.expanduser() / "logs"
        told, drain_seconds = tell_exits(url), settings.drain_seconds
        with Supervisor(
            children(chosen, settings), logs, drain_seconds, on_exit=told
        ) as supervisor:
            title = f"working on {', '.join(labels)}"
            console = Console(highlight=False, soft_wrap=True)
            console.print(f"{title} for {hide_password(url)}; logs in {logs}")
            ready = partial(_all_work, supervisor, farm, len(chosen))
            tick = partial(notifier.tick, title)
            keep(stop, lambda: supervisor.failed or supervisor.unstartable(), ready, tick)
            notifier.stop()


def _all_work(supervisor: Supervisor, farm: FarmClient, count: int) -> bool:
    """Tell whether all workers of this host run, and have sent a heartbeat."""
    pids = supervisor.pids.values()
    return len(pids) == count and all_beat(farm, pids)


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback only with keys.")
    ] = LOOPBACK,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=PORT_MAX, help="Port to listen on; 0 takes a free one and prints it."
        ),
    ] = 8080,
    redis: RedisUrl = "",
) -> None:
    """Serve the farm by HTTP: jobs, the OpenAI and TEI protocols, metrics."""
    with quick_imports():
        from embedfarm.web.app import create_app
        from embedfarm.web.server import listen, make_server

    settings = settings_with_queue(redis)
    url = settings.redis_url
    keys = _keys(host, settings)
    stop_on_signals()  # uvicorn raises them again at its end
    tracing.start(settings.traces, "serve")
    start_logging(logging.INFO)
    # A server that is away now is no reason not to serve: `/readyz` says so.
    with plain_errors(), contextlib.suppress(*UNAVAILABLE), closing_client(url) as client:
        refuse_eviction(client)
    try:
        listener = listen(host, port)
    except OSError as error:
        fail(f"cannot listen at {host}, port {port}: {error}", USAGE)
    send_log(url, name_process("web"))
    app = create_app(settings, keys, _passes(settings))
    server = make_server(app, settings, Notifier())
    watch_parent_pipe(lambda: setattr(server, "should_exit", True))
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"serving http://{shown}:{listener.getsockname()[1]} for {hide_password(url)}")
    server.run([listener])


def _keys(host: str, settings: Settings) -> "list[Key]":
    """Read the API keys that HTTP asks for; on loopback there may be none."""
    from embedfarm.web.auth.keys import KeysError, read_keys
    from embedfarm.web.gate import is_loopback

    try:
        keys = read_keys(settings.keys_file.expanduser()) if settings.keys_file else []
    except KeysError as error:
        fail(str(error), USAGE)
    if not keys and (settings.keys_file or not is_loopback(host)):
        where = (
            f"{settings.keys_file} has none" if settings.keys_file else "set EMBEDFARM_KEYS_FILE"
        )
        fail(f"{host} may be reached by others, so API keys are needed: {where}", USAGE)
    return keys


def _passes(settings: Settings) -> "Passes":
    """Return the passes that the scheduler of this installation has, and how to check a list."""
    from embedfarm.scheduler.policies import DEFAULT_POLICY, POLICIES, check_policy, pass_names
    from embedfarm.web.services import Passes

    return Passes(
        pass_names(), POLICIES[DEFAULT_POLICY], lambda names: check_policy(names, settings)
    )
